"""Loads a PTX module and launches its kernels on host memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from . import asynchronous, floats, instructions, matrices, warpgroups  # noqa: F401
from .errors import PtxError
from .handlers import compile_instruction
from .memory import GlobalMemory, Region
from .parser import Kernel, parse
from .scheduler import Step, is_control, run
from .threads import Statistics, Threads

_BATCH_THREADS = 16384
Argument = int | float | bytes | Tensor


class Emulator:
    """The kernels of a PTX module; what cannot be executed faithfully is refused here.

    >>> Emulator(ptx).launch("shift", grid=(4,), block=(128,), arguments=[x, 3])
    """

    def __init__(self, ptx: str):
        self.kernels = parse(ptx)
        self.steps = {name: _compile(kernel) for name, kernel in self.kernels.items()}

    def launch(
        self,
        name: str,
        grid: Sequence[int],
        arguments: Sequence[Argument],
        memory: Sequence[Tensor] = (),
        block: Sequence[int] | None = None,
        dynamic_shared: int = 0,
        detect_races: bool = True,
    ) -> Statistics:
        """Run a kernel to its end.

        Args:
            name: a part of the kernel's name that no other kernel has.
            grid: blocks in x, y, z.
            arguments: integers, floats, tensors (by address) or the bytes of a struct; those left out are zero.
            memory: tensors reached through pointers that are themselves in memory.
            block: threads in x, y, z, where the kernel does not fix them.
            dynamic_shared: bytes.
            detect_races: raise :class:`DataRace`.
        """
        (kernel,) = (kernel for kernel in self.kernels.values() if name in kernel.name)
        statistics = Statistics()
        for tensor in (*(x for x in arguments if isinstance(x, Tensor)), *memory):
            region = _region(f"tensor {len(statistics.regions)}", tensor, detect_races)
            if len(region.data):
                statistics.regions.setdefault(region.base, region)
        global_memory = GlobalMemory(list(statistics.regions.values()))
        parameters = Region("the parameters", 0, _pack(kernel, arguments))
        shared_bytes = -(-kernel.shared_bytes // 16) * 16 + dynamic_shared
        grid, block = _extent(grid), _extent(block or kernel.block)
        blocks, step = int(np.prod(grid)), max(1, _BATCH_THREADS // int(np.prod(block)))
        for first in range(0, blocks, step):
            threads = Threads(
                kernel.registers,
                first,
                min(step, blocks - first),
                grid,
                block,
                shared_bytes,
                parameters,
                global_memory,
                statistics,
                detect_races,
            )
            with np.errstate(over="ignore"):
                run(kernel, self.steps[kernel.name], threads)
        return statistics


def _compile(kernel: Kernel) -> list[Step | None]:
    steps: list[Step | None] = []
    for instruction in kernel.code:
        try:
            steps.append(None if is_control(instruction, kernel) else compile_instruction(instruction, kernel))
        except PtxError as error:
            raise type(error)(f"{kernel.name} line {instruction.line}: `{instruction.text}`: {error}") from None
    return steps


def _region(name: str, tensor: Tensor, detect_races: bool) -> Region:
    """The whole storage of a tensor."""
    storage = tensor.untyped_storage()
    data = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return Region(name, storage.data_ptr(), data, detect_races)


def _extent(extent: Sequence[int] | None) -> tuple[int, int, int]:
    if extent is None:
        raise PtxError("the kernel does not fix its block, and none was given")
    x, y, z = (*extent, 1, 1)[:3]
    return x, y, z


def _pack(kernel: Kernel, arguments: Sequence[Argument]) -> np.ndarray:
    packed = np.zeros(max((p.offset + p.size for p in kernel.parameters), default=0), np.uint8)
    if len(arguments) > len(kernel.parameters):
        raise PtxError(f"{kernel.name} takes {len(kernel.parameters)} arguments, not {len(arguments)}")
    for parameter, value in zip(kernel.parameters, arguments, strict=False):
        if isinstance(value, Tensor):
            value = value.data_ptr()
        if isinstance(value, int):
            value = (value % (1 << 8 * parameter.size)).to_bytes(parameter.size, "little")
        if isinstance(value, float):
            value = np.float32(value).tobytes()
        if len(value) != parameter.size:
            raise PtxError(f"{parameter.name} has {parameter.size} bytes, not {len(value)}")
        packed[parameter.offset : parameter.offset + parameter.size] = np.frombuffer(value, np.uint8)
    return packed
