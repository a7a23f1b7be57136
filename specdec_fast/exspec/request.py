"""Prompts as callers give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..decoding.rounds import Row
from ..errors import InputError
from ..result import RequestResult

TOKENIZED = "tokenizer(prompt)['input_ids']"
_KEYS = ("input_ids", "max_new_tokens")
Parsed = tuple[list[int], int] | InputError


@dataclass
class PromptLimits:
    """PromptLimits of a prompt.

    Attributes:
        vocab_size: token ids are below it.
        longest: most tokens of a row, prompt and new ones.
        bound: ``longest`` in words, with its reason.
        max_new_tokens: new tokens of a prompt that does not say.
    """

    vocab_size: int
    longest: int
    bound: str
    max_new_tokens: int


def parse(prompt: Any, limits: PromptLimits) -> tuple[list[int], int]:
    """Token ids and most new tokens of ``prompt``: a list of ids, or a dict with ``input_ids`` and limits of its own.

    Raises:
        InputError: neither of these, no tokens, an unknown id, or more tokens than there is room for.
    """
    try:
        fields = dict(prompt) if isinstance(prompt, Mapping) else {"input_ids": prompt}
        ids = fields.get("input_ids")
        ids = ids.tolist() if isinstance(ids, Tensor) else ids
    except Exception as error:
        raise InputError(f"a prompt cannot be read: {type(error).__name__}: {error}") from error
    if unknown := [key for key in fields if key not in _KEYS]:
        raise InputError(f"a prompt has the key {unknown[0]!r}; accepted are {', '.join(_KEYS)}")
    new = fields.get("max_new_tokens", limits.max_new_tokens)
    if not isinstance(ids, list | tuple) or not all(type(i) is int for i in ids):
        raise InputError(
            f"a prompt is {_describe(ids)}; need a list of token ids, {TOKENIZED}, or a dict with it as input_ids"
        )
    if not ids:
        raise InputError("an empty prompt cannot be continued")
    if not 0 <= min(ids) <= max(ids) < limits.vocab_size:
        raise InputError(f"a prompt holds ids outside the target's vocabulary of {limits.vocab_size}")
    if type(new) is not int or new < 1:
        raise InputError(f"max_new_tokens={new!r}: need an integer of at least 1")
    if len(ids) + new > limits.longest:
        raise InputError(f"a prompt has {len(ids)} tokens; with max_new_tokens={new} it outgrows {limits.bound}")
    return list(ids), new


def parsed(prompt: Any, limits: PromptLimits) -> Parsed:
    """As :func:`parse`; what is wrong with the prompt is returned."""
    try:
        return parse(prompt, limits)
    except InputError as error:
        return error


def _describe(value: Any) -> str:
    return "a list of something else" if isinstance(value, list | tuple) else f"of type {type(value).__name__}"


@dataclass
class RequestRow(Row):
    """A request that has not ended."""

    result: RequestResult
