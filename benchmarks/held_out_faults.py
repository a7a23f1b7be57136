"""Broken batch decoders that no audit or probe was written against: what either finds of them is its score.

Each is :class:`~specdec_fast.EQSpec` with one part replaced and always decodes to the end. They were chosen from where
implementations of batch speculative decoding go wrong, without a look at how a fault is found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from specdec_fast import EQSpec, compat, reference
from specdec_fast.acceptance import GreedyAcceptance
from specdec_fast.audit.probe.violation import Kind
from specdec_fast.audit.strategies.holes import HoleBatch
from specdec_fast.padded import MaskKind, PaddedBatch
from specdec_fast.result import GenerationResult, RowResult

Suspect = Literal["position_ids", "kv_cache", "padding", "acceptance", "stopping", "row_order"]


class HeldOut(EQSpec):
    """A fault and the right findings about it.

    Attributes:
        kind: what a probe of the target's forward passes should name first; None where every pass is right.
        suspect: what an analysis of outputs should name; None where every output is right.
    """

    kind: ClassVar[Kind | None]
    suspect: ClassVar[Suspect | None]


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


class _SpoiledMoveBatch(PaddedBatch):
    """Spoils KV after it was moved; ``victims`` are the caches concerned, the target's by default."""

    victims: ClassVar[slice] = slice(0, 1)

    def commit(self, draft_ids: Tensor, target_ids: Tensor, limit: Tensor, n_accepted: Tensor | None) -> Tensor:
        kv = [x for cache in self._caches[self.victims] for x in cache.tensors()]
        before, start = [x.clone() for x in kv], self.start
        summary = super().commit(draft_ids, target_ids, limit, n_accepted)
        self.spoil(kv, before, self.start != start)
        return summary

    def spoil(self, kv: list[Tensor], before: list[Tensor], moved: Tensor) -> None:
        """``kv`` holds the keys and values of every layer in turn; ``moved`` ``[B]`` says whose row was moved."""
        raise NotImplementedError


class _LayerNotMovedBatch(_SpoiledMoveBatch):
    def spoil(self, kv: list[Tensor], before: list[Tensor], moved: Tensor) -> None:
        for x, unmoved in zip(kv[-2:], before[-2:]):
            x.copy_(unmoved)


class LayerNotMoved(HeldOut):
    """The last layer's KV is never realigned.

    From a loop over the layers that ends one too early.
    """

    kind = "wrong_kv"
    suspect = "kv_cache"
    batch_type = _LayerNotMovedBatch


class _ValuesNotMovedBatch(_SpoiledMoveBatch):
    def spoil(self, kv: list[Tensor], before: list[Tensor], moved: Tensor) -> None:
        for x, unmoved in zip(kv[1::2], before[1::2]):
            x.copy_(unmoved)


class ValuesNotMoved(HeldOut):
    """Keys are realigned and values are not.

    From caches that keep the two in separate lists, or values in another layout.
    """

    kind = "wrong_kv"
    suspect = "kv_cache"
    batch_type = _ValuesNotMovedBatch


class _RoundedMoveBatch(_SpoiledMoveBatch):
    def spoil(self, kv: list[Tensor], before: list[Tensor], moved: Tensor) -> None:
        for x in kv:
            x[: len(moved)][moved] = x[: len(moved)][moved].to(torch.float8_e5m2).to(x.dtype)


class RoundedMove(HeldOut):
    """KV that is realigned passes through an 8-bit float.

    From a scratch buffer whose dtype is not the cache's.
    """

    kind = "wrong_kv"
    suspect = "kv_cache"
    batch_type = _RoundedMoveBatch


class _DraftNotMovedBatch(_SpoiledMoveBatch):
    victims = slice(1, None)

    def spoil(self, kv: list[Tensor], before: list[Tensor], moved: Tensor) -> None:
        for x, unmoved in zip(kv, before):
            x.copy_(unmoved)


class DraftNotMoved(HeldOut):
    """Only the target's KV is realigned, so drafts get worse; the target never goes wrong, and no alarm may be raised.

    From code that forgets that the draft model has a cache of its own.
    """

    kind = None
    suspect = None
    batch_type = _DraftNotMovedBatch


class _CacheNotCompactedBatch(PaddedBatch):
    def _keep_rows(self, keep: list[int]) -> list[int]:
        caches = self._caches
        self._caches = caches[1:]
        order = super()._keep_rows(keep)
        self._caches = caches
        return order


class CacheNotCompacted(HeldOut):
    """A row that takes a finished row's slot finds the finished row's KV there.

    From compactions that move tokens, starts and masks, but not the target's cache.
    """

    kind = "other_row"
    suspect = "kv_cache"
    batch_type = _CacheNotCompactedBatch


