"""Compiles Triton kernels for a GPU that is not there, and runs them in the emulator."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction

from . import artefacts
from .arguments import tensors
from .ptx import Emulator, Statistics

triton.knobs.cache.dir = str(artefacts.directory("triton"))


class Launch(NamedTuple):
    """A kernel that would have been launched; ``arguments`` are those it is not compiled for."""

    kernel: CompiledKernel
    grid: tuple[int, ...]
    arguments: list[Any]


class _Driver:
    """Stands in for the driver of a GPU: Triton asks it what to compile for."""

    def __init__(self, target: GPUTarget):
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> GPUTarget:
        # Triton keeps what it compiled by device
        return self._target

    def get_current_stream(self, device: GPUTarget) -> int:
        return 0


@contextlib.contextmanager
def captured_launches(target: GPUTarget) -> Iterator[list[Launch]]:
    """Compile for ``target`` what is launched meanwhile, and list it instead of running it."""
    launches, run, driver = [], JITFunction.run, triton.runtime.driver

    def capture(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        named = dict(zip(self.arg_names, args, strict=False)) | kwargs
        signature = kernel.src.signature
        arguments = [named[name] for name, kind in signature.items() if kind != "constexpr"]
        launches.append(Launch(kernel, grid, arguments))

    JITFunction.run = capture
    driver.set_active(_Driver(target))
    try:
        yield launches
    finally:
        JITFunction.run = run
        driver.set_active(None)


def emulate(launch: Launch, memory: Sequence[Tensor]) -> Statistics:
    """Run a captured launch on ``memory`` and the tensors it was given."""
    emulator = _load(launch.kernel.asm["ptx"])
    shared = launch.kernel.metadata.shared
    return emulator.launch(launch.kernel.name, launch.grid, launch.arguments, list(tensors(memory)), None, shared)


@functools.lru_cache(64)
def _load(ptx: str) -> Emulator:
    return Emulator(ptx)
