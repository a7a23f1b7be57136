"""Registers and memory of a batch of blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from .copies import Copies
from .errors import OutOfBounds, PtxError
from .memory import GlobalMemory, Region, check_alignment
from .operands import PARAM_WINDOW, SHARED_WINDOW
from .products import Products
from .races import Place
from .types import register_dtype


@dataclass
class Statistics:
    """A launch's counts; ``regions`` holds the tensors by the address of their storage."""

    warp_instructions: int = 0
    barriers: int = 0
    regions: dict[int, Region] = field(default_factory=dict)

    def region(self, tensor: Tensor) -> Region:
        """Whole storage behind a tensor."""
        return self.regions[tensor.untyped_storage().data_ptr()]


class Threads:
    """A batch of whole blocks; every array has one element per thread.

    Args:
        registers: name to PTX type.
        first_block, blocks: which blocks of the grid.
        grid, block: extents in x, y, z.
        shared_bytes: of one block.
        parameters, memory: the launch's.
        statistics: of the launch, updated here.
        detect_races: for shared memory.
    """

    def __init__(
        self,
        registers: dict[str, str],
        first_block: int,
        blocks: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        parameters: Region,
        memory: GlobalMemory,
        statistics: Statistics,
        detect_races: bool,
    ):
        per_block = block[0] * block[1] * block[2]
        lanes = np.arange(blocks * per_block)
        thread, self.slot = lanes % per_block, lanes // per_block
        number = first_block + self.slot
        self.registers = {name: np.zeros(len(lanes), register_dtype(kind)) for name, kind in registers.items()}
        self.special = {"%laneid": (thread % 32).astype(np.uint32)}
        for name, index, extent in (("tid", thread, block), ("ctaid", number, grid)):
            for i, axis in enumerate("xyz"):
                inner = int(np.prod(extent[:i]))
                self.special[f"%{name}.{axis}"] = (index // inner % extent[i]).astype(np.uint32)
                self.special[f"%n{name}.{axis}"] = np.full(len(lanes), extent[i], np.uint32)
        warp = self.slot * -(-per_block // 32) + thread // 32
        epoch, step = (np.zeros(len(lanes), np.int32) for _ in range(2))
        self.who = Place(*(x.astype(np.int32) for x in (number * per_block + thread, number)), epoch, warp, step)
        self.shared_bytes = shared_bytes
        self.shared = Region("shared memory", 0, np.zeros(blocks * shared_bytes, np.uint8), detect_races, True)
        self.parameters, self.memory, self.statistics = parameters, memory, statistics
        self.copies, self.products = (kind(np.zeros(len(lanes), np.int64)) for kind in (Copies, Products))

    def __len__(self) -> int:
        return len(self.slot)

    def load(self, space: str, addresses: np.ndarray, size: int, lanes: np.ndarray) -> np.ndarray:
        """``[lanes, size]`` uint8."""
        out = np.empty((len(lanes), size), np.uint8)
        for region, which, offsets in self._parts(space, addresses, size, lanes):
            out[which] = region.load(offsets, size, self.who.of(lanes[which]))
        return out

    def store(self, space: str, addresses: np.ndarray, values: np.ndarray, lanes: np.ndarray) -> None:
        """``values`` is ``[lanes, size]`` uint8."""
        for region, which, offsets in self._parts(space, addresses, values.shape[1], lanes):
            if region is self.parameters:
                raise OutOfBounds("a store to the parameters")
            region.store(offsets, values[which], self.who.of(lanes[which]))

    def _parts(self, space: str, addresses: np.ndarray, size: int, lanes: np.ndarray):
        check_alignment(addresses, size)
        everyone = np.arange(len(lanes))
        if space == "generic":
            space = _space_of(addresses)
            addresses = addresses % np.uint64(SHARED_WINDOW) if space == "shared" else addresses
        if space == "param":
            return [(self.parameters, everyone, (addresses - np.uint64(PARAM_WINDOW)).astype(np.int64))]
        if space == "shared":
            if (addresses + np.uint64(size) > self.shared_bytes).any():
                raise OutOfBounds(f"{size} bytes at {addresses.max()} of {self.shared_bytes} bytes of shared memory")
            return [(self.shared, everyone, addresses.astype(np.int64) + self.slot[lanes] * self.shared_bytes)]
        return self.memory.parts(addresses, size)


def _space_of(addresses: np.ndarray) -> str:
    for space, window in (("param", PARAM_WINDOW), ("shared", SHARED_WINDOW)):
        inside = addresses >= window
        if inside.any():
            if not inside.all():
                raise PtxError("one instruction reaches two state spaces")
            return space
    return "global"
