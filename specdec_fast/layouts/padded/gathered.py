"""EXSPEC's padded layout, as published: each forward gathers its rows from a pool, and their new KV goes back to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ... import reference
from ...integrations import compat
from ..ragged import Packing, RaggedCache, RaggedModel, RaggedPool, Segment
from ..ragged.cache import RaggedLayer
from .batch import PaddedBatch


class GatheredLayer(RaggedLayer):
    """A layer of the pool that attention sees as a padded batch of the forward's rows."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write ``[B, H, Q, D]``, of which each row's newest tokens come last; returns ``[B, H, C, D]``."""
        segments, width = self.cache.segments, key_states.shape[2]
        packed = [
            torch.cat([x[b, :, width - s.size :] for b, s in enumerate(segments)], 1)[None]
            for x in (key_states, value_states)
        ]
        super().update(*packed)
        return self._gathered(self.keys), self._gathered(self.values)

    def get_seq_length(self) -> int:
        packing = self.cache.packing
        return packing.longest - packing.most_tokens if packing else 0

    def _gathered(self, pool: Tensor) -> Tensor:
        segments = self.cache.segments
        columns = max(s.end for s in segments)
        batch = pool.new_zeros(len(segments), pool.shape[1], columns, pool.shape[3])
        for b, s in enumerate(segments):
            batch[b, :, columns - s.end :] = pool[s.slot, :, : s.end]
        return batch


class GatheredCache(RaggedCache):
    """KV of all layers in a pool of slots, for models that run over padded batches."""

    layer_class = GatheredLayer

    @property
    def segments(self) -> Sequence[Segment]:
        """Rows of the current forward."""
        return self.packing.segments if self.packing else ()


class GatheredModel(RaggedModel):
    """A causal LM that runs over padded batches of the rows of a :class:`GatheredPool`."""

    cache_type = GatheredCache

    def _logits(self, ids: Tensor, positions: Tensor, packing: Packing) -> Tensor:
        # prompts are much longer than drafts, so they run by themselves
        parts = [[i for i, s in enumerate(packing.segments) if (s.start == 0) == new] for new in (True, False)]
        logits: dict[int, Tensor] = {}
        for part in filter(None, parts):
            chosen = self._pack([packing.segments[i] for i in part], [packing.keep[i] for i in part])
            logits |= zip(part, self._forward(chosen), strict=True)
        return torch.cat([logits[i] for i in range(len(packing.segments))])

    def _forward(self, packing: Packing) -> list[Tensor]:
        """Logits ``[keep_b, V]`` of each row. Rows with fewer new tokens than others feed older ones again."""
        segments, traits, end, width = packing.segments, self.traits, packing.longest, packing.most_tokens
        slot, start = self.pool.tokens.new_tensor([(s.slot, end - s.end) for s in segments]).T
        first = end - width
        position = reference.position_ids(start, first, width, end)
        ids = self.pool.tokens[slot[:, None], position].clamp_(max=self._last_id)
        masks = {
            name: reference.attention_mask(start, first, width, 0, self.model.dtype, window)
            for name, window in traits.windows.items()
        }
        self.pool.bytes_moved += sum(s.start for s in segments) * self.cache.bytes_per_column
        self.cache.packing = packing
        try:
            with compat.turn():
                positions = position.clamp_(max=traits.max_position)
                logits = compat.call(self.model, traits, self.cache, ids, positions, masks, max(1, *packing.keep))
        finally:
            self.cache.packing = None
        return [x[len(x) - n :] for x, n in zip(logits, packing.keep, strict=True)]


class GatheredPool(RaggedPool):
    """A pool whose rows are gathered into a padded batch by every forward, the baseline of EXSPEC."""

    layout = PaddedBatch.layout
    needs = PaddedBatch.needs
    model_type = GatheredModel
