"""What a decoder asks of a drafter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from ..padded import PaddedBatch


class Drafts(NamedTuple):
    """``ids`` ``[B, K]`` int64; of row b the first ``counts[b]`` are drafts, the rest is filler."""

    ids: Tensor
    counts: list[int]


class Drafter(ABC):
    """Proposes tokens for every active row of a round."""

    def check(self, target: PreTrainedModel) -> None:
        """Raise :class:`~specdec_fast.errors.InputError` if this drafter cannot draft for ``target``."""

    def begin(self, batch: PaddedBatch, longest: int) -> None:
        """Start a new batch, before its first forward; no row will outgrow ``longest`` tokens."""

    @abstractmethod
    def draft(self, batch: PaddedBatch, texts: Sequence[tuple[int, list[int]]], limits: list[int]) -> Drafts:
        """Draft at most ``limits[b]`` tokens for row b.

        Args:
            batch: the rows as they stand on the device.
            texts: per active row, its id (stable within the batch) and its tokens, prompt included.
            limits: drafts a row can use, 0 or more.
        """
