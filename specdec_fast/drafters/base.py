"""What a decoder asks of a drafter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from ..batch import Batch


class Drafts(NamedTuple):
    """``ids`` ``[B, K]`` int64; of row b the first ``counts[b]`` are drafts, the rest is filler."""

    ids: Tensor
    counts: list[int]


class DraftRun(ABC):
    """Drafts for one batch, from its first round to its last."""

    @abstractmethod
    def draft(self, texts: Sequence[tuple[int, list[int]]], limits: list[int]) -> Drafts:
        """Draft at most ``limits[b]`` tokens for row b.

        Args:
            texts: per active row, its id (stable within the batch) and its tokens, prompt included.
            limits: drafts a row can use, 0 or more.
        """


class Drafter(ABC):
    """Proposes tokens for the rows of a batch; what it remembers of one batch lives in a :class:`DraftRun`."""

    def check(self, target: PreTrainedModel) -> None:
        """Raise :class:`~specdec_fast.errors.InputError` if this drafter cannot draft for ``target``."""

    @abstractmethod
    def begin(self, batch: Batch, longest: int) -> DraftRun:
        """Start on a batch, before its first forward; no row will outgrow ``longest`` tokens."""
