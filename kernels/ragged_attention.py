"""Triton kernels of the ragged layout's attention.

A program holds the queries of a tile and KV head: successive tokens of a row, times the query heads of that KV head.
So one read of a column of keys and values serves them all. Long rows are split and merged (flash-decoding).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_fast import reference

from .softmax import LOG2_E, capped, fold, raised
from .tables import wanted_blocks
from .tiles import find_columns, find_tile

# columns of the smallest split
LEAST = tl.constexpr(256)
MOST_SPLITS = 32


@triton.jit
def dot(a, b, WIDE: tl.constexpr):
    # Triton's interpreter multiplies the bits of bfloat16 as if they were integers
    if WIDE:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def store_queries(out, values, first, token, query_head, heads, exists, DIM: tl.constexpr, LANES: tl.constexpr):
    """Write ``values`` ``[M, LANES]`` to ``out`` ``[N, Hq, D]``."""
    lane = tl.arange(0, LANES)
    place = ((first + token) * heads + query_head)[:, None] * DIM + lane
    tl.store(out + place, values.to(out.dtype.element_ty), mask=exists[:, None] & (lane < DIM))


@triton.jit(do_not_specialize=["segments", "window"], do_not_specialize_on_alignment=["table"])
def attend_kernel(
    query,
    k_pool,
    v_pool,
    sinks,
    out,
    sums,
    peaks,
    table,
    segments,
    scale,
    window,
    soft_cap,
    query_head_stride,
    query_token_stride,
    query_lane_stride,
    k_row_stride,
    k_head_stride,
    k_column_stride,
    k_lane_stride,
    v_row_stride,
    v_head_stride,
    v_column_stride,
    v_lane_stride,
    STEP: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_LANES: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One program for each tile, KV head and split."""
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads, splits = tl.num_programs(1), tl.num_programs(2)
    slot, position, tokens, first = find_tile(table, segments, tile, TOKENS, SEGMENTS)
    low, end, size = find_columns(position, tokens, window, splits, STEP, WINDOWED, LEAST)
    begin = low + split * size
    if (tokens == 0) | (begin >= end):
        return
    stop = tl.minimum(begin + size, end)

    i = tl.arange(0, QUERIES)
    token, query_head = i // GROUPS, head * GROUPS + i % GROUPS
    exists = token < tokens
    lane, value_lane = tl.arange(0, LANES)[None, :], tl.arange(0, VALUE_LANES)[None, :]
    places = (first + token) * query_token_stride + query_head * query_head_stride
    q = tl.load(query + places[:, None] + lane * query_lane_stride, mask=exists[:, None] & (lane < DIM), other=0.0)
    keys = k_pool + slot * k_row_stride + head.to(tl.int64) * k_head_stride
    values = v_pool + slot * v_row_stride + head.to(tl.int64) * v_head_stride

    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    if SINKS:
        # a score without a value, which one split counts
        counts = split == 0
        sink = tl.load(sinks + query_head, mask=exists, other=0.0).to(tl.float32)
        peak = tl.where(counts, sink * LOG2_E, peak)
        total = tl.where(counts, 1.0, total)
    result = tl.zeros([QUERIES, VALUE_LANES], tl.float32)
    for at in range(begin, stop, STEP):
        column = at + tl.arange(0, STEP)
        inside = column < stop
        k = tl.load(
            keys + column[:, None] * k_column_stride + lane * k_lane_stride,
            mask=inside[:, None] & (lane < DIM),
            other=0.0,
        )
        score = dot(q, tl.trans(k), WIDE) * scale
        if CAPPED:
            score = capped(score, soft_cap)
        distance = (position + token)[:, None] - column[None, :]
        seen = (distance >= 0) & inside[None, :]
        if WINDOWED:
            seen = seen & (distance < window)
        weights, decay, peak, total = fold(tl.where(seen, score * LOG2_E, float("-inf")), peak, total)
        v = tl.load(
            values + column[:, None] * v_column_stride + value_lane * v_lane_stride,
            mask=inside[:, None] & (value_lane < VALUE_DIM),
            other=0.0,
        )
        result = result * decay[:, None] + dot(weights.to(v.dtype), v, WIDE)

    if size >= end - low:
        store_queries(
            out, result / total[:, None], first, token, query_head, heads * GROUPS, exists, VALUE_DIM, VALUE_LANES
        )
    else:
        rows = ((tile * heads + head) * splits + split) * QUERIES + i
        tl.store(sums + rows[:, None] * VALUE_LANES + value_lane, result)
        tl.store(peaks + rows * 2, peak)
        tl.store(peaks + rows * 2 + 1, total)