class _OverlayBatch(HoleBatch):
    """Masked holes of which ``wrong`` ``[B, C]`` columns are shown where they should be hidden, or hidden where shown.

    Position IDs stay right.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.wrong = torch.zeros_like(self.visible)

    def seen_columns(self, stop: int) -> Tensor:
        return super().seen_columns(stop) ^ self.wrong[: len(self), :stop]

    def commit(self, draft_ids: Tensor, target_ids: Tensor, limit: Tensor, n_accepted: Tensor | None) -> Tensor:
        summary = super().commit(draft_ids, target_ids, limit, n_accepted)
        self.spoil(summary[:, 0], draft_ids.shape[1])
        return summary

    def spoil(self, n_accepted: Tensor, num_drafts: int) -> None:
        """Row b's accepted drafts are in columns ``[end, end + n_accepted_b)``."""
        raise NotImplementedError

    def mark(self, rows: Tensor, column: Tensor) -> None:
        """Of the rows ``[B]`` bool, column ``column[b]`` becomes wrong."""
        index = rows.nonzero()[:, 0]
        self.wrong[index, column[index]] = True

    def advance(self, summary: list[list[int]]) -> list[int]:
        order = super().advance(summary)
        self.wrong[: len(order)] = self.wrong[order]
        return order

    def _repack(self, capacity: int) -> None:
        wrong = self.wrong[: len(self), self.first_column : self.end]
        super()._repack(capacity)
        self.wrong = torch.zeros_like(self.visible)
        self.wrong[:, self.slack : self.end] = wrong


class _LastDraftDroppedBatch(_OverlayBatch):
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


class _FirstRejectedKeptBatch(_OverlayBatch):
    def spoil(self, n_accepted: Tensor, num_drafts: int) -> None:
        self.mark(n_accepted < num_drafts, self.end + n_accepted)


class FirstRejectedKept(HeldOut):
    """The first rejected draft of every round stays visible; position IDs count the text.

    From a crop to ``length + n + 1``, which counts an entry for the bonus token.
    """

    kind = "kept_rejected_token"
    suspect = "kv_cache"
    batch_type = _FirstRejectedKeptBatch


class _FirstDraftTwiceBatch(_OverlayBatch):
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


class _PaddingEdgeBatch(_OverlayBatch):
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


class _GapAcceptance(GreedyAcceptance):
    def __call__(self, draft_ids: Tensor, limit: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        target_ids, _ = super().__call__(draft_ids, limit, logits)
        inside = torch.arange(draft_ids.shape[1], device=limit.device) < limit[:, None]
        return target_ids, ((draft_ids == target_ids[:, :-1]) & inside).sum(1)


class GapsAccepted(HeldOut):
    """As many drafts are kept as equal the target's choice, matches behind the first mismatch included.

    From a sum of matches where a cumulative product belongs.
    """

    kind = "wrong_token"
    suspect = "acceptance"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, acceptance=_GapAcceptance())


class _MaximumAcceptance(GreedyAcceptance):
    def __call__(self, draft_ids: Tensor, limit: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        target_ids, _ = super().__call__(draft_ids, limit, logits)
        n_accepted, _ = reference.accept_greedy(draft_ids, target_ids, limit)
        return target_ids, torch.minimum(n_accepted.amax(), limit)


class BatchMaximum(HeldOut):
    """Every row keeps as many drafts as the best row.

    From a reduction over the batch that keeps it rectangular, with the maximum where the minimum belongs.
    """

    kind = "wrong_token"
    suspect = "acceptance"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, acceptance=_MaximumAcceptance())


class _LateBonusAcceptance(GreedyAcceptance):
    def __call__(self, draft_ids: Tensor, limit: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        target_ids, _ = super().__call__(draft_ids, limit, logits)
        n_accepted, _ = reference.accept_greedy(draft_ids, target_ids, limit)
        late = (n_accepted + (n_accepted < limit))[:, None]
        return target_ids.scatter(1, n_accepted[:, None], target_ids.gather(1, late)), n_accepted


class LateBonus(HeldOut):
    """The bonus token is the target's choice after the first rejected draft, not before it.

    From logits indexed by tokens fed, off by one at the last committed token.
    """

    kind = "wrong_token"
    suspect = "acceptance"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, acceptance=_LateBonusAcceptance())


class _OwnStopsBatch(PaddedBatch):
    """Ends rows at ``own_stops``, of which the host knows nothing, so that it cuts no row's tokens there."""

    own_stops: ClassVar[list[int]] = []


