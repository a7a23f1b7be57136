"""Operands of an instruction as functions of the threads that execute it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .errors import Unsupported
from .parser import Kernel
from .types import bits_for, size_of, typed

if TYPE_CHECKING:
    from .threads import Threads

# lanes: positions of the active threads in the batch
Reader = Callable[["Threads", np.ndarray], np.ndarray]
Writer = Callable[["Threads", np.ndarray, np.ndarray], None]

# where the state spaces lie among generic addresses
SHARED_WINDOW = 1 << 60
PARAM_WINDOW = 1 << 61
SPECIAL = {f"%{name}.{axis}" for name in ("tid", "ctaid", "ntid", "nctaid") for axis in "xyz"} | {"%laneid"}


def reader(operand: str, type_name: str, kernel: Kernel) -> Reader:
    """Values of a register, special register, immediate or symbol, as type ``type_name``."""
    if operand in kernel.registers:
        return lambda threads, lanes: typed(threads.registers[operand][lanes], type_name)
    if operand in SPECIAL:
        return lambda threads, lanes: typed(threads.special[operand][lanes], type_name)
    value = np.array([_constant(operand, kernel)], np.uint64)
    constant = (value != 0) if type_name == "pred" else typed(value, type_name)
    return lambda threads, lanes: np.repeat(constant, len(lanes))


def writer(operand: str, kernel: Kernel) -> Writer:
    """Store into a register; ``_`` throws the values away."""
    if operand == "_":
        return lambda threads, lanes, values: None
    if operand not in kernel.registers:
        raise Unsupported(f"destination `{operand}`")

    def write(threads: Threads, lanes: np.ndarray, values: np.ndarray) -> None:
        register = threads.registers[operand]
        register[lanes] = bits_for(values, register.dtype)

    return write


def vector(operand: str) -> list[str]:
    """Parts of ``{a, b}``, or the operand alone."""
    return [part.strip() for part in operand[1:-1].split(",")] if operand.startswith("{") else [operand]


def address(operand: str, kernel: Kernel) -> Reader:
    """``[base + offset]`` as uint64."""
    match = re.fullmatch(r"\[\s*([%\w$@]+)\s*(?:([+-])\s*(-?\w+))?\s*\]", operand)
    if not match:
        raise Unsupported(f"address `{operand}`")
    base, sign, offset = match.groups()
    delta = np.uint64((int(offset or "0", 0) * (-1 if sign == "-" else 1)) % (1 << 64))
    width = size_of(kernel.registers[base]) if base in kernel.registers else 8
    read = reader(base, f"u{8 * width}", kernel)
    return lambda threads, lanes: read(threads, lanes).astype(np.uint64) + delta


def _constant(operand: str, kernel: Kernel) -> int:
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", operand):
        return int(operand.rstrip("U"), 0) % (1 << 64)
    if re.fullmatch(r"0f[0-9a-fA-F]{8}", operand):
        return int(operand[2:], 16)
    if operand in kernel.shared:
        return kernel.shared[operand]
    if operand in kernel.dynamic_shared:
        return -(-kernel.shared_bytes // 16) * 16
    for parameter in kernel.parameters:
        if parameter.name == operand:
            return PARAM_WINDOW + parameter.offset
    raise Unsupported(f"operand `{operand}`")
