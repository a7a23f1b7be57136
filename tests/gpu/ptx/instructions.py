"""Integers, memory and what threads of a warp exchange."""

from __future__ import annotations

import numpy as np

from .errors import PtxError, Trap, Unsupported
from .form import Form
from .handlers import by_warp, elementwise, handles
from .operands import SHARED_WINDOW, address, reader, vector, writer
from .scheduler import Step
from .threads import Threads
from .types import SIGNED, UNSIGNED, size_of

_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_BINARY = {
    "add": np.add,
    "sub": np.subtract,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_UNARY = {"not": np.invert, "neg": np.negative, "abs": np.abs}
# cache hints change no value
_HINTS = ("ca", "cg", "cs", "wb", "L1:evict_first", "L1:evict_last", "L1:no_allocate")


@handles("add", "sub", "min", "max", "and", "or", "xor")
def _binary(form: Form) -> Step:
    type_name = form.type()
    return elementwise(form, _BINARY[form.op], [type_name, type_name])


@handles("not", "neg", "abs")
def _unary(form: Form) -> Step:
    return elementwise(form, _UNARY[form.op], [form.type()])


@handles("mul", "mad")
def _multiply(form: Form) -> Step:
    part, type_name = form.need("lo", "hi", "wide"), form.type()
    size = size_of(type_name)
    double = (SIGNED if type_name[0] == "s" else UNSIGNED).get(2 * size)

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if part == "lo":
            return a * b
        if part == "wide":
            return a.astype(double) * b.astype(double)
        return np.array([int(x) * int(y) >> 8 * size for x, y in zip(a, b, strict=True)], object).astype(a.dtype)

    if part == "wide" and double is None:
        raise Unsupported("a 128-bit product")
    if form.op == "mul":
        return elementwise(form, product, [type_name, type_name])
    result = f"{type_name[0]}{16 * size}" if part == "wide" else type_name
    return elementwise(form, lambda a, b, c: product(a, b) + c, [type_name, type_name, result])


@handles("div", "rem")
def _divide(form: Form) -> Step:
    type_name = form.type()

    def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if (b == 0).any():
            raise PtxError("division by zero")
        # PTX rounds towards zero, numpy down
        return a - np.fmod(a, b) if form.op == "div" else np.fmod(a, b)

    if form.op == "rem":
        return elementwise(form, divide, [type_name, type_name])
    return elementwise(form, lambda a, b: divide(a, b) // b, [type_name, type_name])


@handles("shl", "shr")
def _shift(form: Form) -> Step:
    type_name = form.type()
    bits = 8 * size_of(type_name)

    def shift(a: np.ndarray, count: np.ndarray) -> np.ndarray:
        inside = np.minimum(count, bits - 1).astype(a.dtype)
        if form.op == "shl":
            return np.where(count < bits, a << inside, a.dtype.type(0))
        fill = a >> inside
        return fill if type_name[0] == "s" else np.where(count < bits, fill, a.dtype.type(0))

    return elementwise(form, shift, [type_name, "u32"])


@handles("shf")
def _funnel_shift(form: Form) -> Step:
    left, _, _ = form.need("l", "r") == "l", form.need("wrap"), form.need("b32")

    def shift(low: np.ndarray, high: np.ndarray, count: np.ndarray) -> np.ndarray:
        joined = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
        by = (count % np.uint32(32)).astype(np.uint64)
        return (joined << by >> np.uint64(32) if left else joined >> by).astype(np.uint32)

    return elementwise(form, shift, ["u32", "u32", "u32"])


@handles("prmt")
def _permute_bytes(form: Form) -> Step:
    form.need("b32")

    def permute(low: np.ndarray, high: np.ndarray, selector: np.ndarray) -> np.ndarray:
        source = np.stack([low, high], axis=1).view(np.uint8)
        nibbles = selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & np.uint32(15)
        chosen = np.take_along_axis(source, (nibbles & 7).astype(np.int64), axis=1)
        # the top bit of a nibble asks for the sign of the byte instead
        chosen = np.where(nibbles & 8, np.where(chosen & 128, 255, 0), chosen).astype(np.uint8)
        return np.ascontiguousarray(chosen).view(np.uint32).ravel()

    return elementwise(form, permute, ["u32", "u32", "u32"])


@handles("setp")
def _compare(form: Form) -> Step:
    compare, combine = _COMPARE[form.need(*_COMPARE)], form.take("and", "or", "xor")
    type_name = form.type()
    form.expect(4 if combine else 3)
    targets = [writer(part.strip(), form.kernel) for part in form.operands[0].split("|")]
    reads = [form.read(1, type_name), form.read(2, type_name)]
    other = form.read(3, "pred") if combine else None

    def step(threads: Threads, lanes: np.ndarray) -> None:
        result = compare(*(read(threads, lanes) for read in reads))
        for write, value in zip(targets, (result, ~result), strict=False):
            if other:
                value = _BINARY[combine](value, other(threads, lanes))
            write(threads, lanes, value)

    return step


@handles("selp")
def _select(form: Form) -> Step:
    type_name = form.type()
    return elementwise(form, lambda a, b, p: np.where(p, a, b), [type_name, type_name, "pred"])


@handles("cvt")
def _convert(form: Form) -> Step:
    source, target = form.type(), form.type()
    dtype = (SIGNED if target[0] == "s" else UNSIGNED)[size_of(target)]
    return elementwise(form, lambda a: a.astype(dtype), [source])


@handles("cvta")
def _convert_address(form: Form) -> Step:
    to, space, type_name = form.take("to"), form.need("global", "shared", "param"), form.type()
    window = np.uint64(SHARED_WINDOW if space == "shared" else 0)
    return elementwise(form, lambda a: a - window if to else a + window, [type_name])


@handles("mov")
def _move(form: Form) -> Step:
    type_name = form.type()
    form.expect(2)
    targets, sources = (vector(operand) for operand in form.operands)
    if len(targets) == len(sources) == 1:
        return elementwise(form, lambda a: a, [type_name])
    whole = f"b{8 * size_of(type_name)}"
    part = f"b{8 * size_of(type_name) // max(len(targets), len(sources))}"
    dtype = UNSIGNED[size_of(part)]
    reads = [reader(source, part if len(sources) > 1 else whole, form.kernel) for source in sources]
    writes = [writer(target, form.kernel) for target in targets]

    def step(threads: Threads, lanes: np.ndarray) -> None:
        joined = np.stack([read(threads, lanes) for read in reads], axis=1)
        parts = joined.view(UNSIGNED[size_of(whole)] if len(reads) > 1 else dtype)
        for i, write in enumerate(writes):
            write(threads, lanes, parts[:, i])

    return step


@handles("ld", "st")
def _access(form: Form) -> Step:
    space = form.take("global", "shared", "shared:cta", "param") or "generic"
    space = space.split(":")[0]
    form.take(*_HINTS)
    count = int((form.take("v2", "v4", "v8") or "v1")[1:])
    type_name = form.type()
    form.expect(2)
    size = size_of(type_name)
    data, place = form.operands if form.op == "ld" else form.operands[::-1]
    parts, locate = vector(data), address(place, form.kernel)
    if len(parts) != count:
        raise Unsupported("number of vector elements")
    dtype = (SIGNED if type_name[0] == "s" else UNSIGNED)[size]
    if form.op == "ld":
        writes = [writer(part, form.kernel) for part in parts]

        def load(threads: Threads, lanes: np.ndarray) -> None:
            values = threads.load(space, locate(threads, lanes), size * count, lanes).view(dtype)
            for i, write in enumerate(writes):
                write(threads, lanes, values[:, i])

        return load
    reads = [reader(part, type_name, form.kernel) for part in parts]

    def store(threads: Threads, lanes: np.ndarray) -> None:
        values = np.stack([read(threads, lanes) for read in reads], axis=1)
        threads.store(space, locate(threads, lanes), values.view(np.uint8), lanes)

    return store


@handles("bfe")
def _extract_bits(form: Form) -> Step:
    type_name = form.need("s32", "u32", "u64")
    bits = 8 * size_of(type_name)

    def extract(a: np.ndarray, first: np.ndarray, count: np.ndarray) -> np.ndarray:
        first, count = first % np.uint32(256), count % np.uint32(256)
        moved = a >> np.minimum(first, bits - 1).astype(a.dtype)
        if type_name[0] == "u":
            moved = np.where(first < bits, moved, a.dtype.type(0))
        # the last bit of the field becomes the sign of a signed result
        unwanted = np.minimum(bits - np.minimum(count, bits), bits - 1).astype(a.dtype)
        return np.where(count > 0, moved << unwanted >> unwanted, a.dtype.type(0))

    return elementwise(form, extract, [type_name, "u32", "u32"])


@handles("redux")
def _reduce_warp(form: Form) -> Step:
    form.need("sync")
    reduce = {"add": np.add, "min": np.minimum, "max": np.maximum}[form.need("add", "min", "max")]
    type_name = form.need("s32", "u32")
    form.expect(3)
    write, read, members = form.write(), form.read(1, type_name), form.read(2, "u32")

    def step(threads: Threads, lanes: np.ndarray) -> None:
        values = read(threads, lanes)
        warps = values.reshape(by_warp(lanes, members(threads, lanes), threads))
        write(threads, lanes, np.repeat(reduce.reduce(warps, axis=1, dtype=values.dtype), 32))

    return step


@handles("shfl")
def _shuffle(form: Form) -> Step:
    form.need("sync"), form.need("b32")
    butterfly = form.need("bfly", "idx") == "bfly"
    form.expect(5)
    write, read, by, clamp, members = form.write(), *(form.read(i, "u32") for i in range(1, 5))

    def step(threads: Threads, lanes: np.ndarray) -> None:
        shape = by_warp(lanes, members(threads, lanes), threads)
        if (clamp(threads, lanes) != 31).any():
            raise PtxError("a shuffle over less than the warp")
        other = by(threads, lanes).reshape(shape) % np.uint32(32)
        other = np.arange(32) ^ other if butterfly else other
        write(
            threads, lanes, np.take_along_axis(read(threads, lanes).reshape(shape), other.astype(np.int64), 1).ravel()
        )

    return step


@handles("bar")
def _warp_barrier(form: Form) -> Step:
    form.need("warp"), form.need("sync")
    form.expect(1)
    members = form.read(0, "u32")

    def step(threads: Threads, lanes: np.ndarray) -> None:
        by_warp(lanes, members(threads, lanes), threads)
        threads.who.step[lanes] += 1

    return step


@handles("trap")
def _trap(form: Form) -> Step:
    form.expect(0)

    def step(threads: Threads, lanes: np.ndarray) -> None:
        raise Trap(f"thread {threads.who.thread[lanes[0]]}")

    return step
