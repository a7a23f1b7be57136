"""Cuts the head dim of a strided tensor into strips that a block moves as vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

WIDEST_VECTOR = 16
# narrower strips would waste the 32-byte sectors of DRAM
SECTOR = 32


class Strip(NamedTuple):
    """``vectors`` accesses of ``vector_bytes``, ``vector_stride`` bytes apart, from byte ``offset`` of every column."""

    offset: int
    vector_stride: int
    vectors: int
    vector_bytes: int


def power_of_two_in(bits: int) -> int:
    """Largest power of two that divides ``bits``."""
    return bits & -bits


def alignment(address: int, shape: Sequence[int], strides: Sequence[int], element: int) -> int:
    """Largest vector, in bytes, that every run of the last dimension starts on a multiple of."""
    bits = WIDEST_VECTOR | address
    for size, stride in zip(shape[:-1], strides[:-1], strict=True):
        if size > 1:
            bits |= stride * element
    return power_of_two_in(bits)


def cut(width: int, element: int, stride: int, aligned: int, pieces: int, most_vectors: int) -> Iterator[Strip]:
    """Cut ``width`` elements, ``stride`` elements apart, into about ``pieces`` strips.

    What does not fill a vector of ``aligned`` bytes becomes a strip of narrower vectors.
    """
    size = width * element
    if stride != 1:
        yield from _cut(0, size, element, stride * element, pieces, most_vectors)
        return
    body = size - size % aligned
    narrow = power_of_two_in((size - body) | WIDEST_VECTOR)
    yield from _cut(0, body, aligned, aligned, pieces, most_vectors)
    yield from _cut(body, size, narrow, narrow, pieces, most_vectors)


def _cut(begin: int, end: int, vector: int, stride: int, pieces: int, most_vectors: int) -> Iterator[Strip]:
    per_piece = -(-(end - begin) // pieces)
    step = min(-(-per_piece // SECTOR) * SECTOR, most_vectors * vector)
    for at in range(begin, end, step or 1):
        yield Strip(at // vector * stride, stride, min(step, end - at) // vector, vector)
