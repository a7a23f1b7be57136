"""The CUDA kernels on the host: as programs under a sanitizer, and as a library that packs kernel parameters."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .arguments import storages

_OPERATIONS = ("realign_", "realign_step_", "append_kv_")


def words(operation: str, arguments: Sequence[Any], threads: int, wanted_blocks: int, numbered: bool) -> np.ndarray:
    """A case as ``shim/harness.cpp`` reads it, int64: the arguments in the order of the schema.

    Args:
        numbered: give the memory of a tensor by the number of its storage instead of its address.
    """
    numbers = {address: i if numbered else address for i, address in enumerate(storages(arguments))}

    def flatten(value: Any) -> list[int]:
        if value is None:
            return [-1, 0, 8, 0]
        if isinstance(value, int):
            return [value]
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            offset = value.data_ptr() - storage.data_ptr() if storage.nbytes() else 0
            base = numbers.get(storage.data_ptr(), -1)
            return [base, offset, value.element_size(), value.dim(), *value.shape, *value.stride()]
        return [len(value), *(word for item in value for word in flatten(item))]

    head = [_OPERATIONS.index(operation), threads, wanted_blocks]
    body = [word for argument in arguments for word in flatten(argument)]
    hidden = [hidden_bits(x.dtype) for x in arguments[13]] if operation == "realign_step_" else []
    return np.array([*head, *body, *hidden], np.int64)


def hidden_bits(dtype: torch.dtype) -> int:
    """The smallest value of a mask's dtype as an integer of its size."""
    if dtype == torch.bool:
        return 0
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return int(torch.tensor(torch.finfo(dtype).min, dtype=dtype).view(integer))


def write_case(path: Path, case: np.ndarray, before: Sequence[Any], after: Sequence[Any]) -> None:
    """Append a case to a file: memory before and after, then its words."""
    with path.open("ab") as file:
        pairs = list(zip(storages(before).values(), storages(after).values(), strict=True))
        file.write(np.int64(len(pairs)).tobytes())
        for old, new in pairs:
            file.write(np.int64(len(old)).tobytes() + old.numpy().tobytes() + new.numpy().tobytes())
        file.write(np.int64(len(case)).tobytes() + case.tobytes())


def run(program: Path, cases: Path, **environment: str) -> subprocess.CompletedProcess:
    """Run all cases of a file; fails where memory differs or the sanitizer objects."""
    return subprocess.run([program, cases], env={**os.environ, **environment}, capture_output=True, text=True)


class Packer:
    """Kernel parameters as the launch code in ``csrc/cuda`` computes them."""

    def __init__(self, library: Path):
        self._pack = ctypes.CDLL(str(library)).pack

    def __call__(
        self, operation: str, arguments: Sequence[Any], threads: int, wanted_blocks: int
    ) -> tuple[int, int, list[bytes]]:
        """Number of blocks, bytes of dynamic shared memory, and the parameters."""
        case = words(operation, arguments, threads, wanted_blocks, numbered=False)
        header, data = np.zeros(16, np.int64), np.zeros(1 << 16, np.uint8)
        self._pack(*(x.ctypes.data_as(ctypes.c_void_p) for x in (case, header, data)))
        ends = header[2:].cumsum()
        parameters = [data[end - size : end].tobytes() for size, end in zip(header[2:], ends, strict=True) if size]
        return int(header[0]), int(header[1]), parameters
