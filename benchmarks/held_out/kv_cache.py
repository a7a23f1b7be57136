"""Entries of the KV cache are not what the model computed for their row."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_fast import reference
from specdec_fast.layouts.padded.batch import PaddedBatch

from .base import HeldOut
from .moves import SpoiledMoveBatch


class _LayerNotMovedBatch(SpoiledMoveBatch):
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


class _ValuesNotMovedBatch(SpoiledMoveBatch):
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


class _RoundedMoveBatch(SpoiledMoveBatch):
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


class _DraftNotMovedBatch(SpoiledMoveBatch):
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


class _ScaledKeysBatch(SpoiledMoveBatch):
    def spoil(self, kv: list[Tensor], before: list[Tensor], moved: Tensor) -> None:
        for x in kv[::2]:
            x[: len(moved)][moved] *= x.shape[-1] ** -0.5


class KeysScaledAgain(HeldOut):
    """Keys that are realigned are multiplied by the softmax scale.

    From kernels that keep keys scaled, and scale whatever they write.
    """

    kind = "wrong_kv"
    suspect = "kv_cache"
    batch_type = _ScaledKeysBatch


class _ExchangedHeadsBatch(SpoiledMoveBatch):
    def spoil(self, kv: list[Tensor], before: list[Tensor], moved: Tensor) -> None:
        for x in kv:
            x[: len(moved)][moved] = x[: len(moved)][moved].flip(1)


class HeadsExchanged(HeldOut):
    """A row that is realigned gets its KV heads back in reverse order.

    From a scratch buffer that is filled and read in different layouts.
    """

    kind = "wrong_kv"
    suspect = "kv_cache"
    batch_type = _ExchangedHeadsBatch


class _OpeningValueBatch(PaddedBatch):
    def commit(self, draft_ids: Tensor, target_ids: Tensor, limit: Tensor, n_accepted: Tensor | None) -> Tensor:
        if draft_ids.shape[1]:
            for x in self._caches[0].tensors()[1::2]:
                x[: len(self), :, self.end - 1] = x[: len(self), :, self.end]
        return super().commit(draft_ids, target_ids, limit, n_accepted)


class OpeningValueOverwritten(HeldOut):
    """The token that opens a verified block keeps its key, but its value becomes that of the first draft.

    From values written one column too far to the left.
    """

    kind = "wrong_kv"
    suspect = "kv_cache"
    batch_type = _OpeningValueBatch


class _ExchangedNeighboursBatch(SpoiledMoveBatch):
    def spoil(self, kv: list[Tensor], before: list[Tensor], moved: Tensor) -> None:
        ends = (self.start + self.length)[:2].tolist()
        if len(ends) == 2 and ends[0] == ends[1] and moved[:2].any():
            for x in kv:
                x[:2, :, ends[0] - 2] = x[:2, :, ends[0] - 2].flip(0)


class NeighboursExchanged(HeldOut):
    """The first two rows exchange their newest entries if one of them is moved.

    From threads that disagree on the row they copy at the edge of a tile.
    """

    kind = "other_row"
    suspect = "kv_cache"
    batch_type = _ExchangedNeighboursBatch


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
