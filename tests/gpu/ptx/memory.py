"""Host memory as a kernel sees it: bounds, alignment, races, and counts of what was touched."""

from __future__ import annotations

from collections import Counter

import numpy as np

from .errors import Misaligned, OutOfBounds
from .races import Place, Shadow


class Region:
    """One allocation.

    ``loads`` and ``stores`` count the accesses of every byte, ``widths`` the warp requests by bytes per thread, and
    ``sectors`` the 32-byte pieces that those requests touch.

    Args:
        name: for messages.
        base: address of the first byte.
        data: uint8 view of the memory itself.
        detect_races: keep a shadow.
        same_value_allowed: see :class:`Shadow`.
    """

    def __init__(
        self, name: str, base: int, data: np.ndarray, detect_races: bool = False, same_value_allowed: bool = False
    ):
        self.name, self.base, self.data = name, base, data
        self.loads, self.stores = np.zeros(len(data), np.uint16), np.zeros(len(data), np.uint16)
        self.widths: Counter[int] = Counter()
        self.sectors = 0
        self.shadow = Shadow(len(data), same_value_allowed) if detect_races else None

    def _touch(self, offsets: np.ndarray, size: int, who: Place) -> np.ndarray:
        """Count an access and return its bytes, ``[threads, size]``."""
        outside = (offsets < 0) | (offsets + size > len(self.data))
        if outside.any():
            raise OutOfBounds(f"{size} bytes at byte {offsets[outside][0]} of {self.name}, which has {len(self.data)}")
        self.widths[size] += len(np.unique(who.warp))
        first = (self.base + offsets) // 32
        sectors = who.warp.astype(np.int64) << 48 ^ first
        # an aligned access of up to 32 bytes stays in one sector
        self.sectors += len(np.unique(sectors)) * max(1, size // 32)
        return offsets[:, None] + np.arange(size)

    def load(self, offsets: np.ndarray, size: int, who: Place) -> np.ndarray:
        """``[threads, size]`` uint8."""
        at = self._touch(offsets, size, who)
        np.add.at(self.loads, at.ravel(), np.uint16(1))
        if self.shadow:
            self.shadow.read(at.ravel(), who.repeated(size))
        return self.data[at]

    def store(self, offsets: np.ndarray, values: np.ndarray, who: Place) -> None:
        """``values`` is ``[threads, size]`` uint8."""
        size = values.shape[1]
        at = self._touch(offsets, size, who)
        np.add.at(self.stores, at.ravel(), np.uint16(1))
        if self.shadow:
            self.shadow.write(at.ravel(), who.repeated(size), self.data[at.ravel()], values.ravel())
        self.data[at] = values


def check_alignment(addresses: np.ndarray, size: int) -> None:
    wrong = addresses % np.uint64(size) != 0
    if wrong.any():
        raise Misaligned(f"{size} bytes at {int(addresses[wrong][0]):#x}")


class GlobalMemory:
    """The allocations a kernel was given; an address belongs to the one that contains it."""

    def __init__(self, regions: list[Region]):
        self.regions = sorted(regions, key=lambda region: region.base)
        self.bases = np.array([region.base for region in self.regions], np.uint64)

    def parts(self, addresses: np.ndarray, size: int) -> list[tuple[Region, np.ndarray, np.ndarray]]:
        """``(region, which of the addresses, offsets)`` of every region that is hit."""
        index = np.searchsorted(self.bases, addresses, side="right") - 1
        if (index < 0).any():
            raise OutOfBounds(f"{size} bytes at {int(addresses[index < 0][0]):#x}, below all memory")
        hits = []
        for i in np.unique(index):
            which = np.flatnonzero(index == i)
            hits.append((self.regions[i], which, (addresses[which] - self.bases[i]).astype(np.int64)))
        return hits
