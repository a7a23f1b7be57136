"""Broken batch decoders, written from published descriptions: what an audit must find.

Each is :class:`~specdec_fast.EQSpec` with one part replaced, so that a fault differs from the correct decoder in
nothing else. ``kinds`` are the names a probe of the target may give to the first violation, ``suspects`` what outputs
may point to; where one is empty, there is nothing for it to find.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ... import reference
from ...decoding.acceptance import GreedyAcceptance
from ...drafters import DraftRun, ModelDrafter
from ...errors import InputError
from ...layouts.padded.batch import MaskKind, PaddedBatch
from ...operators.commits import Commit
from ..diagnosis import Invariant
from ..probe.violation import Kind
from .correct import PaddedEQSpec
from .holes import HoleBatch


class Fault(PaddedEQSpec):
    """A decoder that is known to be wrong."""

    kinds: tuple[Kind, ...] = ()
    suspects: tuple[Invariant, ...] = ()


class DraftBonus(GreedyAcceptance):
    """Commits a rejected draft's own token in place of the target's."""

    def __call__(self, draft_ids: Tensor, limit: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        target_ids, _ = super().__call__(draft_ids, limit, logits)
        n_accepted, _ = reference.accept_greedy(draft_ids, target_ids, limit)
        drafted = torch.arange(draft_ids.shape[1], device=limit.device) < limit[:, None]
        bonus = torch.where(drafted, draft_ids, target_ids[:, :-1])
        return torch.cat([bonus, target_ids[:, -1:]], 1), n_accepted


class _PaddingVisibleBatch(PaddedBatch):
    def mask(self, kind: MaskKind, first: int, count: int) -> Tensor:
        dtype, window = kind
        everything = torch.full_like(self.start, self.first_column)
        return reference.attention_mask(everything, first, count, self.first_column, dtype, window)


class PaddingVisible(Fault):
    """The attention mask ignores padding; position IDs are right."""

    kinds = ("visible_padding",)
    suspects = ("padding",)
    batch_type = _PaddingVisibleBatch


class BonusFromDraft(Fault):
    """The bonus token comes from the draft."""

    kinds: tuple[Kind, ...] = ("wrong_token",)
    suspects: tuple[Invariant, ...] = ("acceptance",)

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, acceptance=DraftBonus())


class DSD(BonusFromDraft):
    """DSD as the paper describes it (section 2): bonus from the draft, and a mask that ignores padding."""

    kinds = ("visible_padding", "wrong_token")
    suspects = ("padding", "acceptance")
    batch_type = _PaddingVisibleBatch


class _RejectedKeptBatch(HoleBatch):
    def kept_drafts(self, n_accepted: Tensor, num_drafts: int) -> Tensor:
        return super().kept_drafts(torch.full_like(n_accepted, num_drafts), num_drafts)


class RejectedKept(Fault):
    """All rejected drafts stay visible; positions count what is visible."""

    kinds = ("kept_rejected_token",)
    suspects = ("kv_cache",)
    batch_type = _RejectedKeptBatch


class _PaddedPositionBatch(_RejectedKeptBatch):
    def column_positions(self, stop: int) -> Tensor:
        return torch.arange(stop, device=self.start.device).expand(len(self), -1) - self.first_column


class BSP(Fault):
    """BSP as the paper describes it (section 2): rejected entries stay visible, positions count padded columns."""

    kinds = ("wrong_position", "kept_rejected_token")
    suspects = ("kv_cache",)
    batch_type = _PaddedPositionBatch


class _MovedOffByOneBatch(PaddedBatch):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._moved = torch.zeros_like(self.start)

    def position_ids(self, first: int, count: int, max_position: int) -> Tensor:
        return super().position_ids(first, count, max_position) + self._moved[:, None]

    def commit(self, draft_ids: Tensor, target_ids: Tensor, limit: Tensor, n_accepted: Tensor | None) -> Tensor:
        before = self.start
        summary = super().commit(draft_ids, target_ids, limit, n_accepted)
        self._moved = (self.start != before).long()
        return summary

    def advance(self, commits: list[Commit]) -> list[int]:
        order = super().advance(commits)
        self._moved = self._moved[order]
        return order


class PositionOffByOne(Fault):
    """Rows that the last realign moved get position IDs one too high."""

    kinds = ("wrong_position",)
    suspects = ("position_ids",)
    batch_type = _MovedOffByOneBatch


class _ColumnPositionBatch(PaddedBatch):
    def position_ids(self, first: int, count: int, max_position: int) -> Tensor:
        return super().position_ids(first, count, max_position) + (self.start - self.first_column)[:, None]


class PositionOfColumn(Fault):
    """Position IDs count the columns of the batch, padding included, and so jump whenever a row is moved."""

    kinds = ("wrong_position",)
    suspects = ("position_ids",)
    batch_type = _ColumnPositionBatch


class _OffsetBatch(PaddedBatch):
    def position_ids(self, first: int, count: int, max_position: int) -> Tensor:
        return super().position_ids(first, count, max_position) + 3


class PositionOffset(Fault):
    """Every position ID is three too high; rotary embeddings are relative, so no output shows it."""

    kinds = ("wrong_position",)
    batch_type = _OffsetBatch


class _HolesVisibleBatch(HoleBatch):
    def seen_columns(self, stop: int) -> Tensor:
        return torch.arange(stop, device=self.start.device) >= self.start[:, None]

    def commit(self, draft_ids: Tensor, target_ids: Tensor, limit: Tensor, n_accepted: Tensor | None) -> Tensor:
        first, last = self.end, self.end + draft_ids.shape[1]
        summary = super().commit(draft_ids, target_ids, limit, n_accepted)
        holes = ~self.visible[: len(draft_ids), None, first:last, None]
        for x in (x for cache in self._caches for x in cache.tensors()):
            x[: len(draft_ids), :, first:last].masked_fill_(holes, 0)
        return summary


class HolesVisible(Fault):
    """The entries of rejected drafts are zeroed but still attended to: each takes its share of the softmax."""

    kinds = ("visible_padding",)
    suspects = ("kv_cache",)
    batch_type = _HolesVisibleBatch


class _LostTokenBatch(HoleBatch):
    def kept_drafts(self, n_accepted: Tensor, num_drafts: int) -> Tensor:
        return super().kept_drafts(n_accepted - 1, num_drafts)


class LostToken(Fault):
    """The entry of the last accepted draft is dropped with the rejected ones."""

    kinds = ("lost_token",)
    suspects = ("kv_cache",)
    batch_type = _LostTokenBatch


class _DuplicatedTokenBatch(HoleBatch):
    def commit(self, draft_ids: Tensor, target_ids: Tensor, limit: Tensor, n_accepted: Tensor | None) -> Tensor:
        first, num_drafts = self.end, draft_ids.shape[1]
        summary = super().commit(draft_ids, target_ids, limit, n_accepted)
        row = (summary[:, 0] < num_drafts).nonzero()[:, 0]
        column = first + summary[row, 0]
        for x in (x for cache in self._caches for x in cache.tensors()):
            x[row, :, column] = x[row, :, column - 1]
        self.visible[row, column] = True
        return summary


class DuplicatedToken(Fault):
    """The entry of the last accepted token is copied into the place of the first rejected one."""

    kinds = ("duplicated_token",)
    suspects = ("kv_cache",)
    batch_type = _DuplicatedTokenBatch


class RowsSwapped(Fault):
    """The first two answers of a batch change places."""

    suspects = ("row_order",)

    def generate(self, *args, on_finish=None, **kwargs):
        def swapped(row):
            on_finish(row if row.index > 1 or len(args[0]) < 2 else replace(row, index=1 - row.index))

        return super().generate(*args, on_finish=on_finish and swapped, **kwargs)


class _StaleDrafter(ModelDrafter, DraftRun):
    def begin(self, batch, longest):
        self._run: Any = super().begin(batch, longest)
        return self

    def draft(self, texts, limits):
        drafts = self._run.draft(texts, limits)
        self._run.follower.pending = 1
        return drafts


class StaleDraft(Fault):
    """A fully accepted block leaves a draft without its entry in the draft's cache: only acceptance suffers."""

    def __init__(self, target, draft, **kwargs):
        if not isinstance(draft, ModelDrafter):
            raise InputError("stale-draft needs a draft model, whose cache can be stale")
        super().__init__(target, _StaleDrafter(draft.model), **kwargs)
