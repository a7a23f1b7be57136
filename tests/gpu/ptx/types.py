"""Registers hold unsigned bits; an instruction sees them as values of its own type."""

from __future__ import annotations

import numpy as np

from .errors import PtxError

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
# b, u and s of 8..64 bits, and predicates
NAME = r"pred|[bus](?:8|16|32|64)"
# registers hold them as bits
FLOATS = {"f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64"}


def size_of(name: str) -> int:
    """Bytes of a PTX type."""
    return 1 if name == "pred" else int(name[1:]) // 8


def register_dtype(name: str) -> type:
    return np.bool_ if name == "pred" else UNSIGNED[size_of(name)]


def typed(bits: np.ndarray, name: str) -> np.ndarray:
    """Register bits as values of type ``name``, which may be narrower than the register."""
    if name == "pred" or bits.dtype == np.bool_:
        if name != "pred" or bits.dtype != np.bool_:
            raise PtxError(f"a predicate where {name} is expected, or the reverse")
        return bits
    size = size_of(name)
    if size > bits.dtype.itemsize:
        raise PtxError(f"a {bits.dtype.itemsize}-byte register read as {name}")
    narrow = bits.astype(UNSIGNED[size], copy=False)
    return narrow.view(SIGNED[size]) if name[0] == "s" else narrow


def bits_for(values: np.ndarray, register: np.dtype) -> np.ndarray:
    """Values as the bits of a register: signed ones are sign-extended, others zero-extended."""
    if register == np.bool_ or values.dtype == np.bool_:
        if register != values.dtype:
            raise PtxError("a predicate stored in a data register, or the reverse")
        return values
    if values.dtype.itemsize > register.itemsize:
        raise PtxError(f"a {values.dtype.itemsize}-byte value stored in a {register.itemsize}-byte register")
    if values.dtype.kind == "i":
        return values.astype(SIGNED[register.itemsize], copy=False).view(register)
    return values.astype(register, copy=False)
