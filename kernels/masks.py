"""The masks of the next verify."""

import triton
import triton.language as tl


@triton.jit
def write_query(base, columns, column_stride, low, query, hidden, BYTES: tl.constexpr, ALIGNED: tl.constexpr):
    """One query's row of a mask: it sees columns ``[low, query]``, and in the padding itself alone."""
    CHUNK: tl.constexpr = 1024
    dtype = tl.int64 if BYTES == 8 else tl.int32 if BYTES == 4 else tl.int16 if BYTES == 2 else tl.int8
    address = base.to(tl.pointer_type(dtype))
    if ALIGNED:
        address = tl.multiple_of(address, 16)
        column_stride = BYTES
        # no effect, but the compiler learns that the last vector is whole
        columns = columns // (16 // BYTES) * (16 // BYTES)
    # a bool mask is the only one of one byte
    seen = 1 if BYTES == 1 else 0
    for done in range(0, columns, CHUNK):
        column = done + tl.arange(0, CHUNK)
        visible = (column >= tl.minimum(low, query)) & (column <= query)
        value = tl.where(visible, seen, hidden).to(dtype)
        tl.store(address + column * (column_stride // BYTES), value, mask=column < columns)


@triton.jit
def write_masks(masks, mask, row, queries, new_start, new_end, SIZES: tl.constexpr, ALIGNED: tl.constexpr):
    """All queries of one row and mask; SIZES says whether there are elements of 8, 4, 2 and 1 bytes.

    ``masks`` is ``[N, 8]`` int64: address, strides of row, query and column in bytes, columns, window, bytes of an
    element, and the bits that hide a column.
    """
    entry = masks + mask * 8
    column_stride, columns, window = tl.load(entry + 3), tl.load(entry + 4).to(tl.int32), tl.load(entry + 5)
    size, hidden = tl.load(entry + 6), tl.load(entry + 7)
    for q in range(queries):
        query = new_end - 2 + q
        low = tl.where(window > 0, tl.maximum(new_start, query - window + 1), new_start)
        base = tl.load(entry) + row * tl.load(entry + 1) + q * tl.load(entry + 2)
        for i in tl.static_range(4):
            if SIZES[i] and size == 8 >> i:
                write_query(base, columns, column_stride, low, query, hidden, 8 >> i, ALIGNED)
