"""Attention sees the wrong columns."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_fast import reference
from specdec_fast.layouts.padded.batch import MaskKind, PaddedBatch

from .base import HeldOut
from .overlay import OverlayBatch


class _LastDraftDroppedBatch(OverlayBatch):
    def spoil(self, n_accepted: Tensor, num_drafts: int) -> None:
        behind = (n_accepted > 0) & (n_accepted < n_accepted.amax())
        self.mark(behind, self.end + n_accepted - 1)


class LastDraftDropped(HeldOut):
    """Rows that accept less than the best row lose the entry of their last accepted draft.

    From a crop to ``length + n - 1``, off by one at the bonus token that has no entry yet.
    """

    kind = "lost_token"
    suspect = "kv_cache"
    batch_type = _LastDraftDroppedBatch


class _FirstRejectedKeptBatch(OverlayBatch):
    def spoil(self, n_accepted: Tensor, num_drafts: int) -> None:
        self.mark(n_accepted < num_drafts, self.end + n_accepted)


class FirstRejectedKept(HeldOut):
    """The first rejected draft of every round stays visible; position IDs count the text.

    From a crop to ``length + n + 1``, which counts an entry for the bonus token.
    """

    kind = "kept_rejected_token"
    suspect = "kv_cache"
    batch_type = _FirstRejectedKeptBatch


class _FirstDraftTwiceBatch(OverlayBatch):
    def spoil(self, n_accepted: Tensor, num_drafts: int) -> None:
        ragged = (n_accepted > 0) & (n_accepted < num_drafts)
        rows = ragged.nonzero()[:, 0]
        for cache in self._caches:
            for x in cache.tensors():
                x[rows, :, self.end + n_accepted[rows]] = x[rows, :, self.end]
        self.mark(ragged, self.end + n_accepted)


class FirstDraftTwice(HeldOut):
    """The first accepted draft has a second, visible entry behind the last accepted one.

    From a gather whose padded indices all name the block's first column.
    """

    kind = "duplicated_token"
    suspect = "kv_cache"
    batch_type = _FirstDraftTwiceBatch


class _FirstColumnLostBatch(PaddedBatch):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.lost = torch.zeros_like(self.start)

    def mask(self, kind: MaskKind, first: int, count: int) -> Tensor:
        dtype, window = kind
        return reference.attention_mask(self.start + self.lost, first, count, self.first_column, dtype, window)

    def commit(self, draft_ids: Tensor, target_ids: Tensor, limit: Tensor, n_accepted: Tensor | None) -> Tensor:
        before = self.start
        summary = super().commit(draft_ids, target_ids, limit, n_accepted)
        self.lost = self.lost + (self.start != before)
        return summary

    def _keep_rows(self, keep: list[int]) -> list[int]:
        order = super()._keep_rows(keep)
        self.lost = self.lost[order]
        return order


class FirstColumnLost(HeldOut):
    """A row that is moved loses the oldest entry that it still has; position IDs count the text.

    From a copy that begins one column late, and a row start that agrees with it.
    """

    kind = "lost_token"
    suspect = "kv_cache"
    batch_type = _FirstColumnLostBatch


class _UncroppedBatch(OverlayBatch):
    def spoil(self, n_accepted: Tensor, num_drafts: int) -> None:
        block = self.wrong[: len(n_accepted), self.end : self.end + num_drafts]
        block |= (n_accepted == 0)[:, None]


class NothingAcceptedNothingCropped(HeldOut):
    """All drafts of a row that accepts none stay visible; position IDs count the text.

    From ``if n_accepted:`` around the crop.
    """

    kind = "kept_rejected_token"
    suspect = "kv_cache"
    batch_type = _UncroppedBatch


class _SinkTwiceBatch(OverlayBatch):
    def spoil(self, n_accepted: Tensor, num_drafts: int) -> None:
        rejected = (n_accepted == 0) & (num_drafts > 0)
        rows = rejected.nonzero()[:, 0]
        for cache in self._caches:
            for x in cache.tensors():
                x[rows, :, self.end] = x[rows, :, self.start[rows]]
        self.mark(rejected, torch.full_like(n_accepted, self.end))


class SinkTwice(HeldOut):
    """If a row accepts no draft, a visible copy of its first token's entry takes their place.

    From blocks that are each begun with an attention sink, where the row has one already.
    """

    kind = "duplicated_token"
    suspect = "kv_cache"
    batch_type = _SinkTwiceBatch


class _OneDraftEntryBatch(OverlayBatch):
    def spoil(self, n_accepted: Tensor, num_drafts: int) -> None:
        offset = torch.arange(num_drafts, device=n_accepted.device)
        block = self.wrong[: len(n_accepted), self.end : self.end + num_drafts]
        block |= (offset > 0) & (offset < n_accepted[:, None])


class OneDraftEntryKept(HeldOut):
    """Of a round's accepted drafts, only the first keeps its entry; position IDs count the text.

    From a cache that grows by one entry for every row with an accepted draft, whatever their number.
    """

    kind = "lost_token"
    suspect = "kv_cache"
    batch_type = _OneDraftEntryBatch


class _LongestUncroppedBatch(OverlayBatch):
    def spoil(self, n_accepted: Tensor, num_drafts: int) -> None:
        longest = self.length == self.length.amax()
        self.mark(longest & (n_accepted == 0) & (num_drafts > 0), torch.full_like(n_accepted, self.end))


class LongestRowUncropped(HeldOut):
    """If the longest row accepts no draft, its first one stays visible; position IDs count the text.

    From a crop that is given as padding on the other rows, of which the longest is taken to need none.
    """

    kind = "kept_rejected_token"
    suspect = "kv_cache"
    batch_type = _LongestUncroppedBatch


class _OpeningLostBatch(OverlayBatch):
    def spoil(self, n_accepted: Tensor, num_drafts: int) -> None:
        self.mark((n_accepted == 0) & (num_drafts > 0), torch.full_like(n_accepted, self.end - 1))


class OpeningEntryLost(HeldOut):
    """A row that accepts no draft loses the entry of the token before its drafts; position IDs count the text.

    From a rollback of as many entries as were fed, where all drafts are rejected.
    """

    kind = "lost_token"
    suspect = "kv_cache"
    batch_type = _OpeningLostBatch


class _BestRowCropBatch(OverlayBatch):
    def spoil(self, n_accepted: Tensor, num_drafts: int) -> None:
        offset = torch.arange(num_drafts, device=n_accepted.device)
        block = self.wrong[: len(n_accepted), self.end : self.end + num_drafts]
        block |= (offset >= n_accepted[:, None]) & (offset < n_accepted.amax())


class CroppedToBestRow(HeldOut):
    """Rejected drafts stay visible as far as the best row's accepted ones reach; position IDs count the text.

    From a cache that can be cropped for the whole batch only.
    """

    kind = "kept_rejected_token"
    suspect = "kv_cache"
    batch_type = _BestRowCropBatch
