"""Data-race detection that does not depend on the order in which threads happen to run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .errors import DataRace


class Place(NamedTuple):
    """Thread and time of accesses: an *epoch* counts the barriers of its block that a thread has passed, a
    *step* those of its warp."""

    thread: np.ndarray
    block: np.ndarray
    epoch: np.ndarray
    warp: np.ndarray
    step: np.ndarray

    def of(self, which: np.ndarray) -> Place:
        return Place(*(x[which] for x in self))

    def repeated(self, count: int) -> Place:
        return Place(*(np.repeat(x, count) for x in self))


class Last:
    """The last access of one kind to every byte."""

    def __init__(self, size: int):
        self.thread, self.block, self.epoch, self.warp, self.step = (np.full(size, -1, np.int32) for _ in range(5))

    def set(self, at: np.ndarray, place: Place) -> None:
        self.thread[at], self.block[at], self.epoch[at] = place.thread, place.block, place.epoch
        self.warp[at], self.step[at] = place.warp, place.step

    def same_epoch(self, at: np.ndarray, place: Place) -> np.ndarray:
        return (self.block[at] == place.block) & (self.epoch[at] == place.epoch)

    def before_in_warp(self, at: np.ndarray, place: Place) -> np.ndarray:
        """In an epoch: ordered by a barrier of the warp."""
        return (self.warp[at] == place.warp) & (self.step[at] != place.step)


class Shadow:
    """Last writer and readers of every byte of a region.

    Two accesses race if different threads make them, at least one stores, and no barrier lies between: a barrier
    orders the threads of one block or warp, nothing orders two blocks.

    Args:
        size: bytes.
        same_value_allowed: threads may store equal bytes to one place; compilers do so in shared memory.
    """

    def __init__(self, size: int, same_value_allowed: bool):
        self.same_value_allowed = same_value_allowed
        self.store, self.load = Last(size), Last(size)
        # besides the last reader: others of its block in its epoch, those of other warps, and other blocks at any time
        self.more_readers, self.more_warps, self.more_blocks = (np.zeros(size, bool) for _ in range(3))

    def _racing_writer(self, at: np.ndarray, place: Place) -> np.ndarray:
        last = self.store
        ordered = (last.block[at] == place.block) & (last.epoch[at] != place.epoch)
        ordered |= last.same_epoch(at, place) & last.before_in_warp(at, place)
        return (last.thread[at] >= 0) & (last.thread[at] != place.thread) & ~ordered

    def read(self, at: np.ndarray, place: Place) -> None:
        """Threads read the bytes ``at``; all arrays have one entry per byte."""
        racing = self._racing_writer(at, place)
        if racing.any():
            self._report("store and load", racing, at, place, self.store)
        last = self.load
        known, same_block, same_epoch = last.thread[at] >= 0, last.block[at] == place.block, last.same_epoch(at, place)
        self.more_readers[at] = same_epoch & (self.more_readers[at] | (last.thread[at] != place.thread))
        self.more_warps[at] = same_epoch & (self.more_warps[at] | (last.warp[at] != place.warp))
        self.more_blocks[at] |= known & ~same_block
        last.set(at, place)
        shared = last.thread[at] != place.thread
        if shared.any():
            self.more_readers[at[shared]] = True
            self.more_warps[at[shared]] |= last.warp[at[shared]] != place.warp[shared]
            self.more_blocks[at[shared]] |= last.block[at[shared]] != place.block[shared]

    def write(self, at: np.ndarray, place: Place, old: np.ndarray, new: np.ndarray) -> None:
        """Threads store ``new`` over the bytes ``at``, which hold ``old``."""
        racing = self._racing_writer(at, place)
        if self.same_value_allowed:
            racing &= old != new
        if racing.any():
            self._report("two stores", racing, at, place, self.store)
        last = self.load
        others = (last.thread[at] != place.thread) | self.more_readers[at]
        ordered = last.before_in_warp(at, place) & ~self.more_warps[at]
        racing = last.same_epoch(at, place) & others & ~ordered
        racing |= (last.thread[at] >= 0) & (last.block[at] != place.block)
        racing |= self.more_blocks[at]
        if racing.any():
            self._report("load and store", racing, at, place, self.load)
        self.store.set(at, place)
        lost = self.store.thread[at] != place.thread
        if lost.any():
            if self.same_value_allowed:
                stored = dict(zip(at.tolist(), new.tolist(), strict=True))
                lost &= new != np.array([stored[i] for i in at.tolist()], np.uint8)
            if lost.any():
                self._report("two stores of one instruction", lost, at, place, self.store)

    def _report(self, what: str, racing: np.ndarray, at: np.ndarray, place: Place, other: Last) -> None:
        i = np.flatnonzero(racing)[0]
        raise DataRace(
            f"{what}: threads {place.thread[i]} and {other.thread[at[i]]} at byte {at[i]}, no barrier between"
            f" ({np.count_nonzero(racing)} bytes)"
        )
