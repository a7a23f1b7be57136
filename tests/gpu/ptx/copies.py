"""Asynchronous copies from global to shared memory.

A copy may land at any time between its start and the wait for it, so until then its target holds garbage, and both
moments count as stores to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .threads import Threads


@dataclass
class Copy:
    """Bytes on their way; ``group`` counts what its thread had committed before."""

    lanes: np.ndarray
    addresses: np.ndarray
    values: np.ndarray
    group: np.ndarray


@dataclass
class Copies:
    """Of a batch of blocks; ``committed`` counts the groups of every thread."""

    committed: np.ndarray
    started: list[Copy] = field(default_factory=list)

    def start(self, threads: Threads, lanes: np.ndarray, addresses: np.ndarray, values: np.ndarray) -> None:
        threads.store("shared", addresses, np.full_like(values, 0xFF), lanes)
        self.started.append(Copy(lanes, addresses, values, self.committed[lanes]))

    def finish(self, threads: Threads, lanes: np.ndarray, pending: int) -> None:
        """Let all but the last ``pending`` groups of ``lanes`` land."""
        waits = np.zeros(len(threads), bool)
        waits[lanes] = True
        remaining = []
        for copy in self.started:
            lands = waits[copy.lanes] & (copy.group + pending < self.committed[copy.lanes])
            if lands.any():
                threads.store("shared", copy.addresses[lands], copy.values[lands], copy.lanes[lands])
            if not lands.all():
                remaining.append(Copy(*(x[~lands] for x in (copy.lanes, copy.addresses, copy.values, copy.group))))
        self.started = remaining
