"""Matrix products of 128 threads on operands in shared memory: ``wgmma``."""

from __future__ import annotations

import re

import numpy as np

from .errors import PtxError, Unsupported
from .floats import floats_of
from .form import Form
from .handlers import handles
from .operands import reader, vector, writer
from .products import Operand, Product
from .scheduler import Step
from .threads import Threads

_NAN = np.uint32(0x7FFFFFFF)
_THREADS = 128
_ROWS, _DEPTH = 64, 16
# bytes of a row of a swizzled piece, by the mode in a descriptor
_ROW_BYTES = {1: 128, 2: 64, 3: 32}


@handles("fence")
def _fence(form: Form) -> Step:
    """Orders what is done to memory in two ways, which are one here."""
    form.need("proxy"), form.need("async"), form.need("shared:cta")
    form.expect(0)
    return lambda threads, lanes: None


@handles("wgmma")
def _control(form: Form) -> Step:
    what = form.need("fence", "commit_group", "wait_group")
    form.need("sync"), form.need("aligned")
    form.expect(1 if what == "wait_group" else 0)
    if what == "fence":
        return lambda threads, lanes: None
    if what == "commit_group":
        return _commit
    pending = int(form.operands[0], 0)
    registers = form.kernel.registers
    writers = {name: writer(name, form.kernel) for name, kind in registers.items() if kind == "b32"}
    return lambda threads, lanes: threads.products.finish(threads, lanes, pending, writers)


def _commit(threads: Threads, lanes: np.ndarray) -> None:
    threads.products.committed[lanes] += 1


@handles("wgmma", floats=True)
def _multiply(form: Form) -> Step:
    """``d = a b + d`` with a of 64 x 16, b of 16 x N."""
    form.need("mma_async"), form.need("sync"), form.need("aligned")
    width = int(re.fullmatch(r"m64n(\d+)k16", form.need(*(f"m64n{n}k16" for n in range(8, 257, 8))))[1])
    form.need("f32")
    kind = form.need("f16", "bf16")
    form.need(kind)
    accumulators = tuple(vector(form.operands[0]))
    in_registers = form.operands[1].startswith("{")
    form.expect(7 if in_registers else 8)
    # negations and transpositions
    flags = [int(operand, 0) for operand in form.operands[4:]]
    if flags[:2] != [1, 1]:
        raise Unsupported("a negated operand")
    transposed = flags[2:] if not in_registers else [0, *flags[2:]]
    left = [reader(part, "b32", form.kernel) for part in vector(form.operands[1])] if in_registers else []
    descriptors = [None if in_registers else form.read(1, "u64"), form.read(2, "u64")]
    adds = form.read(3, "pred")
    reads = [reader(name, "b32", form.kernel) for name in accumulators]
    writes = [writer(name, form.kernel) for name in accumulators]

    def step(threads: Threads, lanes: np.ndarray) -> None:
        groups = _warpgroups(threads, lanes)
        operands: list[Operand] = []
        matrices = []
        for descriptor, extent, turned in zip(descriptors, (_ROWS, width), transposed, strict=True):
            if descriptor is None:
                words = np.stack([read(threads, lanes) for read in left])
                matrices.append(_from_fragments(floats_of(words.view(np.uint16), kind), len(groups)))
                continue
            described = descriptor(threads, lanes).reshape(len(groups), _THREADS)
            if (described != described[:, :1]).any():
                raise PtxError("threads of a warpgroup describe different matrices")
            operand = _read(threads, groups, described[:, 0], extent, bool(turned))
            operands.append(operand)
            matrices.append(_matrix(floats_of(operand.values.view(np.uint16), kind), len(groups), extent, bool(turned)))
        sums = np.stack([read(threads, lanes) for read in reads])
        operands += threads.products.take(accumulators, lanes, sums)
        sums = np.where(adds(threads, lanes), sums.view(np.float32), np.float32(0))
        with np.errstate(all="ignore"):
            product = matrices[0].astype(np.float64) @ matrices[1].astype(np.float64).swapaxes(1, 2)
            result = (sums + _to_fragments(product)).astype(np.float32).view(np.uint32)
        for write in writes:
            write(threads, lanes, np.full(len(lanes), _NAN))
        group = threads.products.committed[lanes]
        threads.products.started.append(Product(accumulators, lanes, result, group, operands))

    return step


