"""The interface of drafters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..layouts.batch import Batch


class Drafts(NamedTuple):
    """``ids`` ``[B, K]`` int64; of row b the first ``counts[b]`` are drafts, the rest is filler."""

    ids: Tensor
    counts: list[int]

    def extended(self, rows: int) -> Drafts:
        """With ``rows`` more rows that draft nothing."""
        return Drafts(torch.cat([self.ids, self.ids.new_zeros(rows, self.ids.shape[1])]), self.counts + [0] * rows)


class DraftRun(ABC):
    """Drafts for one batch, from its first round to its last."""

    @abstractmethod
    def draft(self, texts: Sequence[tuple[int, list[int]]], limits: list[int]) -> Drafts:
        """Draft at most ``limits[b]`` tokens for row b.

        Args:
            texts: per active row, its id (stable within the batch) and its tokens, prompt included.
            limits: drafts a row can use, 0 or more.
        """

    def forget(self, row: int) -> None:
        """The row with this id has ended, and another may come to have it."""


class Drafter(ABC):
    """Proposes tokens for the rows of a batch; what it remembers of one batch lives in a :class:`DraftRun`."""

    @property
    def models(self) -> Sequence[PreTrainedModel]:
        """Models whose KV caches follow the batch."""
        return ()

    def check(self, target: PreTrainedModel) -> None:
        """Raise :class:`~specdec_fast.errors.InputError` if this drafter cannot draft for ``target``."""

    @abstractmethod
    def begin(self, batch: Batch, longest: int) -> DraftRun:
        """Start on a batch, before its first forward; no row will outgrow ``longest`` tokens."""
