"""Asynchronous matrix products of warpgroups.

Until a product is waited for, its accumulators hold garbage, and its operands in shared memory must stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .errors import DataRace

if TYPE_CHECKING:
    from .operands import Writer
    from .threads import Threads


class Operand(NamedTuple):
    """Pieces of 16 bytes in shared memory, and the threads that read them."""

    addresses: np.ndarray
    lanes: np.ndarray
    values: np.ndarray

    def of(self, lanes: np.ndarray) -> Operand:
        return Operand(*(x[np.isin(self.lanes, lanes)] for x in self))

    def check(self, threads: Threads) -> None:
        if (threads.load("shared", self.addresses, 16, self.lanes) != self.values).any():
            raise DataRace("an operand of a matrix product was overwritten before the product was waited for")


@dataclass(eq=False)
class Product:
    """``accumulators`` are names of registers, ``values`` ``[registers, threads]`` what they will hold.

    ``group`` counts what each thread had committed before.
    """

    accumulators: tuple[str, ...]
    lanes: np.ndarray
    values: np.ndarray
    group: np.ndarray
    operands: list[Operand]

    def of(self, which: np.ndarray) -> Product:
        lanes = self.lanes[which]
        operands = [operand.of(lanes) for operand in self.operands]
        return Product(self.accumulators, lanes, self.values[:, which], self.group[which], operands)


@dataclass
class Products:
    """Of a batch of blocks; ``committed`` counts the groups of every thread."""

    committed: np.ndarray
    started: list[Product] = field(default_factory=list)

    def take(self, accumulators: tuple[str, ...], lanes: np.ndarray, sums: np.ndarray) -> list[Operand]:
        """Put what is on its way to the accumulators into ``sums``, and return the operands that are still in use."""
        operands: list[Operand] = []
        for product in list(self.started):
            taken = np.isin(product.lanes, lanes)
            if product.accumulators != accumulators or not taken.any():
                continue
            part = product.of(taken)
            sums[:, np.searchsorted(lanes, part.lanes)] = part.values
            operands += part.operands
            self._leave(product, ~taken)
        return operands

    def finish(self, threads: Threads, lanes: np.ndarray, pending: int, writers: dict[str, Writer]) -> None:
        """Deliver all but the last ``pending`` groups of ``lanes``."""
        for product in list(self.started):
            lands = np.isin(product.lanes, lanes) & (product.group + pending < self.committed[product.lanes])
            if not lands.any():
                continue
            part = product.of(lands)
            for operand in part.operands:
                operand.check(threads)
            for name, values in zip(part.accumulators, part.values, strict=True):
                writers[name](threads, part.lanes, values)
            self._leave(product, ~lands)

    def _leave(self, product: Product, which: np.ndarray) -> None:
        self.started.remove(product)
        if which.any():
            self.started.append(product.of(which))
