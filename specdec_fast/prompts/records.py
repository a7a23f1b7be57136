"""Records of prompt files, in the shapes that several tools write."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InputError
from .options import refuse_options

Message = dict[str, Any]
Fields = dict[str, Any]
# takes what it reads out of the fields of a record
Reader = Callable[[Fields, str], Fields]
_SHAREGPT_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
_TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        index: place in the input, from 0.
        text: what is continued; of a chat the last message, of token ids their JSON.
        messages: the whole chat, or None.
        token_ids: tokens to continue as they are, or None.
        fields: what else its record holds, for the output.
        error: why its line cannot be used, or None.
    """

    index: int
    text: str
    messages: list[Message] | None = None
    token_ids: list[int] | None = None
    fields: Fields = field(default_factory=dict)
    error: str | None = None

    @property
    def is_text(self) -> bool:
        return self.messages is None and self.token_ids is None


def parse(index: int, record: Any, where: str) -> Prompt:
    """The prompt of a JSON object, which holds one of these; of several, the first counts.

    - ``prompt``: a text, a chat (list of messages) or token ids; the newest of ``messages`` stands for all of them
    - ``instruction`` and perhaps ``input`` (Alpaca): joined by a newline
    - ``text`` or ``question``: a text
    - ``turns``: a list of texts, of which the first is asked
    - ``messages``: a list of ``role`` and ``content``, a text or text parts
    - ``conversations``: a list of ``from`` and ``value`` (ShareGPT); the recorded answer at its end is not asked
    - ``input_ids``: token ids
    - ``body``: a request of an OpenAI batch file, with ``messages`` or ``prompt``

    Raises:
        InputError: none of these, a value that cannot be used, or an option that is not served per prompt.
    """
    if not isinstance(record, dict):
        raise InputError(f"{where} must be a JSON object, not {type(record).__name__}")
    refuse_options(record, where)
    content, fields = _content(record, where, _READERS)
    if not _is_encodable([content, fields]):
        raise InputError(f"{where} has a surrogate that is no character")
    return Prompt(index, fields=fields, **content)


def checked(text: Any, where: str) -> str:
    """``text`` itself, or ``InputError`` if it is none."""
    if not isinstance(text, str):
        raise InputError(f"{where} must be a string, not {type(text).__name__}")
    if not text.strip():
        raise InputError(f"{where} is empty")
    if not _is_encodable(text):
        raise InputError(f"{where} has a surrogate that is no character")
    return text


def returnable(raw: str) -> Fields:
    """The record of a bad line; empty if it cannot be returned."""
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) and _is_encodable(record) else {}


def _is_encodable(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _content(record: Fields, where: str, readers: Mapping[str, Reader]) -> tuple[Fields, Fields]:
    """Content of a prompt, and the fields that were not read whole."""
    fields = dict(record)
    key = next((key for key in readers if key in fields), None)
    if key is None:
        raise InputError(f"{where} has none of the keys {', '.join(readers)}")
    return readers[key](fields, where), fields


def _prompt(fields: Fields, where: str) -> Fields:
    value = fields.pop("prompt")
    if isinstance(value, str) and _is_newest(value, fields.get("messages")):
        return _messages(fields, where)
    if not isinstance(value, list):
        return {"text": checked(value, f"{where}: prompt")}
    return _token_ids(value, where) if value and type(value[0]) is int else _chat(value, f"{where}: prompt", where)


def _is_newest(text: str, messages: Any) -> bool:
    """``messages`` are the chat that ends with ``text``, as our own output lines have it."""
    newest = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(newest, dict) and newest.get("content") == text


def _instruction(fields: Fields, where: str) -> Fields:
    text = checked(fields.pop("instruction"), f"{where}: instruction")
    more = fields.pop("input", None)
    return {"text": f"{text}\n{checked(more, f'{where}: input')}" if more else text}


def _text(fields: Fields, where: str) -> Fields:
    return {"text": checked(fields.pop("text"), f"{where}: text")}


def _question(fields: Fields, where: str) -> Fields:
    return {"text": checked(fields.pop("question"), f"{where}: question")}


def _turns(fields: Fields, where: str) -> Fields:
    return {"text": checked(_filled(fields["turns"], f"{where}: turns")[0], f"{where}: turns")}


def _messages(fields: Fields, where: str) -> Fields:
    return _chat(fields.pop("messages"), f"{where}: messages", where)


def _conversations(fields: Fields, where: str) -> Fields:
    turns = _filled(fields["conversations"], f"{where}: conversations")
    messages = [_from_sharegpt(turn, where) for turn in turns]
    if len(messages) > 1 and messages[-1].get("role") == "assistant":
        messages.pop()
    return _chat(messages, f"{where}: conversations", where)


def _input_ids(fields: Fields, where: str) -> Fields:
    mask = fields.get("attention_mask")
    if isinstance(mask, list) and not all(mask):
        raise InputError(f"{where}: attention_mask hides tokens; give input_ids without padding")
    return _token_ids(fields.pop("input_ids"), where)


def _body(fields: Fields, where: str) -> Fields:
    body = fields["body"]
    if not isinstance(body, dict):
        raise InputError(f"{where}: body must be an object, not {type(body).__name__}")
    refuse_options(body, f"{where}: body")
    content, fields["body"] = _content(body, f"{where}: body", {"messages": _messages, "prompt": _prompt})
    return content


_READERS = {
    "prompt": _prompt,
    "instruction": _instruction,
    "text": _text,
    "question": _question,
    "turns": _turns,
    "messages": _messages,
    "conversations": _conversations,
    "input_ids": _input_ids,
    "body": _body,
}


def _token_ids(value: Any, where: str) -> Fields:
    if not (isinstance(value, list) and value and all(type(token) is int and token >= 0 for token in value)):
        raise InputError(f"{where}: token ids must be a list of integers of at least 0 that is not empty")
    return {"text": json.dumps(value), "token_ids": value}


def _filled(value: Any, where: str) -> list[Any]:
    if not (isinstance(value, list) and value):
        raise InputError(f"{where} must be a list that is not empty")
    return value


def _chat(value: Any, what: str, where: str) -> Fields:
    messages = [_message(message, where) for message in _filled(value, what)]
    return {"text": checked(messages[-1]["content"], f"{where}: the last message"), "messages": messages}


def _message(message: Any, where: str) -> Message:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, str | list) or not isinstance(message.get("role"), str):
        raise InputError(
            f"{where}: each message must be an object with role and content, both strings, or content a list of parts"
        )
    return message | {"content": content if isinstance(content, str) else "".join(_part(p, where) for p in content)}


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
        raise InputError(f"{where}: content has a part of type {kind}; only text parts can be read")
    return part["text"]


def _from_sharegpt(turn: Any, where: str) -> Any:
    if not isinstance(turn, dict) or "from" not in turn:
        return turn
    if turn["from"] not in _SHAREGPT_ROLES:
        raise InputError(f"{where}: from is {turn['from']!r}; need one of {', '.join(_SHAREGPT_ROLES)}")
    return {"role": _SHAREGPT_ROLES[turn["from"]], "content": turn.get("value")}