@triton.jit(do_not_specialize=["segments", "window", "splits"], do_not_specialize_on_alignment=["table"])
def merge_kernel(
    out,
    sums,
    peaks,
    table,
    segments,
    window,
    splits,
    STEP: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    QUERIES: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_LANES: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """One program for each tile and KV head; a tile that was not split is finished already."""
    tile, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    _, position, tokens, first = find_tile(table, segments, tile, TOKENS, SEGMENTS)
    low, end, size = find_columns(position, tokens, window, splits, STEP, WINDOWED, LEAST)
    if (tokens == 0) | (size >= end - low):
        return
    i = tl.arange(0, QUERIES)
    token, query_head = i // GROUPS, head * GROUPS + i % GROUPS
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    result = tl.zeros([QUERIES, VALUE_LANES], tl.float32)
    for split in range(tl.cdiv(end - low, size)):
        rows = ((tile * heads + head) * splits + split) * QUERIES + i
        own_peak = tl.load(peaks + rows * 2)
        peak, finite, decay = raised(peak, own_peak)
        weight = tl.exp2(own_peak - finite)
        total = total * decay + tl.load(peaks + rows * 2 + 1) * weight
        own = tl.load(sums + rows[:, None] * VALUE_LANES + tl.arange(0, VALUE_LANES)[None, :])
        result = result * decay[:, None] + own * weight[:, None]
    store_queries(
        out, result / total[:, None], first, token, query_head, heads * GROUPS, token < tokens, VALUE_DIM, VALUE_LANES
    )


def ragged_attention(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    table: Tensor,
    most_tokens: int,
    longest: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """:func:`specdec_fast.reference.ragged_attention` of segments that are on the device.

    Args:
        table: ``[4, S]`` int64: slot, end, size and first packed token of each segment, the last in rising order.
        most_tokens, longest: size and end to expect of a segment; others take longer.

    A captured CUDA graph may be replayed with other rows in ``table``, and with less of them: of size 0.
    """
    (_, query_heads, tokens, dim), heads, value_dim = query.shape, k_pool.shape[1], v_pool.shape[3]
    groups, segments, element = query_heads // heads, table.shape[1], query.element_size()
    lanes, value_lanes = (max(16, triton.next_power_of_2(n)) for n in (dim, value_dim))
    most_queries = _most_queries(query.device, max(lanes, value_lanes), element)
    queries = max(16, min(triton.next_power_of_2(most_tokens * groups), most_queries), triton.next_power_of_2(groups))
    per_tile = queries // groups
    tiles = tokens // per_tile + segments
    columns = longest if window is None else min(longest, window + per_tile - 1)
    wanted = triton.cdiv(wanted_blocks(query.device), tiles * heads)
    splits = min(triton.cdiv(columns, LEAST.value), wanted, MOST_SPLITS)
    partial = tiles * heads * splits * queries if splits > 1 else 0
    sums, peaks = (query.new_empty(partial, n, dtype=torch.float32) for n in (value_lanes, 2))
    out = query.new_empty(1, tokens, query_heads, value_dim) if out is None else out
    shape = {
        # wider columns would need more shared memory than a processor has
        "STEP": 64 if max(lanes, value_lanes) * element <= 512 else 32,
        "TOKENS": per_tile,
        "GROUPS": groups,
        "QUERIES": queries,
        "VALUE_DIM": value_dim,
        "VALUE_LANES": value_lanes,
        "SEGMENTS": max(32, triton.next_power_of_2(segments)),
        "WINDOWED": window is not None,
    }
    attend_kernel[(tiles, heads, splits)](
        query,
        k_pool,
        v_pool,
        query if sinks is None else sinks,
        out,
        sums,
        peaks,
        table,
        segments,
        float(scale),
        window or 0,
        float(soft_cap or 1),
        *query.stride()[1:],
        *k_pool.stride(),
        *v_pool.stride(),
        DIM=dim,
        LANES=lanes,
        CAPPED=soft_cap is not None,
        SINKS=sinks is not None,
        WIDE=triton.knobs.runtime.interpret and query.dtype == torch.bfloat16,
        num_warps=4,
        num_stages=2,
        **shape,
    )
    if splits > 1:
        merge_kernel[(tiles, heads)](out, sums, peaks, table, segments, window or 0, splits, num_warps=4, **shape)
    return out


def ragged_attention_(
    out: Tensor,
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    table: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> None:
    """The operator. Sizes are on the device, so an even share and the whole width are expected."""
    if table.numel() == 0:
        return
    if query.dtype == torch.float64 or not out.is_contiguous():
        reference.ragged_attention_(out, query, k_pool, v_pool, table, scale, window, soft_cap, sinks)
        return
    bounds = table.contiguous(), -(-query.shape[2] // table.shape[1]), k_pool.shape[2]
    sinks = None if sinks is None else sinks.contiguous()
    ragged_attention(query, k_pool, v_pool, *bounds, scale, window, soft_cap, sinks, out)


def _most_queries(device: torch.device, lanes: int, element: int) -> int:
    """Queries of a tile whose results fit into the registers of a block."""
    # float32 does not run on tensor cores, and holds its operands in registers as well
    if element == 4:
        return 16
    return max(16, min(_most_checked(device), 8192 // lanes))


def _most_checked(device: torch.device) -> int:
    """Larger tiles would compile to instructions of Blackwell's that no test emulates."""
    return 32 if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10 else 64
