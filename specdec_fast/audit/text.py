"""The look of a text after it left the oracle, and the similarity score that does not notice."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence

from rapidfuzz.distance import LCSseq, Prefix


def repetition(token_ids: Sequence[Hashable], n: int = 3) -> float:
    """Share of the n-grams that occurred earlier in the same text: 0 if all differ, near 1 in a loop."""
    grams = [tuple(token_ids[i : i + n]) for i in range(len(token_ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def special_rate(token_ids: Sequence[Hashable], special_ids: Collection[int]) -> float:
    """Share of special tokens (``<unk>``, padding, role markers)."""
    return sum(token in special_ids for token in token_ids) / len(token_ids) if token_ids else 0.0


def rouge_l(oracle: Sequence[Hashable], candidate: Sequence[Hashable]) -> float:
    """ROUGE-L F1 over tokens, shown beside exact match for what it hides: two wrong texts of a topic score high."""
    total = len(oracle) + len(candidate)
    return 2 * LCSseq.similarity(oracle, candidate) / total if total else 1.0


def token_span(token_ids: list[int], index: int, to_text: Callable[[list[int]], str]) -> tuple[int, int]:
    """Characters of ``to_text(token_ids)`` that come from token ``index``, as ``[start, end)``.

    Empty past the last token. A token that is only a part of a character has the whole of it.
    """
    text = to_text(token_ids)
    start, end = (Prefix.similarity(text, to_text(token_ids[:stop])) for stop in (index, index + 1))
    return start, max(end, start + 1) if index < len(token_ids) else start
