"""Matrix fragments, which the threads of a warp hold together: loads, stores and products on tensor cores."""

from __future__ import annotations

import numpy as np

from .floats import floats_of
from .form import Form
from .handlers import by_warp, handles
from .operands import address, reader, vector, writer
from .scheduler import Step
from .threads import Threads

_WHOLE = np.array([0xFFFFFFFF], np.uint32)
_LANE = np.arange(32)
# of the 8 x 8 matrix that a warp holds, two to a thread: rows and columns
_ROW, _COLUMN = np.repeat(_LANE // 4, 2), (_LANE[:, None] % 4 * 2 + np.arange(2)).ravel()


@handles("ldmatrix", "stmatrix")
def _move_matrices(form: Form) -> Step:
    form.need("sync"), form.need("aligned"), form.need("m8n8")
    count, transposed = int(form.need("x1", "x2", "x4")[1:]), bool(form.take("trans"))
    form.need("shared", "shared:cta"), form.need("b16")
    form.expect(2)
    data, place = form.operands if form.op == "ldmatrix" else form.operands[::-1]
    parts, locate = vector(data), address(place, form.kernel)
    row, column = (_COLUMN, _ROW) if transposed else (_ROW, _COLUMN)

    def rows(threads: Threads, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The threads that give the address of a row, and the addresses; 8 rows to a matrix."""
        shape = by_warp(lanes, _WHOLE, threads)
        giving = lanes.reshape(shape)[:, : 8 * count].ravel()
        return giving, locate(threads, lanes).reshape(shape)[:, : 8 * count].ravel()

    if form.op == "ldmatrix":
        writes = [writer(part, form.kernel) for part in parts]

        def load(threads: Threads, lanes: np.ndarray) -> None:
            giving, addresses = rows(threads, lanes)
            # [warps, matrices, 8, 8]
            halves = threads.load("shared", addresses, 16, giving).view(np.uint16).reshape(-1, count, 8, 8)
            for i, write in enumerate(writes):
                write(threads, lanes, np.ascontiguousarray(halves[:, i, row, column]).view(np.uint32).ravel())

        return load
    reads = [reader(part, "b32", form.kernel) for part in parts]

    def store(threads: Threads, lanes: np.ndarray) -> None:
        giving, addresses = rows(threads, lanes)
        halves = np.empty((len(lanes) // 32, count, 8, 8), np.uint16)
        for i, read in enumerate(reads):
            halves[:, i, row, column] = read(threads, lanes).view(np.uint16).reshape(-1, 64)
        threads.store("shared", addresses, halves.view(np.uint8).reshape(-1, 16), giving)

    return store


@handles("mma", floats=True)
def _multiply(form: Form) -> Step:
    """``d = a b + c`` with a of 16 x 16, b of 16 x 8."""
    for modifier in ("sync", "aligned", "m16n8k16", "row", "col", "f32"):
        form.need(modifier)
    kind = form.need("f16", "bf16")
    form.need(kind), form.need("f32")
    form.expect(4)
    writes = [writer(part, form.kernel) for part in vector(form.operands[0])]
    a, b, c = ([reader(part, "b32", form.kernel) for part in vector(operand)] for operand in form.operands[1:])

    def pairs(reads: list, threads: Threads, lanes: np.ndarray, dtype: type) -> np.ndarray:
        """8 x 8 pieces, ``[pieces, warps, 8, 8]``; a register holds two halves, or two registers two floats."""
        words = np.stack([read(threads, lanes) for read in reads])
        if dtype == np.float32:
            words = words.reshape(-1, 2, len(lanes)).swapaxes(1, 2)
            return np.ascontiguousarray(words).view(np.float32).reshape(2, -1, 8, 8)
        return floats_of(words.view(np.uint16), kind).reshape(len(reads), -1, 8, 8)

    def step(threads: Threads, lanes: np.ndarray) -> None:
        by_warp(lanes, _WHOLE, threads)
        top_left, bottom_left, top_right, bottom_right = pairs(a, threads, lanes, np.uint16).astype(np.float64)
        # columns of b lie as rows do
        upper, lower = pairs(b, threads, lanes, np.uint16).astype(np.float64).swapaxes(-1, -2)
        top, bottom = pairs(c, threads, lanes, np.float32)
        with np.errstate(all="ignore"):
            top = (top + (top_left @ upper + top_right @ lower)).astype(np.float32)
            bottom = (bottom + (bottom_left @ upper + bottom_right @ lower)).astype(np.float32)
        for i, half in enumerate((top, bottom)):
            words = half.reshape(-1, 2).view(np.uint32)
            writes[2 * i](threads, lanes, words[:, 0])
            writes[2 * i + 1](threads, lanes, words[:, 1])

    return step