class _OwnStops(HeldOut):
    """Hands the EOS ids to its batch alone; every finish reason is ``"length"``."""

    batch_type: type[_OwnStopsBatch]

    def generate(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, eos_token_id=None, **options: Any
    ) -> GenerationResult:
        own_stops = compat.eos_ids(self.target.model, eos_token_id)
        self.batch_type = type("Batch", (type(self).batch_type,), {"own_stops": own_stops})
        return super().generate(input_ids, attention_mask, eos_token_id=[], **options)


class _UncutBatch(_OwnStopsBatch):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.stop_ids = self.stop_ids.new_tensor(self.own_stops)


class TokensAfterEos(_OwnStops):
    """A row ends with the block that holds its EOS, and keeps what the block holds behind it.

    From stopping criteria that look at a round's tokens as one step.
    """

    kind = None
    suspect = "stopping"
    batch_type = _UncutBatch


class _OnlyBonusBatch(_OwnStopsBatch):
    def commit(self, draft_ids: Tensor, target_ids: Tensor, limit: Tensor, n_accepted: Tensor | None) -> Tensor:
        summary = super().commit(draft_ids, target_ids, limit, n_accepted)
        bonus = summary.gather(1, summary[:, :1] + 3)[:, 0]
        summary[:, 1] |= torch.isin(bonus, bonus.new_tensor(self.own_stops))
        return summary


class OnlyBonusStops(_OwnStops):
    """An EOS among the accepted drafts ends nothing; only one in the bonus token does.

    From the one-token decoder's check of the newest token.
    """

    kind = None
    suspect = "stopping"
    batch_type = _OnlyBonusBatch


class _AnyDraftStopsBatch(PaddedBatch):
    def commit(self, draft_ids: Tensor, target_ids: Tensor, limit: Tensor, n_accepted: Tensor | None) -> Tensor:
        summary = super().commit(draft_ids, target_ids, limit, n_accepted)
        inside = torch.arange(draft_ids.shape[1], device=limit.device) < limit[:, None]
        summary[:, 1] |= (torch.isin(draft_ids, self.stop_ids) & inside).any(1)
        return summary


class RejectedEosStops(HeldOut):
    """A row ends in the round in which an EOS is drafted, though it was rejected.

    From a search for EOS in the drafts, done before they are judged.
    """

    kind = None
    suspect = "stopping"
    batch_type = _AnyDraftStopsBatch


class FinishOrder(HeldOut):
    """Rows are returned in the order in which they finished.

    From results appended to a list as rows leave the batch.
    """

    kind = None
    suspect = "row_order"

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        on_finish: Callable[[RowResult], None] | None = None,
        **options: Any,
    ) -> GenerationResult:
        finished: list[RowResult] = []
        result = super().generate(input_ids, attention_mask, on_finish=finished.append, **options)
        order = [row.index for row in finished]
        rows = [
            replace(row, index=asked.index, prompt_length=asked.prompt_length)
            for row, asked in zip(finished, result.rows)
        ]
        for row in rows:
            if on_finish:
                on_finish(row)
        new = result.sequences[order, input_ids.shape[1] :]
        return replace(result, sequences=torch.cat([input_ids, new], 1), rows=rows)


class _MisreadSlotsBatch(PaddedBatch):
    def advance(self, summary: list[list[int]]) -> list[int]:
        budget = self.max_length - self.length
        misread = sorted(super().advance(summary))
        # a row's budget goes with its name, so that it is spent on whatever text it is given
        self.max_length = self.length + budget[misread]
        return misread


class SlotsMisread(HeldOut):
    """After a finished row's slot is filled by the last row, the host takes the slots to be in their old order.

    From a compaction that fills holes, read as one that closes ranks; it takes three rows.
    """

    kind = None
    suspect = "row_order"
    batch_type = _MisreadSlotsBatch


HELD_OUT: dict[str, type[HeldOut]] = {
    "shared-position-counter": SharedPositionCounter,
    "prompt-padding-counted": PromptPaddingCounted,
    "positions-not-compacted": PositionsNotCompacted,
    "layer-not-moved": LayerNotMoved,
    "values-not-moved": ValuesNotMoved,
    "rounded-move": RoundedMove,
    "draft-not-moved": DraftNotMoved,
    "cache-not-compacted": CacheNotCompacted,
    "last-draft-dropped": LastDraftDropped,
    "first-rejected-kept": FirstRejectedKept,
    "first-draft-twice": FirstDraftTwice,
    "padding-edge-visible": PaddingEdgeVisible,
    "future-visible": FutureVisible,
    "short-window": ShortWindow,
    "gaps-accepted": GapsAccepted,
    "batch-maximum": BatchMaximum,
    "late-bonus": LateBonus,
    "tokens-after-eos": TokensAfterEos,
    "only-bonus-stops": OnlyBonusStops,
    "rejected-eos-stops": RejectedEosStops,
    "finish-order": FinishOrder,
    "slots-misread": SlotsMisread,
}
