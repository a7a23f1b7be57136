"""Broken batch decoders, written from published descriptions: what an audit must find.

Each is :class:`~specdec_fast.EQSpec` with one part replaced, so that a fault differs from the correct decoder in
nothing else. ``suspect`` names the diagnosis that is right for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import reference
from ...acceptance import GreedyAcceptance
from ...eqspec import EQSpec
from ...padded import MaskKind, PaddedBatch
from .holes import HoleBatch


class DraftBonus(GreedyAcceptance):
    """Where a draft is rejected, the draft's own token is committed in place of the target's."""

    def __call__(self, draft_ids: Tensor, limit: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        target_ids, _ = super().__call__(draft_ids, limit, logits)
        n_accepted, _ = reference.accept_greedy(draft_ids, target_ids, limit)
        inside = torch.arange(draft_ids.shape[1], device=limit.device) < limit[:, None]
        bonus = torch.where(inside, draft_ids, target_ids[:, :-1])
        return torch.cat([bonus, target_ids[:, -1:]], 1), n_accepted


class _PaddingVisibleBatch(PaddedBatch):
    def mask(self, kind: MaskKind, first: int, count: int) -> Tensor:
        dtype, window = kind
        everything = torch.full_like(self.start, self.first_column)
        return reference.attention_mask(everything, first, count, self.first_column, dtype, window)


class PaddingVisible(EQSpec):
    """The attention mask ignores padding; position IDs are right."""

    suspect = "padding"
    batch_type = _PaddingVisibleBatch


class BonusFromDraft(EQSpec):
    """The bonus token comes from the draft."""

    suspect = "acceptance"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, acceptance=DraftBonus())


class DSD(BonusFromDraft):
    """DSD as the paper describes it (section 2): bonus from the draft, and a mask that ignores padding."""

    batch_type = _PaddingVisibleBatch


class _RejectedKeptBatch(HoleBatch):
    def kept_drafts(self, n_accepted: Tensor, num_drafts: int) -> Tensor:
        return super().kept_drafts(torch.full_like(n_accepted, num_drafts), num_drafts)


class _PaddedPositionBatch(_RejectedKeptBatch):
    def column_positions(self, stop: int) -> Tensor:
        return torch.arange(stop, device=self.start.device).expand(len(self), -1) - self.first_column


class BSP(EQSpec):
    """BSP as the paper describes it (section 2): rejected entries stay visible, positions count padded columns."""

    suspect = "kv_cache"
    batch_type = _PaddedPositionBatch


class RejectedKept(EQSpec):
    """All rejected drafts stay visible; positions count what is visible."""

    suspect = "kv_cache"
    batch_type = _RejectedKeptBatch
