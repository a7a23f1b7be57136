"""A client of OpenAI-compatible completions servers: greedy, and strict about what comes back."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from ..errors import EndpointError, InputError

KEY_VARIABLE = "OPENAI_API_KEY"
Fields = dict[str, Any]
OPTIONAL: Fields = {"seed": 0, "logprobs": 2, "return_token_ids": True}
"""Options that make an audit sharper; not every server takes them all (``return_token_ids`` is vLLM's)."""
_REFUSED = (400, 422, 501)
_QUOTED = 300


@dataclass(frozen=True)
class Completion:
    """A server's answer to one prompt; None stands for anything it does not say.

    Attributes:
        text: the new text.
        finish_reason: in the server's words, empty if it has none.
        token_ids: ids of the new tokens.
        tokens: the new tokens as text.
        top: at each new token, its largest logprobs in descending order, two at most.
        prompt_ids: token ids of the prompt.
        num_prompt_tokens: how many these are.
        num_tokens: new tokens.
    """

    text: str
    finish_reason: str
    token_ids: list[int] | None
    tokens: list[str] | None
    top: list[list[float]] | None
    prompt_ids: list[int] | None
    num_prompt_tokens: int | None
    num_tokens: int | None


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        # it would hand the key to another host
        return None


_opener = build_opener(_NoRedirect)


class CompletionsClient:
    """Greedy completions of one model.

    The key in ``OPENAI_API_KEY``, if there is one, is sent as bearer token and shown nowhere.

    Args:
        url: of the server; ``/v1`` is added to one without a path, and ``/completions`` to all.
        model: the server's name of the model.
        max_tokens: new tokens of a completion.
        timeout: seconds without an answer that end the wait.

    Raises:
        InputError: the URL is none of a server.

    Example:
        >>> CompletionsClient("http://localhost:8000", "my-model", max_tokens=64, timeout=60).complete("Once").text
    """

    def __init__(self, url: str, model: str, *, max_tokens: int, timeout: float):
        self.url = _completions_url(url)
        self._request: Fields = {"model": model, "max_tokens": max_tokens, "temperature": 0}
        self._timeout = timeout
        self._key = os.environ.get(KEY_VARIABLE, "").strip()
        if not (self._key.isascii() and self._key.isprintable()):
            raise InputError(f"{KEY_VARIABLE} holds characters that no key has")

    def complete(self, prompt: str | Sequence[int], **fields: Any) -> Completion:
        """Continue one prompt.

        Args:
            prompt: text or token ids.
            fields: more of the request.

        Raises:
            EndpointError: no connection, no answer in time, an error status, or an answer that is no completion.
        """
        answer = self._post(self._request | {"prompt": prompt} | fields)
        try:
            return _parse(answer)
        except ValueError as error:
            raise EndpointError(f"{self.url} answered without a completion: {self._quote(str(error))}", 200) from error

    def _post(self, body: Fields) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            with _opener.open(Request(self.url, json.dumps(body).encode(), headers), timeout=self._timeout) as response:
                answer = response.read()
        except HTTPError as error:
            raise EndpointError(f"{self.url} answered {error.code}: {self._explain(error)}", error.code) from error
        except (OSError, HTTPException) as error:
            reason = error.reason if isinstance(error, URLError) else error
            said = f"no answer within {self._timeout:g} s" if isinstance(reason, TimeoutError) else str(reason)
            raise EndpointError(f"cannot complete at {self.url}: {said or type(reason).__name__}") from error
        try:
            return json.loads(answer)
        except ValueError as error:
            raise EndpointError(f"{self.url} answered without JSON: {self._quote(answer)}", 200) from error

    def _explain(self, error: HTTPError) -> str:
        try:
            body = error.read()
        except (OSError, HTTPException):
            return error.reason
        try:
            return self._quote(_message(json.loads(body)))
        except ValueError:
            return self._quote(body) or error.reason

    def _quote(self, text: str | bytes) -> str:
        words = text.decode(errors="replace") if isinstance(text, bytes) else text
        # some servers repeat the key that they do not accept
        words = words.replace(self._key, "***") if self._key else words
        return words if len(words) <= _QUOTED else f"{words[:_QUOTED]}..."


def negotiate(clients: Sequence[CompletionsClient], prompt: str, optional: Fields) -> Fields:
    """The fields of ``optional`` that all servers take, found with requests of one token.

    Raises:
        EndpointError: a server does not complete ``prompt`` without any of them.
    """
    accepted: Fields = {}
    for fields in ({}, *({name: value} for name, value in optional.items())):
        try:
            for client in clients:
                client.complete(prompt, **accepted | fields | {"max_tokens": 1})
        except EndpointError as error:
            if not fields or error.status not in _REFUSED:
                raise
        else:
            accepted |= fields
    return accepted


def _completions_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        whole = False
    if not whole or parts.query or parts.fragment:
        raise InputError("an endpoint must be http://HOST[:PORT][/PATH] or https://HOST[:PORT][/PATH]")
    if parts.username or parts.password:
        raise InputError(f"endpoint at {parts.hostname}: give the key in {KEY_VARIABLE}, not in the URL")
    path = parts.path.rstrip("/") or "/v1"
    return parts._replace(path=f"{path}/completions").geturl()


def _parse(answer: Any) -> Completion:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list):
        raise ValueError(f"there are no choices in {_message(answer)}")
    if not choices:
        raise ValueError("its list of choices is empty")
    choice = choices[0]
    text = choice.get("text") if isinstance(choice, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"there is no text in {_message(choice)}")
    text.encode()  # a surrogate could not be kept
    try:
        tokens, token_ids, top = _read_logprobs(choice.get("logprobs") or {})
        token_ids = _all(int, choice.get("token_ids")) or token_ids
        prompt_ids = _all(int, choice.get("prompt_token_ids"))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"its logprobs or token ids are malformed: {error!r}") from error
    return Completion(
        text=text,
        finish_reason=str(choice.get("finish_reason") or ""),
        token_ids=token_ids,
        tokens=tokens,
        top=top,
        prompt_ids=prompt_ids,
        num_prompt_tokens=_count(answer, "prompt_tokens"),
        num_tokens=_count(answer, "completion_tokens"),
    )