def _warpgroups(threads: Threads, lanes: np.ndarray) -> np.ndarray:
    """The first thread of every warpgroup; refuses one of which only a part is here."""
    whole = lanes.reshape(-1, _THREADS) if len(lanes) % _THREADS == 0 else np.empty((0, _THREADS), np.int64)
    if not len(whole) or (whole - whole[:, :1] != np.arange(_THREADS)).any() or (whole[:, 0] % _THREADS != 0).any():
        raise PtxError("a warpgroup instruction without the whole warpgroup")
    return whole[:, 0]


def _read(threads: Threads, groups: np.ndarray, described: np.ndarray, extent: int, turned: bool) -> Operand:
    """An operand of ``extent`` rows (columns of b) by 16; where it is turned, a piece of 16 bytes runs along the rows.

    A piece of swizzled memory is 8 rows of as many bytes as the mode says.
    """
    start, leading, stride = _fields(described)
    row_bytes = _ROW_BYTES.get(int(described[0] >> np.uint64(62)))
    if row_bytes is None or (described >> np.uint64(49) & np.uint64(7)).any():
        raise Unsupported("a matrix that is not swizzled, or with an offset")
    if turned:
        # [16, extent / 8]: row of the piece, and 16 bytes in it
        depth, along = np.arange(_DEPTH)[:, None], np.arange(extent // 8)[None, :] * 16
        offset = depth % 8 * row_bytes + along % row_bytes
        far = (depth // 8, along // row_bytes)
    else:
        # [extent, 2]
        row, along = np.arange(extent)[:, None], np.arange(_DEPTH // 8)[None, :] * 16
        offset = row % 8 * row_bytes + along
        far = (row // 8, np.zeros_like(along))
    addresses = start[:, None, None] + offset + far[0] * stride[:, None, None] + far[1] * leading[:, None, None]
    addresses ^= addresses >> 3 & (row_bytes - 16)
    flat = addresses.reshape(len(groups), -1)
    lanes = np.repeat(groups, flat.shape[1])
    flat = flat.ravel().astype(np.uint64)
    return Operand(flat, lanes, threads.load("shared", flat, 16, lanes))


def _fields(described: np.ndarray) -> list[np.ndarray]:
    """Start, leading and stride offset of a descriptor, in bytes."""
    return [((described >> np.uint64(at) & np.uint64(0x3FFF)) << np.uint64(4)).astype(np.int64) for at in (0, 16, 32)]


def _matrix(values: np.ndarray, groups: int, extent: int, turned: bool) -> np.ndarray:
    """``[groups, extent, 16]``."""
    return values.reshape(groups, _DEPTH, extent).swapaxes(1, 2) if turned else values.reshape(groups, extent, _DEPTH)


def _from_fragments(values: np.ndarray, groups: int) -> np.ndarray:
    """Four registers of two halves, ``[4, threads * 2]``, as ``[groups, 64, 16]``."""
    # register: half of the columns, half of the rows; thread: warp, row, pair of columns
    pieces = values.reshape(2, 2, groups, 4, 8, 4, 2)
    return pieces.transpose(2, 3, 1, 4, 0, 5, 6).reshape(groups, _ROWS, _DEPTH)


def _to_fragments(product: np.ndarray) -> np.ndarray:
    """``[groups, 64, N]`` as what registers hold, ``[N / 2, threads]``."""
    groups, _, width = product.shape
    # warp, half of the rows, row; eight columns, pair of columns, column
    pieces = product.reshape(groups, 4, 2, 8, width // 8, 4, 2)
    return pieces.transpose(4, 2, 6, 0, 1, 3, 5).reshape(width // 2, groups * _THREADS)
