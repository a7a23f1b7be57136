"""Tokens, positions, masks and entries that each row of a forward pass presented to attention."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# additive masks hide by anything that softmax turns into nothing
_HIDDEN = -1e3


@dataclass
class RowView:
    """One row of a forward pass with Q queries and C columns.

    Attributes:
        slot: the row of the tensors.
        tokens: query tokens, padding included.
        positions: their position IDs.
        columns: the columns their KV is written to.
        seen: ``[Q, C]`` bool, what each query sees in layers with full attention.
        windowed: the same in layers with a sliding window, and its size; None where the model itself sees to that.
        keys, values: per layer ``[H, C, D]``, or None where a layer keeps a window of the columns only.
        logits: ``[N, V]``, of the last N queries.
        holders: rows that wrote the newest of the cached entries.
    """

    slot: int
    tokens: list[int]
    positions: list[int]
    columns: list[int]
    seen: Tensor
    windowed: tuple[Tensor, int] | None
    keys: list[Tensor | None]
    values: list[Tensor | None]
    logits: Tensor
    holders: list[int | None] = field(default_factory=list)

    @functools.cached_property
    def queries(self) -> list[int]:
        """Queries that carry content: those that the last one sees."""
        seen = self.seen[-1].tolist()
        return [query for query, column in enumerate(self.columns) if seen[column]]

    @functools.cached_property
    def cached(self) -> list[int]:
        """Columns of earlier forwards that the last query sees."""
        own = set(self.columns)
        return [column for column in self.seen[-1].nonzero()[:, 0].tolist() if column not in own]

    def masks(self, query: int) -> Iterator[tuple[Tensor, int | None]]:
        """Columns that ``query`` sees, ``[C]`` bool, and the window it sees them through, for each kind of layer."""
        yield self.seen[query], None
        if self.windowed:
            yield self.windowed[0][query], self.windowed[1]

    def choice(self, query: int) -> Tensor | None:
        """The target's logits after ``query``, or None if they were not computed."""
        index = query - len(self.tokens) + len(self.logits)
        return self.logits[index] if index >= 0 else None


class Recorder:
    """The keys and values that a cache hands to attention during one forward pass."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    @contextlib.contextmanager
    def watch(self, cache: Any) -> Iterator[None]:
        update, former = cache.update, vars(cache).get("update")

        def recording(key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
            keys, values = update(key_states, value_states, layer_idx, *args, **kwargs)
            self.keys[layer_idx], self.values[layer_idx] = keys, values
            return keys, values

        cache.update = recording
        try:
            yield
        finally:
            if former is None:
                del cache.update
            else:
                cache.update = former

    def rows(self, past: int, inputs: dict[str, Any], logits: Tensor, window: int | None) -> list[RowView]:
        """Split a forward over a rectangular batch into its rows.

        Args:
            past: columns the cache reported before the forward.
            inputs: ``input_ids`` ``[B, Q]``, ``position_ids`` and ``attention_mask`` as the caller passed them.
            logits: ``[B, N, V]``.
            window: of the model's sliding layers, if there are such.
        """
        input_ids = inputs["input_ids"]
        rows, num_queries = input_ids.shape
        width = max(keys.shape[2] for keys in self.keys.values())
        # a cache of fixed capacity hands out more columns than it has filled
        first = past if width > past + num_queries else width - num_queries
        columns = list(range(first, first + num_queries))
        positions = inputs.get("position_ids")
        if positions is None:
            positions = torch.arange(past, past + num_queries, device=input_ids.device)[None]
        positions = positions.expand(rows, -1).tolist()
        mask = inputs.get("attention_mask")
        masks = mask if isinstance(mask, dict) else {"full_attention": mask}
        seen = _seen(masks["full_attention"], rows, columns, width, input_ids.device)
        sliding = None
        banded = masks.get("sliding_attention")
        # a cache that keeps the window alone has a mask of its own width
        if window and banded is not None and banded.shape[-1] == width:
            sliding = _seen(banded, rows, columns, width, input_ids.device)
        layers = sorted(self.keys)
        whole = [self.keys[layer].shape[2] == width for layer in layers]
        return [
            RowView(
                slot,
                tokens,
                positions[slot],
                columns,
                seen[slot],
                None if sliding is None or window is None else (sliding[slot], window),
                [self.keys[layer][slot] if all_ else None for layer, all_ in zip(layers, whole, strict=True)],
                [self.values[layer][slot] if all_ else None for layer, all_ in zip(layers, whole, strict=True)],
                logits[slot],
            )
            for slot, tokens in enumerate(input_ids.tolist())
        ]


def _seen(mask: Any, rows: int, columns: list[int], width: int, device: torch.device) -> Tensor:
    """Columns that queries see under a mask as transformers takes it: ``[B, Q, C]`` bool."""
    column = torch.arange(width, device=device)
    query = torch.tensor(columns, device=device)[:, None]
    causal = (column <= query).expand(rows, -1, -1)
    if mask is None:
        return causal
    if mask.dim() == 4:
        seen = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] > _HIDDEN
        return torch.nn.functional.pad(seen, (0, width - seen.shape[2])).expand(rows, -1, -1)
    shown = torch.nn.functional.pad(mask.bool(), (0, width - mask.shape[1]))
    return causal & shown[:, None]
