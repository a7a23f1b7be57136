"""Registers, stack and access widths of compiled kernels, read with the tools that come with Triton."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import triton

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_BYTES = {"128": 16, "64": 8, "": 4, "U16": 2, "U8": 1}


@dataclass(frozen=True)
class Resources:
    """Of one kernel; ``loads`` and ``stores`` are the bytes per thread of its accesses to global memory."""

    registers: int
    # spilled registers and arrays with computed indices
    stack_bytes: int
    loads: frozenset[int]
    stores: frozenset[int]


def resources(binary: Path, arch: int | None = None) -> dict[str, Resources]:
    """Of every kernel in a cubin, or in an object file for one architecture, by mangled name."""
    which = ["--gpu-architecture", f"sm_{arch}"] if arch else []
    usage = _cuobjdump("--dump-resource-usage", *which, binary)
    code = dict(re.findall(r"Function : ([\w$]+)\n(.*?)\n\s*\.{10}", _cuobjdump("--dump-sass", *which, binary), re.S))
    found = {}
    for name, line in re.findall(r"Function ([\w$]+):\n(.*)", usage):
        counts = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", line)}
        widths = {op: re.findall(rf"\b{op}\.E(?:\.(U8|U16|64|128))?(?= )", code[name]) for op in ("LDG", "STG")}
        loads, stores = (frozenset(_BYTES[width] for width in widths[op]) for op in ("LDG", "STG"))
        found[name] = Resources(counts["REG"], counts["STACK"] + counts["LOCAL"], loads, stores)
    return found


def _cuobjdump(*arguments: str | Path) -> str:
    # it looks for nvdisasm on the path
    environment = {**os.environ, "PATH": f"{_TOOLS}:{os.environ['PATH']}"}
    command = [_TOOLS / "cuobjdump", *arguments]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
