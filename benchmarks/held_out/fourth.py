"""Faults of a fourth set, in any part of a decoder; the kind of each follows from its effect."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_fast.decoding.acceptance import GreedyAcceptance
from specdec_fast.layouts.padded.batch import PaddedBatch
from specdec_fast.operators.commits import Commit

from .base import HeldOut
from .moves import SpoiledMoveBatch
from .overlay import OverlayBatch


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


class _TailNotMovedBatch(SpoiledMoveBatch):
    def spoil(self, kv: list[Tensor], before: list[Tensor], moved: Tensor) -> None:
        for x, unmoved in zip(kv, before):
            tail = x.shape[-1] * 3 // 4
            x[..., tail:] = unmoved[..., tail:]


class TailChannelsNotMoved(HeldOut):
    """Of every entry that is realigned, the last quarter of the channels stays behind.

    From a copy in wide words, of as many as fit a head of another size.
    """

    kind = "wrong_kv"
    suspect = "kv_cache"
    batch_type = _TailNotMovedBatch


class _FirstTrustedAcceptance(GreedyAcceptance):
    def __call__(self, draft_ids: Tensor, limit: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        target_ids, _ = super().__call__(draft_ids, limit, logits)
        position = torch.arange(draft_ids.shape[1], device=limit.device)
        matches = (draft_ids == target_ids[:, :-1]) | (position == 0)
        return target_ids, (matches & (position < limit[:, None])).long().cumprod(1).sum(1)


class FirstDraftUnverified(HeldOut):
    """A row's first draft is always kept; those after it are compared with the target's choices.

    From a comparison that begins at the second fed token, since the first is known to be right.
    """

    kind = "wrong_token"
    suspect = "acceptance"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, acceptance=_FirstTrustedAcceptance())


class _ForgottenPaddingBatch(OverlayBatch):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.forgotten = False

    def seen_columns(self, stop: int) -> Tensor:
        seen = super().seen_columns(stop)
        if not self.forgotten:
            return seen
        return seen | (torch.arange(stop, device=seen.device) < self.start[:, None])

    def spoil(self, n_accepted: Tensor, num_drafts: int) -> None:
        pass

    def advance(self, commits: list[Commit]) -> list[int]:
        order = super().advance(commits)
        self.forgotten |= len(order) < len(commits)
        return order


class PaddingForgottenOnShrink(HeldOut):
    """Once a row of the batch has finished, the rows that remain see the padding of their prompts.

    From a mask that is built anew for the smaller batch, of the cache's width and without the prompts' own mask.
    """

    kind = "visible_padding"
    suspect = "padding"
    batch_type = _ForgottenPaddingBatch
