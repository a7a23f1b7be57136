"""In-place moves of columns by one block."""

import triton
import triton.language as tl

# elements of a chunk: with 128 threads each holds up to 64 bytes, and as many on their way. The two differ, for else
# Triton gives a wide and a narrow chunk of one shape the same layout, and converts it before every store
WIDE_CHUNK = tl.constexpr(2048)
NARROW_CHUNK = tl.constexpr(1024)


@triton.jit
def move_vectors(first, column_stride, vector_stride, vectors, count, shift, BYTES: tl.constexpr, LANES: tl.constexpr):
    """``memmove`` of ``count`` columns by ``shift`` columns.

    ``first`` is the address of the first column; strides are in bytes. A vector of 16 bytes is four words side by
    side, any other is one element. LANES, a power of two, is at least the elements of a column.
    """
    ELEMENT: tl.constexpr = 4 if BYTES == 16 else BYTES
    PER_VECTOR: tl.constexpr = BYTES // ELEMENT
    COLUMNS: tl.constexpr = (WIDE_CHUNK if BYTES == 16 else NARROW_CHUNK) // LANES
    dtype = tl.int64 if ELEMENT == 8 else tl.int32 if ELEMENT == 4 else tl.int16 if ELEMENT == 2 else tl.int8
    # the walk starts at the edge that the shift points to, so that a chunk lands only on columns already held
    step = tl.where(shift > 0, -column_stride, column_stride)
    edge = tl.where(shift > 0, (count - 1) * column_stride, 0)
    # hints on results, because a hint on a parameter is lost when the function is inlined
    origin = tl.multiple_of((first + edge).to(tl.pointer_type(dtype)), BYTES)
    step = tl.multiple_of(step // ELEMENT, PER_VECTOR)
    by = tl.multiple_of(shift * column_stride // ELEMENT, PER_VECTOR)
    column, lane = tl.arange(0, COLUMNS)[:, None], tl.arange(0, LANES)[None, :]
    inside = lane < vectors * PER_VECTOR
    offsets = column * step + (lane if BYTES == 16 else lane * (vector_stride // ELEMENT))
    held = tl.load(origin + offsets, mask=inside & (column < count))
    for done in range(0, count, COLUMNS):
        following = done + COLUMNS
        ahead = tl.load(origin + following * step + offsets, mask=inside & (column < count - following))
        # no column is overwritten before every thread has loaded it
        tl.debug_barrier()
        tl.store(origin + by + done * step + offsets, held, mask=inside & (column < count - done))
        held = ahead


@triton.jit
def move_row(strips, strip, row, head, start, count, shift, LANES: tl.constexpr):
    """Move one row and head of one strip; LANES is for vectors of 16, 8, 4, 2 and 1 bytes, 0 where there is none.

    ``strips`` is ``[N, 8]`` int64: address, strides of row, head, column and vector in bytes, heads, vectors, and bytes
    of a vector.
    """
    entry = strips + strip * 8
    if (head < tl.load(entry + 5)) & (shift != 0) & (count > 0):
        column_stride = tl.load(entry + 3)
        first = tl.load(entry) + row * tl.load(entry + 1) + head * tl.load(entry + 2) + start * column_stride
        stride, size = tl.load(entry + 4), tl.load(entry + 7)
        vectors = tl.load(entry + 6).to(tl.int32)
        for i in tl.static_range(5):
            if LANES[i] > 0 and size == 16 >> i:
                move_vectors(first, column_stride, stride, vectors, count, shift, 16 >> i, LANES[i])
