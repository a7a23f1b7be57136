"""EXSPEC's padded layout, as published: each forward gathers its rows from a pool, and their new KV goes back to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...integrations import compat
from ..ragged import Packing, RaggedCache, RaggedModel, RaggedPool, Segment
from ..ragged.cache import RaggedLayer
from .batch import PaddedBatch


class GatheredLayer(RaggedLayer):
    """A layer of the pool that attention sees as a padded batch of the forward's rows."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write ``[B, H, Q, D]``, right-aligned as the rows are; returns ``[B, H, P + Q, D]``."""
        segments, width = self.cache.segments, key_states.shape[2]
        packed = [
            torch.cat([x[b, :, width - s.size :] for b, s in enumerate(segments)], 1)[None]
            for x in (key_states, value_states)
        ]
        super().update(*packed)
        keys, values = (
            torch.cat([self._past(pool), x], 2) for pool, x in ((self.keys, key_states), (self.values, value_states))
        )
        return keys, values

    def get_seq_length(self) -> int:
        return max((s.start for s in self.cache.segments), default=0)

    def _past(self, pool: Tensor) -> Tensor:
        segments, width = self.cache.segments, self.get_seq_length()
        past = pool.new_zeros(len(segments), pool.shape[1], width, pool.shape[3])
        for b, s in enumerate(segments):
            past[b, :, width - s.start :] = pool[s.slot, :, : s.start]
        return past


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
        texts = ids.split([s.size for s in packing.segments])
        logits: dict[int, Tensor] = {}
        for part in filter(None, parts):
            chosen = self._pack([packing.segments[i] for i in part], [packing.keep[i] for i in part])
            logits |= zip(part, self._forward([texts[i] for i in part], chosen), strict=True)
        return torch.cat([logits[i] for i in range(len(texts))])

    def _forward(self, texts: Sequence[Tensor], packing: Packing) -> list[Tensor]:
        """Logits ``[keep_b, V]`` of each row."""
        segments, keep = packing.segments, max(packing.keep)
        past, width = max(s.start for s in segments), packing.most_tokens
        ids = texts[0].new_zeros(len(segments), width)
        # position of each column, of padding -1
        columns = ids.new_full((len(segments), past + width), -1)
        for b, (s, text) in enumerate(zip(segments, texts, strict=True)):
            ids[b, width - s.size :] = text
            columns[b, past - s.start : past] = torch.arange(s.start, device=ids.device)
            columns[b, past + width - s.size :] = torch.arange(s.start, s.end, device=ids.device)
        positions = columns[:, past:].clamp(0, self.traits.max_position)
        windows, dtype = self.traits.windows, self.model.dtype
        masks = {name: _mask(columns, columns[:, past:], window, dtype) for name, window in windows.items()}
        self.pool.bytes_moved += sum(s.start for s in segments) * self.cache.bytes_per_column
        self.cache.packing = packing
        try:
            with compat.turn():
                logits = compat.call(self.model, self.traits, self.cache, ids, positions, masks, max(keep, 1))
        finally:
            self.cache.packing = None
        return [x[len(x) - n :] for x, n in zip(logits, packing.keep, strict=True)]


class GatheredPool(RaggedPool):
    """A pool whose rows are gathered into a padded batch by every forward, the baseline of EXSPEC."""

    layout = PaddedBatch.layout
    needs = PaddedBatch.needs
    model_type = GatheredModel


def _mask(keys: Tensor, queries: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Additive mask ``[B, 1, Q, P + Q]`` of positions ``keys`` for positions ``queries``; -1 is padding."""
    distance = queries[:, :, None] - keys[:, None]
    visible = (keys[:, None] >= 0) & (distance >= 0) & (distance < (window or torch.inf))
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)[:, None]
