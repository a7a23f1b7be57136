"""Tokens get wrong position IDs."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_fast.layouts.padded.batch import PaddedBatch

from .base import HeldOut


class _OffsetBatch(PaddedBatch):
    """Position IDs of row b are ``offset[b]`` too high."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.offset = torch.zeros_like(self.start)

    def position_ids(self, first: int, count: int, max_position: int) -> Tensor:
        right = super().position_ids(first, count, max_position)
        return (right + self.offset[:, None]).clamp(max=max_position)

    def _keep_rows(self, keep: list[int]) -> list[int]:
        order = super()._keep_rows(keep)
        self.offset = self.offset[order]
        return order


class _SharedCounterBatch(_OffsetBatch):
    def commit(self, draft_ids: Tensor, target_ids: Tensor, limit: Tensor, n_accepted: Tensor | None) -> Tensor:
        summary = super().commit(draft_ids, target_ids, limit, n_accepted)
        self.offset = self.offset + summary[:, 0].amax() - summary[:, 0]
        return summary


class SharedPositionCounter(HeldOut):
    """Every row's position IDs advance by what the best row accepted.

    From decoders that keep one ``cache_position`` for the whole batch.
    """

    kind = "wrong_position"
    suspect = "position_ids"
    batch_type = _SharedCounterBatch


class _PromptPaddingBatch(_OffsetBatch):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.offset = self.start - self.first_column


class PromptPaddingCounted(HeldOut):
    """Position IDs start at the row's left padding, and stay that much too high; rotary embeddings do not care.

    From models called without ``position_ids``, which then count columns.
    """

    kind = "wrong_position"
    suspect = None
    batch_type = _PromptPaddingBatch


class _UncompactedPositionsBatch(PaddedBatch):
    def _keep_rows(self, keep: list[int]) -> list[int]:
        positions = self._positions.clone()
        order = super()._keep_rows(keep)
        self._positions = positions
        return order


class PositionsNotCompacted(HeldOut):
    """A row that takes a finished row's slot takes its position IDs for one round, too.

    From position IDs prepared ahead of a compaction that moves everything else.
    """

    kind = "wrong_position"
    suspect = "position_ids"
    batch_type = _UncompactedPositionsBatch


class _ShortTableBatch(PaddedBatch):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.last_position = max(self.lengths) - 1

    def position_ids(self, first: int, count: int, max_position: int) -> Tensor:
        return super().position_ids(first, count, max_position).clamp(max=self.last_position)


class PositionsEndWithPrompt(HeldOut):
    """No position ID is larger than the last of the longest prompt.

    From rotary tables built at the prefill, for as many positions as it had columns.
    """

    kind = "wrong_position"
    suspect = "position_ids"
    batch_type = _ShortTableBatch


class _BlockPositionBatch(PaddedBatch):
    def position_ids(self, first: int, count: int, max_position: int) -> Tensor:
        right = super().position_ids(first, count, max_position)
        return right if first == self.first_column else right[:, :1].expand(-1, count)


class OnePositionPerBlock(HeldOut):
    """After the prefill, all tokens of a forward pass have the position ID of its first.

    From the one-token decoder's ``length - 1``, broadcast over a block.
    """

    kind = "wrong_position"
    suspect = "position_ids"
    batch_type = _BlockPositionBatch


class _PausedPositionsBatch(PaddedBatch):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.lag = torch.zeros_like(self.start)

    def position_ids(self, first: int, count: int, max_position: int) -> Tensor:
        return (super().position_ids(first, count, max_position) - self.lag[:, None]).clamp(min=0)

    def commit(self, draft_ids: Tensor, target_ids: Tensor, limit: Tensor, n_accepted: Tensor | None) -> Tensor:
        before = self.start
        summary = super().commit(draft_ids, target_ids, limit, n_accepted)
        self.lag = (summary[:, 0] + 1) * (self.start != before)
        return summary

    def _keep_rows(self, keep: list[int]) -> list[int]:
        order = super()._keep_rows(keep)
        self.lag = self.lag[order]
        return order


class PositionsPauseAfterMove(HeldOut):
    """In the round after a row was moved, its position IDs are those of the round before once more.

    From position IDs that are brought up to date where rows stay, and a round later where they move.
    """

    kind = "wrong_position"
    suspect = "position_ids"
    batch_type = _PausedPositionsBatch


class _LowDraftPositionsBatch(PaddedBatch):
    def position_ids(self, first: int, count: int, max_position: int) -> Tensor:
        column = torch.arange(first, first + count, device=self.device)
        return (super().position_ids(first, count, max_position) - (column >= self.end).long()).clamp(min=0)


class DraftsShareOpeningPosition(HeldOut):
    """The first draft has the position ID of the token before it, and the other drafts follow on from there.

    From position IDs of a block that begin anew, at the text's length less one, behind the token that opens it.
    """

    kind = "wrong_position"
    suspect = "position_ids"
    batch_type = _LowDraftPositionsBatch
