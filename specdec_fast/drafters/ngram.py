"""Prompt lookup: drafts copied from the row's own text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from ..errors import InputError
from ..layouts.batch import Batch
from .base import Drafter, DraftRun, Drafts


class NgramDrafter(Drafter):
    """Continues the latest earlier occurrence of a row's last n tokens; longest n first. Needs no model.

    A row without a match drafts nothing and takes part in the round with its bonus token alone. A match close to the
    end of the text is continued periodically.

    Args:
        max_ngram: longest n tried.
        min_ngram: shortest n tried.
    """

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1):
        if not 1 <= min_ngram <= max_ngram:
            raise InputError(f"min_ngram={min_ngram}, max_ngram={max_ngram}: need 1 <= min_ngram <= max_ngram")
        self.sizes = range(max_ngram, min_ngram - 1, -1)

    def begin(self, batch: Batch, longest: int) -> DraftRun:
        return _NgramRun(batch.device, self.sizes)


class _NgramRun(DraftRun):
    def __init__(self, device: torch.device, sizes: range):
        self.device = device
        self.index_of: defaultdict[int, _NgramIndex] = defaultdict(lambda: _NgramIndex(sizes))

    def draft(self, texts: Sequence[tuple[int, list[int]]], limits: list[int]) -> Drafts:
        found = [
            self.index_of[row].continuation(tokens, limit) for (row, tokens), limit in zip(texts, limits, strict=True)
        ]
        width = max(map(len, found))
        rows = [draft + [0] * (width - len(draft)) for draft in found]
        return Drafts(torch.tensor(rows, dtype=torch.int64, device=self.device), [len(draft) for draft in found])

    def forget(self, row: int) -> None:
        self.index_of.pop(row, None)


class _NgramIndex:
    """Last continuation of each n-gram of a growing text."""

    def __init__(self, sizes: range):
        self.sizes = sizes
        self.next_of: dict[tuple[int, ...], int] = {}
        self.seen = 0

    def continuation(self, tokens: list[int], limit: int) -> list[int]:
        # the n-gram that ends the text is looked up before it is indexed, or it would match itself
        for end in range(self.seen + 1, len(tokens)):
            for n in self.sizes:
                if n <= end:
                    self.next_of[tuple(tokens[end - n : end])] = end
        self.seen = len(tokens) - 1
        for n in self.sizes:
            start = self.next_of.get(tuple(tokens[-n:])) if n <= len(tokens) else None
            if start is not None:
                period = len(tokens) - start
                return [tokens[start + i % period] for i in range(limit)]
        return []
