"""Queries see what they should not, or not what they should."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_fast import reference
from specdec_fast.layouts.padded.batch import MaskKind, PaddedBatch
from specdec_fast.operators.commits import Commit

from .base import HeldOut
from .overlay import OverlayBatch


class _PaddingEdgeBatch(OverlayBatch):
    def spoil(self, n_accepted: Tensor, num_drafts: int) -> None:
        self.mark(self.start > self.first_column, self.start - 1)


class PaddingEdgeVisible(HeldOut):
    """After the prefill, rows with padding see its last column.

    From a mask rebuilt as ``column >= padding - 1``.
    """

    kind = "visible_padding"
    suspect = "padding"
    batch_type = _PaddingEdgeBatch


class _FutureVisibleBatch(PaddedBatch):
    def mask(self, kind: MaskKind, first: int, count: int) -> Tensor:
        mask = super().mask(kind, first, count)
        if first == self.first_column:
            return mask
        return torch.cat([mask[..., :-count], torch.zeros_like(mask[..., -count:])], -1)


class FutureVisible(HeldOut):
    """In a verify, every draft sees the drafts after it.

    From a mask of visible columns that is broadcast over the queries without a causal triangle.
    """

    kind = "wrong_mask"
    suspect = "acceptance"
    batch_type = _FutureVisibleBatch


class _ShortWindowBatch(PaddedBatch):
    def mask(self, kind: MaskKind, first: int, count: int) -> Tensor:
        dtype, window = kind
        if window is None or first == self.first_column:
            return super().mask(kind, first, count)
        return reference.attention_mask(self.start, first, count, self.first_column, dtype, window - 1)


class ShortWindow(HeldOut):
    """After the prefill, sliding windows are one token short; models without one are decoded right.

    From a window that counts the tokens before a query, where the model's own counts the query, too.
    """

    kind = "wrong_mask"
    suspect = "kv_cache"
    batch_type = _ShortWindowBatch


class _SiblingsBatch(PaddedBatch):
    def mask(self, kind: MaskKind, first: int, count: int) -> Tensor:
        mask = super().mask(kind, first, count)
        if first == self.first_column:
            return mask
        parent = torch.eye(count, dtype=torch.bool, device=mask.device)
        parent[:, 0] = True
        block = torch.minimum(mask[..., -count:], reference.mask_values(parent, mask.dtype))
        return torch.cat([mask[..., :-count], block], -1)


class DraftsAsSiblings(HeldOut):
    """In a verify, every draft sees the text and itself, but none of the drafts before it.

    From a tree mask in which all drafts are children of the root.
    """

    kind = "wrong_mask"
    suspect = "acceptance"
    batch_type = _SiblingsBatch


class _LastChunkBatch(PaddedBatch):
    def mask(self, kind: MaskKind, first: int, count: int) -> Tensor:
        mask = super().mask(kind, first, count)
        if first != self.first_column:
            return mask
        dtype, window = kind
        everything = torch.full_like(self.start, first)
        last = reference.attention_mask(everything, first + count - 1, 1, first, dtype, window)
        return torch.cat([mask[:, :, :-1], last], 2)


class LastChunkUnmasked(HeldOut):
    """In the prefill, the last token of every prompt sees the padding.

    From a prefill in two parts, of which the second, the last token alone, is given no mask.
    """

    kind = "visible_padding"
    suspect = "padding"
    batch_type = _LastChunkBatch


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
