"""Data-race detection that does not depend on the order in which threads happen to run."""

from __future__ import annotations

import numpy as np

from .errors import DataRace


class Shadow:
    """Who last wrote and who last read every byte of a region.

    Two accesses race if different threads make them, at least one stores, and no barrier lies between: a barrier
    orders the threads of one block, nothing orders two blocks. An *epoch* counts the barriers a thread has passed.

    Args:
        size: bytes.
        same_value_allowed: threads may store equal bytes to one place; compilers do so in shared memory.
    """

    def __init__(self, size: int, same_value_allowed: bool):
        self.same_value_allowed = same_value_allowed
        self.writer, self.write_block, self.write_epoch = (np.full(size, -1, np.int32) for _ in range(3))
        self.reader, self.read_block, self.read_epoch = (np.full(size, -1, np.int32) for _ in range(3))
        # besides the last reader: others of its block in its epoch, and other blocks at any time
        self.more_readers, self.more_blocks = np.zeros(size, bool), np.zeros(size, bool)

    def _racing_writer(self, at: np.ndarray, thread: np.ndarray, block: np.ndarray, epoch: np.ndarray) -> np.ndarray:
        ordered = (self.write_block[at] == block) & (self.write_epoch[at] != epoch)
        return (self.writer[at] >= 0) & (self.writer[at] != thread) & ~ordered

    def read(self, at: np.ndarray, thread: np.ndarray, block: np.ndarray, epoch: np.ndarray) -> None:
        """Threads read the bytes ``at``; all arguments have one entry per byte."""
        racing = self._racing_writer(at, thread, block, epoch)
        if racing.any():
            self._report("store and load", racing, at, thread, self.writer)
        known = self.reader[at] >= 0
        same_block = self.read_block[at] == block
        same_epoch = same_block & (self.read_epoch[at] == epoch)
        self.more_readers[at] = same_epoch & (self.more_readers[at] | (self.reader[at] != thread))
        self.more_blocks[at] |= known & ~same_block
        self.reader[at], self.read_block[at], self.read_epoch[at] = thread, block, epoch
        shared = self.reader[at] != thread
        if shared.any():
            self.more_readers[at[shared]] = True
            self.more_blocks[at[shared]] |= self.read_block[at[shared]] != block[shared]

    def write(
        self,
        at: np.ndarray,
        thread: np.ndarray,
        block: np.ndarray,
        epoch: np.ndarray,
        old: np.ndarray,
        new: np.ndarray,
    ) -> None:
        """Threads store ``new`` over the bytes ``at``, which hold ``old``."""
        racing = self._racing_writer(at, thread, block, epoch)
        if self.same_value_allowed:
            racing &= old != new
        if racing.any():
            self._report("two stores", racing, at, thread, self.writer)
        same_epoch = self.read_epoch[at] == epoch
        others = (self.reader[at] != thread) | self.more_readers[at]
        racing = (self.reader[at] >= 0) & ((self.read_block[at] != block) | (same_epoch & others))
        racing |= self.more_blocks[at]
        if racing.any():
            self._report("load and store", racing, at, thread, self.reader)
        self.writer[at], self.write_block[at], self.write_epoch[at] = thread, block, epoch
        lost = self.writer[at] != thread
        if lost.any():
            if self.same_value_allowed:
                stored = dict(zip(at.tolist(), new.tolist(), strict=True))
                lost &= new != np.array([stored[i] for i in at.tolist()], np.uint8)
            if lost.any():
                self._report("two stores of one instruction", lost, at, thread, self.writer)

    def _report(self, what: str, racing: np.ndarray, at: np.ndarray, thread: np.ndarray, other: np.ndarray) -> None:
        i = np.flatnonzero(racing)[0]
        raise DataRace(
            f"{what}: threads {thread[i]} and {other[at[i]]} at byte {at[i]}, no barrier between"
            f" ({np.count_nonzero(racing)} bytes)"
        )
