"""A KV cache whose rows have lengths of their own, for unmodified transformers models."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ... import ops
from .packing import Packing


class RaggedLayer(CacheLayerMixin):
    """Keys and values ``[W, H, C, D]`` of one layer: a row for each slot."""

    is_sliding = False

    def __init__(self, cache: RaggedCache):
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (
            x.new_zeros(self.cache.num_slots, x.shape[1], self.cache.capacity, x.shape[3])
            for x in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write ``[1, H, N, D]`` to the slots and positions of the packed tokens; returns the whole pools."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        packing = self.cache.packing
        if packing is None:
            raise RuntimeError("a RaggedCache takes part in packed forwards only, see RaggedModel.forward")
        ops.append_kv_(self.keys, self.values, key_states, value_states, packing.row_of, packing.position_of)
        return self.keys, self.values

    # the packed tokens look like one row without a past; attention finds each token's own
    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return self.cache.capacity


class RaggedCache(Cache):
    """KV of all layers in a pool of slots.

    Args:
        num_slots: rows of the pool (W).
        capacity: columns of a row (C).

    Attributes:
        filled: per slot, leading positions whose KV is that of the row's text. What lies beyond is never read.
        packing: the tokens of the current forward.
    """

    layer_class = RaggedLayer

    def __init__(self, num_slots: int, capacity: int):
        super().__init__(layer_class_to_replicate=functools.partial(self.layer_class, self))
        self.num_slots = num_slots
        self.capacity = capacity
        self.filled = [0] * num_slots
        self.packing: Packing | None = None

    def truncate(self, slot: int, length: int) -> None:
        """Forget what the row in ``slot`` holds from position ``length`` on."""
        self.filled[slot] = min(self.filled[slot], length)

    def tensors(self) -> list[Tensor]:
        """Keys and values of every layer, ``[W, H, C, D]``."""
        return [x for layer in self.layers if layer.is_initialized for x in (layer.keys, layer.values)]

    @property
    def bytes_per_column(self) -> int:
        """KV bytes of one token; 0 before the first forward."""
        return sum(x.shape[1] * x.shape[3] * x.element_size() for x in self.tensors())

    def rebuild(self, kept: Sequence[int], num_slots: int, capacity: int) -> int:
        """Slots ``kept`` become the first of ``num_slots`` slots with ``capacity`` columns; returns the bytes moved."""
        filled = [self.filled[slot] for slot in kept]
        for layer in self.layers:
            if not layer.is_initialized:
                continue
            for name in ("keys", "values"):
                old = getattr(layer, name)
                new = old.new_zeros(num_slots, old.shape[1], capacity, old.shape[3])
                for place, (slot, n) in enumerate(zip(kept, filled, strict=True)):
                    new[place, :, :n] = old[slot, :, :n]
                setattr(layer, name, new)
        self.filled = filled + [0] * (num_slots - len(kept))
        self.num_slots, self.capacity = num_slots, capacity
        return sum(filled) * self.bytes_per_column
