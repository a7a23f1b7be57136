"""Triton kernels of the padded layout; the arguments are those of :mod:`specdec_fast.ops`.

Tables of addresses are copied to the device at the first call with new caches or masks: make one call before
capturing a CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from specdec_fast.operators.arguments import StepArguments

from .append_kv import append_kv_ as append_kv_
from .masks import write_masks
from .move import move_row, move_vectors
from .plan import plan_round
from .tables import OPTIONS, device_rows, mask_table, strip_table


@triton.jit(do_not_specialize=["rows", "heads"])
def realign_kernel(
    strips,
    start,
    num_columns,
    shift,
    rows,
    heads,
    LANES: tl.constexpr,
):
    """One program for each strip, row and head."""
    place = tl.program_id(0)
    head, row, strip = place % heads, place // heads % rows, place // heads // rows
    count = tl.load(num_columns + row).to(tl.int32)
    move_row(strips, strip, row, head, tl.load(start + row), count, tl.load(shift + row), LANES)


def realign_(caches: Sequence[Tensor], start: Tensor, num_columns: Tensor, shift: Tensor) -> None:
    table, rows = strip_table(caches, start.device), len(start)
    if not table.num_strips * rows:
        return
    realign_kernel[(table.num_strips * rows * table.heads,)](
        table.rows,
        start.contiguous(),
        num_columns.contiguous(),
        shift.contiguous(),
        rows,
        table.heads,
        LANES=table.lanes,
        **OPTIONS,
    )


@triton.jit
def commit_row(
    draft_ids,
    target_ids,
    tokens,
    new_start,
    new_length,
    position_ids,
    summary,
    strides,
    row,
    drafts,
    queries,
    max_position,
    end,
    new_end,
    start,
    length,
    n_accepted,
    finished,
    shift,
    CANDIDATES: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Tokens, bookkeeping and summary of one row.

    ``strides`` is ``[8]`` int64, in elements: of ``tokens``, ``position_ids`` and ``summary``, rows then columns, then
    of ``new_start`` and ``new_length``.
    """
    i = tl.arange(0, CANDIDATES)
    draft = tl.load(draft_ids + row * drafts + i, mask=i < n_accepted, other=0)
    bonus = tl.load(target_ids + row * (drafts + 1) + n_accepted)
    token = tl.where(i < n_accepted, draft, tl.where(i == n_accepted, bonus, 0))
    own_tokens, token_stride = tokens + row * tl.load(strides), tl.load(strides + 1)
    tl.store(own_tokens + (end + i) * token_stride, token, mask=i <= n_accepted)

    own_summary, summary_stride = summary + row * tl.load(strides + 4), tl.load(strides + 5)
    tl.store(own_summary + (3 + i) * summary_stride, token, mask=i <= drafts)
    tl.store(own_summary, n_accepted)
    tl.store(own_summary + summary_stride, finished)
    tl.store(own_summary + 2 * summary_stride, new_end)

    tl.store(new_start + row * tl.load(strides + 6), start + shift)
    tl.store(new_length + row * tl.load(strides + 7), length + n_accepted + 1)
    query = tl.arange(0, QUERIES)
    position = tl.minimum(tl.maximum(new_end - 2 + query - start - shift, 0), max_position)
    own_positions = position_ids + row * tl.load(strides + 2)
    tl.store(own_positions + query * tl.load(strides + 3), position, mask=query < queries)

    if shift != 0:
        # the new tokens move with their row
        tl.debug_barrier()
        first = (own_tokens + start * token_stride).to(tl.int64)
        move_vectors(first, token_stride * 8, 8, 1, (length + n_accepted + 1).to(tl.int32), shift, 8, 1)


_READ = ["draft_ids", "target_ids", "limit", "max_length", "stop_ids", "n_accepted", "start", "length"]
_WRITTEN = ["tokens", "new_start", "new_length", "position_ids", "summary"]
_COUNTS = ["rows", "drafts", "stops", "queries", "mask_count", "heads", "max_position"]


# one compilation serves all sizes and addresses; the parameters stay single, as tuples could not be tried on Triton 3.6
@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_READ + _WRITTEN)
def realign_step_kernel(
    strips,
    masks,
    strides,
    draft_ids,
    target_ids,
    limit,
    max_length,
    stop_ids,
    n_accepted,
    start,
    length,
    tokens,
    new_start,
    new_length,
    position_ids,
    summary,
    rows,
    drafts,
    stops,
    queries,
    mask_count,
    heads,
    max_position,
    DECIDED: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    QUERIES: tl.constexpr,
    LANES: tl.constexpr,
    MASK_SIZES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program for each row, for each row and mask, then for each strip, row and head."""
    program = tl.program_id(0)
    move = program - rows * (1 + mask_count)
    row = tl.where(move < 0, program % rows, move // heads % rows)
    end, new_end, own_start, own_length, n, finished, shift = plan_round(
        draft_ids,
        target_ids,
        limit,
        max_length,
        stop_ids,
        n_accepted,
        start,
        length,
        rows,
        drafts,
        stops,
        row,
        DECIDED,
        PACKED,
        ROWS,
        CANDIDATES,
    )
    if move >= 0:
        # the bonus token has no KV yet
        count = (own_length + n).to(tl.int32)
        strip = move // heads // rows
        move_row(strips, strip, row, move % heads, own_start, count, shift, LANES)
    elif program >= rows:
        mask = program // rows - 1
        write_masks(masks, mask, row, queries, own_start + shift, new_end, MASK_SIZES, ALIGNED)
    else:
        commit_row(
            draft_ids,
            target_ids,
            tokens,
            new_start,
            new_length,
            position_ids,
            summary,
            strides,
            row,
            drafts,
            queries,
            max_position,
            end,
            new_end,
            own_start,
            own_length,
            n,
            finished,
            shift,
            CANDIDATES,
            QUERIES,
        )


def realign_step_(*arguments: Any) -> None:
    a = StepArguments(*arguments)
    (rows, drafts), queries, device = a.draft_ids.shape, a.position_ids.shape[1], a.start.device
    table, mask_rows = strip_table(a.caches, device), mask_table(a.masks, a.windows, device)
    written = (a.tokens, a.new_start, a.new_length, a.position_ids, a.summary)
    strided = (a.tokens, a.position_ids, a.summary, a.new_start, a.new_length)
    strides = tuple(stride for x in strided for stride in x.stride())
    accepted = a.n_accepted if a.n_accepted is not None else a.limit
    read = (a.draft_ids, a.target_ids, a.limit, a.max_length, a.stop_ids, accepted, a.start, a.length)
    realign_step_kernel[(rows * (1 + len(a.masks) + table.num_strips * table.heads),)](
        table.rows,
        mask_rows.rows,
        _strides(strides, device),
        *(x.contiguous() for x in read),
        *written,
        rows,
        drafts,
        len(a.stop_ids),
        queries,
        len(a.masks),
        table.heads,
        a.max_position,
        DECIDED=a.n_accepted is not None,
        PACKED=a.placement == 1,
        ROWS=_padded(rows, 32),
        CANDIDATES=_padded(drafts + 1, 16),
        QUERIES=_padded(queries, 16),
        LANES=table.lanes,
        MASK_SIZES=mask_rows.sizes,
        ALIGNED=mask_rows.aligned,
        **OPTIONS,
    )


def _padded(count: int, least: int) -> int:
    """Few different sizes, so that few kernels are compiled."""
    return max(least, triton.next_power_of_2(count))


@functools.lru_cache(1024)
def _strides(strides: tuple[int, ...], device) -> Tensor:
    return device_rows([strides], device)
