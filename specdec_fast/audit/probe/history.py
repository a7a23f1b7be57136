"""The query that an entry of the cache came from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Origin:
    """A query whose keys and values were written.

    Attributes:
        row: of the batch.
        token, position: as it was given.
        place: tokens that the row had before it, None for padding.
    """

    row: int
    token: int
    position: int
    place: int | None

    @property
    def content(self) -> bool:
        return self.place is not None


class History:
    """The entries of every query so far. Moving an entry keeps its bits, so equal bits name its origin."""

    def __init__(self) -> None:
        self._layers: dict[int, list[tuple[Tensor, Tensor, list[Origin]]]] = defaultdict(list)

    def add(self, layer: int, keys: Tensor, values: Tensor, origins: list[Origin]) -> None:
        """Remember the ``[H, Q, D]`` keys and values of Q queries."""
        self._layers[layer].append((keys.clone(), values.clone(), origins))

    def find(self, layer: int, value: Tensor, key: Tensor | None = None) -> Iterator[Origin]:
        """Queries, latest first, that wrote ``value`` ``[H, D]`` and ``key``; None stands for any key."""
        for keys, values, origins in reversed(self._layers[layer]):
            equal = _equal(values, value)
            if key is not None:
                equal &= _equal(keys, key)
            yield from (origins[query] for query in equal.nonzero()[:, 0].tolist())


def _equal(entries: Tensor, entry: Tensor) -> Tensor:
    return torch.all(entries == entry[:, None], dim=2).all(0)
