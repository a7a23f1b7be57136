"""A left-padded KV cache for unmodified transformers models."""

from __future__ import annotations

import functools

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class PaddedLayer(CacheLayerMixin):
    """Keys and values ``[B, H, C, D]`` of one layer; new columns are written in place, never concatenated."""

    is_sliding = False

    def __init__(self, cache: PaddedCache):
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # zeros: a masked NaN in an unwritten column would still poison attention
        self.keys, self.values = (
            x.new_zeros(x.shape[0], x.shape[1], self.cache.capacity, x.shape[3]) for x in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, width = key_states.shape[0], key_states.shape[2]
        column, end = self.cache.column, self.cache.column + width
        self.keys[:rows, :, column:end] = key_states
        self.values[:rows, :, column:end] = value_states
        first = self.cache.first_column
        return self.keys[:rows, :, first:end], self.values[:rows, :, first:end]

    def get_seq_length(self) -> int:
        return self.cache.column - self.cache.first_column

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self.cache.capacity


class PaddedCache(Cache):
    """KV of all layers, rows left-padded to a shared right edge.

    ``write_at`` says where the next forward writes; the columns before ``first_column`` hold only padding and are
    not handed to attention. Memory beyond the rows in use is never touched.

    Args:
        capacity: columns allocated per row.
    """

    layer_class = PaddedLayer

    def __init__(self, capacity: int):
        super().__init__(layer_class_to_replicate=functools.partial(self.layer_class, self))
        self.capacity = capacity
        self.column = 0
        self.first_column = 0

    def write_at(self, column: int, first_column: int) -> None:
        """The next forward writes from ``column`` on and attends from ``first_column`` on."""
        self.column, self.first_column = column, first_column

    def tensors(self) -> list[Tensor]:
        """Keys and values of every layer, ``[B, H, C, D]``."""
        return [x for layer in self.layers if layer.is_initialized for x in (layer.keys, layer.values)]

    @property
    def bytes_per_column(self) -> int:
        """KV bytes of one token."""
        return sum(x.shape[1] * x.shape[3] * x.element_size() for x in self.tensors())

    def replace_rows(self, holes: Tensor, sources: Tensor, span: tuple[int, int]) -> None:
        """Copy the columns ``span`` of rows ``sources`` into rows ``holes``."""
        first, last = span
        for x in self.tensors():
            x[holes, :, first:last] = x[sources, :, first:last]

    def repack(self, capacity: int, rows: int, span: tuple[int, int], column: int) -> None:
        """Move columns ``span`` of the first ``rows`` rows to ``column``; another ``capacity`` means new buffers."""
        first, last = span
        for layer in self.layers:
            if not layer.is_initialized:
                continue
            for name in ("keys", "values"):
                old = getattr(layer, name)
                content = old[:rows, :, first:last]
                if capacity == self.capacity:
                    new, content = old, content.clone()
                else:
                    new = old.new_zeros(rows, old.shape[1], capacity, old.shape[3])
                new[:rows, :, column : column + last - first] = content
                setattr(layer, name, new)
        self.capacity = capacity
