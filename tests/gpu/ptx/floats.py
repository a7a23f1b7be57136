"""Floating point. Results are rounded once, to nearest; hardware may be off by its documented error where it says
``approx`` or ``full``, so what is computed here is compared within a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .form import Form
from .handlers import by_warp, elementwise, handles
from .operands import writer
from .scheduler import Step
from .threads import Threads

_TINY = np.finfo(np.float32).tiny
_ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "fma": lambda a, b, c: a * b + c,
    "div": np.divide,
    "ex2": np.exp2,
    "neg": np.negative,
    "abs": np.abs,
    # of two or three; a number wins over NaN
    "max": lambda *values: np.fmax.reduce(values),
    "min": lambda *values: np.fmin.reduce(values),
}
_OPERANDS = {"fma": 3, "ex2": 1, "neg": 1, "abs": 1}
_ROUNDINGS = {"fma": ("rn",), "div": ("full", "rn"), "ex2": ("approx",)}
_COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater}
_COMPARE["ge"] = np.greater_equal


def _flushed(values: np.ndarray) -> np.ndarray:
    return np.where(np.abs(values) < _TINY, np.copysign(np.float32(0), values), values)


@handles(*_ARITHMETIC, floats=True)
def _arithmetic(form: Form) -> Step:
    function, count = _ARITHMETIC[form.op], _OPERANDS.get(form.op, 2)
    if form.op in ("max", "min") and len(form.operands) == 4:
        count = 3
    if form.op in _ROUNDINGS:
        form.need(*_ROUNDINGS[form.op])
    elif form.op in ("add", "sub", "mul"):
        form.take("rn")
    flush = bool(form.take("ftz"))
    # two floats in a register are as good as two registers
    register = "b64" if form.need("f32", "f32x2") == "f32x2" else "b32"

    def compute(*bits: np.ndarray) -> np.ndarray:
        values = [x.view(np.float32) for x in bits]
        values = [_flushed(x) if flush else x for x in values]
        with np.errstate(all="ignore"):
            result = function(*(x.astype(np.float64) for x in values)).astype(np.float32)
        return (_flushed(result) if flush else result).view(bits[0].dtype)

    return elementwise(form, compute, [register] * count)


@handles("selp", "mov", floats=True)
def _choose(form: Form) -> Step:
    form.need("f32")
    if form.op == "mov":
        return elementwise(form, lambda a: a, ["b32"])
    return elementwise(form, lambda a, b, p: np.where(p, a, b), ["b32", "b32", "pred"])


@handles("setp", floats=True)
def _compare(form: Form) -> Step:
    name = form.need(*_COMPARE, *(f"{ordered}u" for ordered in _COMPARE))
    compare, unordered = _COMPARE[name[:2]], name[2:] == "u"
    form.need("f32")
    form.expect(3)
    write, reads = writer(form.operands[0], form.kernel), [form.read(i, "b32") for i in (1, 2)]

    def step(threads: Threads, lanes: np.ndarray) -> None:
        a, b = (read(threads, lanes).view(np.float32) for read in reads)
        either_nan = np.isnan(a) | np.isnan(b)
        write(threads, lanes, np.where(either_nan, unordered, compare(a, b)))

    return step


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """float32 to bfloat16, to nearest even."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


def _half_bits(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return values.astype(np.float16).view(np.uint16)


def floats_of(halves: np.ndarray, kind: str) -> np.ndarray:
    """uint16 bits of f16 or bf16 as float32."""
    return halves.view(np.float16).astype(np.float32) if kind == "f16" else _widened(halves)


def _widened(halves: np.ndarray) -> np.ndarray:
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


@handles("cvt", floats=True)
def _convert(form: Form) -> Step:
    if form.take("rn"):
        target = form.need("bf16", "f16", "bf16x2", "f16x2")
        form.need("f32")
        narrow = bfloat16_bits if target.startswith("b") else _half_bits
        if not target.endswith("x2"):
            return elementwise(form, lambda a: narrow(a.view(np.float32)), ["b32"])

        def pack(high: np.ndarray, low: np.ndarray) -> np.ndarray:
            high, low = (narrow(x.view(np.float32)).astype(np.uint32) for x in (high, low))
            return high << np.uint32(16) | low

        return elementwise(form, pack, ["b32", "b32"])
    form.need("f32")
    source = form.need("bf16", "f16")
    return elementwise(form, lambda a: floats_of(a, source).view(np.uint32), ["b16"])


@handles("redux", floats=True)
def _reduce_warp(form: Form) -> Step:
    form.need("sync"), form.need("f32")
    reduce = {"max": np.fmax, "min": np.fmin}[form.need("max", "min")]
    form.expect(3)
    write, read, members = form.write(), form.read(1, "b32"), form.read(2, "u32")

    def step(threads: Threads, lanes: np.ndarray) -> None:
        warps = read(threads, lanes).view(np.float32).reshape(by_warp(lanes, members(threads, lanes), threads))
        write(threads, lanes, np.repeat(reduce.reduce(warps, axis=1), 32).view(np.uint32))

    return step
