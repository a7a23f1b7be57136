"""Diverging texts beside the oracle's, cut to what surrounds the first token that differs."""

from __future__ import annotations

from dataclasses import dataclass

from rapidfuzz.distance import Prefix

from .results import PromptAudit, RowAudit, RunAudit

_CONTEXT = 80
_CONTEXT_LINES = 3
_REST = 400
_REST_LINES = 12
_PROMPT = 160


@dataclass(frozen=True)
class Side:
    """One of two texts that part.

    Attributes:
        token_id: the first differing token; None where this side has ended.
        skipped: characters left out before ``common``.
        common: end of what both sides have.
        token: the first differing token's text.
        rest: what follows.
        left_out: characters left out after ``rest``.
    """

    token_id: int | None
    skipped: int
    common: str
    token: str
    rest: str
    left_out: int


@dataclass(frozen=True)
class Pair:
    """A diverging row beside its oracle."""

    row: RowAudit
    prompt: str
    oracle: Side
    candidate: Side


def pairs(run: RunAudit, prompts: list[PromptAudit]) -> list[Pair]:
    """The rows that diverge, mismatches first."""
    by_index = {prompt.index: prompt for prompt in prompts}
    diverging = sorted((row for row in run.rows if not row.exact), key=lambda row: (row.near_tie is True, row.index))
    return [_pair(row, by_index[row.index]) for row in diverging]


def _pair(row: RowAudit, prompt: PromptAudit) -> Pair:
    split = row.first_divergence or 0
    shared = Prefix.similarity(prompt.oracle_text, row.text)
    unmarked = (shared, shared)
    question = " ".join(prompt.prompt.split())
    return Pair(
        row,
        question if len(question) <= _PROMPT else f"{question[:_PROMPT]}…",
        _side(prompt.oracle_text, prompt.oracle_ids[split : split + 1], row.oracle_span or unmarked),
        _side(row.text, row.token_ids[split : split + 1], row.span or unmarked),
    )


def _side(text: str, token: list[int], span: tuple[int, int]) -> Side:
    start, end = span
    common = _last_lines(text[max(0, start - _CONTEXT) : start])
    rest = _first_lines(text[end : end + _REST])
    return Side(
        token_id=token[0] if token else None,
        skipped=start - len(common),
        common=common,
        token=text[start:end],
        rest=rest,
        left_out=max(0, len(text) - end - len(rest)),
    )


def _last_lines(text: str) -> str:
    return "\n".join(text.split("\n")[-_CONTEXT_LINES:])


def _first_lines(text: str) -> str:
    return "\n".join(text.split("\n")[:_REST_LINES])