def _read_logprobs(logprobs: Any) -> tuple[list[str] | None, list[int] | None, list[list[float]] | None]:
    """Tokens, their ids and their largest logprobs, from the shape of completions or that of chats (llama.cpp's)."""
    if "content" in logprobs:
        entries = logprobs["content"]
        ids = [entry["id"] for entry in entries] if all("id" in entry for entry in entries) else None
        tops = [[top["logprob"] for top in entry.get("top_logprobs") or ()] for entry in entries]
        return _all(str, [entry["token"] for entry in entries]), _all(int, ids), list(map(_largest, tops))
    tops = logprobs.get("top_logprobs")
    return _all(str, logprobs.get("tokens")), None, tops and [_largest((top or {}).values()) for top in tops]


def _largest(logprobs: Any) -> list[float]:
    return sorted((float(value) for value in logprobs if value is not None and math.isfinite(value)), reverse=True)[:2]


def _all(kind: type, values: Any) -> Any:
    """``values`` if it is a list of ``kind``, None if it is empty or missing."""
    if values is not None and not (isinstance(values, list) and all(type(value) is kind for value in values)):
        raise TypeError(f"{_message(values)} is no list of {kind.__name__}")
    return values or None


def _count(answer: Fields, name: str) -> int | None:
    usage = answer.get("usage")
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if type(count) is int else None


def _message(answer: Any) -> str:
    """An error in the words of the server, whichever of the usual places it has put them in."""
    found = answer
    for key in ("error", "message", "detail"):
        if isinstance(found, dict):
            found = found.get(key) or found
    return found if isinstance(found, str) else json.dumps(found)
