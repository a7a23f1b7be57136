"""Prompts: files and stdin in, left-padded token ids out."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import InputError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

Message = dict[str, str]
KEYS = ("prompt", "text", "question", "turns", "messages")


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        index: place in the input, from 0.
        text: what the user asks; of a chat, the last message.
        messages: the whole chat, or None for a plain text.
    """

    index: int
    text: str
    messages: list[Message] | None = None


def read(source: str) -> list[Prompt]:
    """Read prompts from a ``.txt`` or ``.jsonl`` file, or from stdin (``-``).

    A ``.txt`` file holds a prompt a line. A ``.jsonl`` line is an object with one of ``prompt``, ``text``,
    ``question``, ``turns`` (the first is used) or ``messages``; where several are present the first of these
    counts, and blank lines are skipped. Stdin is JSONL if its first non-blank line is a JSON object.

    Raises:
        InputError: the source cannot be read, is not UTF-8, has no prompts, or a line is bad (named by number).
    """
    name = "stdin" if source == "-" else source
    lines = _read_text(source, name).split("\n")
    if not any(map(str.strip, lines)):
        raise InputError(f"{name} has no prompts")
    if _is_jsonl(source, lines):
        return _parse_jsonl(name, lines)
    while not lines[-1].strip():
        lines.pop()
    return [Prompt(i, _checked(line.rstrip("\r"), f"{name} line {i + 1}")) for i, line in enumerate(lines)]


def encode(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, chat: bool) -> list[list[int]]:
    """Token ids of each prompt, unpadded.

    Args:
        prompts: what ``read`` returned.
        tokenizer: the target's.
        chat: render each prompt with the chat template: an assistant turn is opened, or left open where the last
            message is one.

    Raises:
        InputError: a chat without a template to render it, or a prompt without tokens.
    """
    if chat and not tokenizer.chat_template:
        raise InputError("the tokenizer has no chat template; use --no-chat")
    rows = []
    for prompt in prompts:
        ids = _encode_chat(prompt, tokenizer) if chat else _encode_text(prompt, tokenizer)
        if not ids:
            raise InputError(f"prompt {prompt.index} has no tokens")
        rows.append(ids)
    return rows


def check_context(rows: Sequence[Sequence[int]], config: PretrainedConfig, max_new_tokens: int) -> None:
    """Raise ``InputError`` for a row that does not fit the model's context together with its new tokens."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    for index, row in enumerate(rows):
        if context is not None and len(row) + max_new_tokens > context:
            raise InputError(
                f"prompt {index} is too long: {len(row)} tokens and {max_new_tokens} new ones (--max-new-tokens) "
                f"do not fit the {config.model_type} model's context of {context}"
            )


def pad_left(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-pad ragged rows.

    Returns:
        ``input_ids`` and ``attention_mask``, both ``[B, P]`` int64. The mask comes from the lengths, so ``pad_id``
        may occur in the text.
    """
    import torch

    width = max(map(len, rows))
    ids = torch.tensor([[pad_id] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def _read_text(source: str, name: str) -> str:
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read prompts from {name}: {error.strerror}") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{name} line {line} is not UTF-8") from error


def _is_jsonl(source: str, lines: list[str]) -> bool:
    suffix = Path(source).suffix.lower()
    if suffix not in ("", ".txt", ".jsonl"):
        raise InputError(f"prompts must be a .txt or .jsonl file or - for stdin, not {source}")
    if suffix:
        return suffix == ".jsonl"
    first = next(line for line in lines if line.strip())
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _parse_jsonl(name: str, lines: list[str]) -> list[Prompt]:
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{name} line {number}"
            prompts.append(_parse_record(len(prompts), _loads(line, where), where))
    return prompts


def _loads(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not valid JSON: {error}") from error


def _parse_record(index: int, record: Any, where: str) -> Prompt:
    if not isinstance(record, dict):
        raise InputError(f"{where} must be a JSON object, not {type(record).__name__}")
    key = next((key for key in KEYS if key in record), None)
    if key is None:
        raise InputError(f"{where} has none of the keys {', '.join(KEYS)}")
    value = record[key]
    if key in ("turns", "messages") and not (isinstance(value, list) and value):
        raise InputError(f"{where}: {key} must be a list that is not empty")
    if key == "messages":
        messages = [_parse_message(message, where) for message in value]
        return Prompt(index, _checked(messages[-1]["content"], f"{where}: the last message"), messages)
    return Prompt(index, _checked(value[0] if key == "turns" else value, f"{where}: {key}"))


def _parse_message(message: Any, where: str) -> Message:
    if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
        raise InputError(f"{where}: each message must be an object with role and content, both strings")
    return {"role": message["role"], "content": message["content"]}


def _checked(text: Any, where: str) -> str:
    if not isinstance(text, str):
        raise InputError(f"{where} must be a string, not {type(text).__name__}")
    if not text.strip():
        raise InputError(f"{where} is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where} has a surrogate that is no character") from error
    return text


def _encode_text(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if prompt.messages is not None:
        raise InputError(f"prompt {prompt.index} is a list of messages, which needs a chat template and --chat")
    return tokenizer(prompt.text)["input_ids"]


def _encode_chat(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    messages = prompt.messages or [{"role": "user", "content": prompt.text}]
    begun = messages[-1]["role"] == "assistant"
    try:
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=not begun, continue_final_message=begun, tokenize=True, return_dict=True
        )
    except Exception as error:
        # templates are programs of their own: they raise what they like, for instance on roles out of turn
        raise InputError(f"the chat template rejects prompt {prompt.index}: {error}") from error
    return encoded["input_ids"]
