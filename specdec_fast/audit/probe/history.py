"""Which query an entry of the cache came from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Origin:
    """A query whose keys and values were written; ``row`` is None for padding."""

    row: int | None
    token: int
    position: int


class History:
    """The entries of every query so far. Moving an entry keeps its bits, so equal bits name its origin."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, Tensor, Tensor, list[Origin]]] = []

    def add(self, layer: int, keys: Tensor, values: Tensor, origins: list[Origin]) -> None:
        """Remember the ``[H, Q, D]`` keys and values of Q queries."""
        self._entries.append((layer, keys.clone(), values.clone(), origins))

    def find(self, layer: int, value: Tensor, key: Tensor | None = None) -> list[Origin]:
        """Queries, latest first, that wrote ``value`` ``[H, D]`` and ``key``; None stands for any key."""
        found = []
        for entry_layer, keys, values, origins in reversed(self._entries):
            if entry_layer != layer:
                continue
            equal = _equal(values, value)
            if key is not None:
                equal &= _equal(keys, key)
            found += [origins[query] for query in equal.nonzero()[:, 0].tolist()]
        return found


def _equal(entries: Tensor, entry: Tensor) -> Tensor:
    return torch.all(entries == entry[:, None], dim=2).all(0)
