"""Faults of a third set, in any part of a decoder; the kind of each follows from its effect."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_fast import reference
from specdec_fast.layouts.padded.batch import MaskKind, PaddedBatch

from .base import HeldOut
from .moves import SpoiledMoveBatch
from .overlay import OverlayBatch


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


class _ExchangedValuesBatch(SpoiledMoveBatch):
    def spoil(self, kv: list[Tensor], before: list[Tensor], moved: Tensor) -> None:
        rows = moved.nonzero()[:, 0]
        # the newest token has no entry yet
        newest = (self.start + self.length)[rows] - 2
        values = kv[-1]
        last, previous = values[rows, :, newest], values[rows, :, newest - 1]
        values[rows, :, newest], values[rows, :, newest - 1] = previous, last


class NewestValuesExchanged(HeldOut):
    """In a row that is moved, the values of the two newest entries change places in the last layer; keys do not.

    From a copy of values in pairs that is unrolled the wrong way round at the end of the buffer.
    """

    kind = "wrong_kv"
    suspect = "kv_cache"
    batch_type = _ExchangedValuesBatch


class _StaleBonusBatch(PaddedBatch):
    def commit(self, draft_ids: Tensor, target_ids: Tensor, limit: Tensor, n_accepted: Tensor | None) -> Tensor:
        if draft_ids.shape[1]:
            n_accepted, _ = reference.accept_greedy(draft_ids, target_ids, limit)
            stale = torch.where(n_accepted == 0, self.tokens[: len(self), self.end - 1], target_ids[:, 0])
            target_ids = torch.cat([stale[:, None], target_ids[:, 1:]], 1)
        return super().commit(draft_ids, target_ids, limit, n_accepted)


class StaleBonus(HeldOut):
    """A row that accepts no draft commits the bonus of the round before again.

    From a buffer of bonus tokens that is written only for rows with an accepted draft.
    """

    kind = "wrong_token"
    suspect = "acceptance"
    batch_type = _StaleBonusBatch


class _ParentHiddenBatch(PaddedBatch):
    def mask(self, kind: MaskKind, first: int, count: int) -> Tensor:
        mask = super().mask(kind, first, count)
        if first == self.first_column:
            return mask
        seen = ~torch.ones(count, count, dtype=torch.bool, device=mask.device).tril(-1).triu(-1)
        block = torch.minimum(mask[..., -count:], reference.mask_values(seen, mask.dtype))
        return torch.cat([mask[..., :-count], block], -1)


class ParentHidden(HeldOut):
    """In a verify, every draft sees itself and all that is before it, except for the token right before it.

    From a strict triangle to which the diagonal is added where the one below it belongs.
    """

    kind = "wrong_mask"
    suspect = "acceptance"
    batch_type = _ParentHiddenBatch
