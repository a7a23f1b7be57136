"""The plan of a padded round, computed by each block for itself."""

import triton
import triton.language as tl


@triton.jit
def read_rows(
    draft_ids,
    target_ids,
    limit,
    max_length,
    stop_ids,
    n_accepted,
    start,
    length,
    row,
    rows,
    drafts,
    stops,
    DECIDED: tl.constexpr,
):
    """``start, length, n_accepted, finished`` of the rows ``row``; those beyond ``rows`` are finished.

    DECIDED: acceptance is read from ``n_accepted`` instead of comparing drafts with the target.
    """
    exists = row < rows
    first, content = tl.load(start + row, mask=exists, other=0), tl.load(length + row, mask=exists, other=0)
    if DECIDED:
        n = tl.load(n_accepted + row, mask=exists, other=0)
    else:
        most = tl.load(limit + row, mask=exists, other=0)
        n = tl.zeros_like(first)
        agrees = exists
        for i in range(drafts):
            draft = tl.load(draft_ids + row * drafts + i, mask=exists, other=0)
            target = tl.load(target_ids + row * (drafts + 1) + i, mask=exists, other=0)
            agrees = agrees & (draft == target) & (i < most)
            n += agrees
    finished = content + n + 1 >= tl.load(max_length + row, mask=exists, other=0)
    bonus = tl.load(target_ids + row * (drafts + 1) + n, mask=exists, other=0)
    for i in range(drafts + 1):
        draft = tl.load(draft_ids + row * drafts + i, mask=exists & (i < n), other=0)
        token = tl.where(i < n, draft, bonus)
        for s in range(stops):
            finished = finished | ((i <= n) & (token == tl.load(stop_ids + s)))
    return first, content, n, finished | (row >= rows)


@triton.jit
def minimal_move(start, length, n_accepted, finished, end, drafts, CANDIDATES: tl.constexpr):
    """Right edge that moves the fewest columns, the smallest of equals."""
    candidate = tl.arange(0, CANDIDATES)
    in_place = (n_accepted[None, :] == candidate[:, None]) & (finished == 0)[None, :]
    kept = tl.sum(tl.where(in_place, (length + n_accepted)[None, :], 0), axis=1)
    smallest = tl.max(tl.where(finished, 0, n_accepted - start), axis=0)
    feasible = (candidate >= smallest) & (candidate <= drafts)
    rank = tl.where(feasible, kept * CANDIDATES + (CANDIDATES - 1 - candidate), -1)
    best = CANDIDATES - 1 - tl.max(rank, axis=0) % CANDIDATES
    return end + best + 1


@triton.jit
def minimal_padding(length, n_accepted, finished, end):
    """Right edge that leaves the longest unfinished row no padding."""
    longest = tl.max(tl.where(finished, 0, length + n_accepted + 1), axis=0)
    return tl.where(longest > 0, longest, end + 1)


@triton.jit
def plan_round(
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
    DECIDED: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """``end`` and the new right edge, then ``start, length, n_accepted, finished, shift`` of one row."""
    every = tl.arange(0, ROWS)
    first, content, n, finished = read_rows(
        draft_ids,
        target_ids,
        limit,
        max_length,
        stop_ids,
        n_accepted,
        start,
        length,
        every,
        rows,
        drafts,
        stops,
        DECIDED,
    )
    end = tl.load(start) + tl.load(length)
    if PACKED:
        new_end = minimal_padding(content, n, finished, end)
    else:
        new_end = minimal_move(first, content, n, finished, end, drafts, CANDIDATES)
    own = tl.max(tl.where(every == row, n * 2 + finished, 0), axis=0)
    own_n, own_finished = own // 2, own % 2
    shift = tl.where(own_finished > 0, 0, new_end - (end + own_n + 1))
    return end, new_end, tl.load(start + row), tl.load(length + row), own_n, own_finished, shift
