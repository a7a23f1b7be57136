"""The definition itself against loops that restate the contract, row by row and column by column."""

from __future__ import annotations

import torch
from arena import Arena, assert_same_bytes
from hypothesis import given
from test_ops_parity import (
    append_arguments,
    append_cases,
    cache_shapes,
    draw_moves,
    examples,
    make_caches,
    realign_cases,
    step_arguments,
    step_cases,
)

from specdec_fast import reference


def move(cache, row: int, start: int, count: int, shift: int) -> None:
    old = cache[row].clone()
    for column in range(start, start + count):
        cache[row, :, column + shift] = old[:, column]


@examples(150)
@given(realign_cases())
def test_realign(case):
    (rows, columns, caches), kind, seed = case
    moves = draw_moves(kind, rows, columns, seed)
    actual, expected = Arena(), Arena()
    reference.realign_(make_caches(actual, rows, columns, caches), *moves)
    for cache in make_caches(expected, rows, columns, caches):
        for row, (start, count, shift) in enumerate(zip(*(x.tolist() for x in moves), strict=True)):
            move(cache, row, start, count, shift)
    assert_same_bytes(actual, expected)


@examples(100)
@given(append_cases())
def test_append_kv(case):
    actual, expected = Arena(), Arena()
    reference.append_kv_(*append_arguments(actual, case))
    k_pool, v_pool, k, v, row_of, position_of = append_arguments(expected, case)
    for i, (row, position) in enumerate(zip(row_of.tolist(), position_of.tolist(), strict=True)):
        k_pool[row, :, position] = k[0, :, i]
        v_pool[row, :, position] = v[0, :, i]
    assert_same_bytes(actual, expected)


def accept(drafts: list[int], target: list[int], limit: int) -> int:
    n = 0
    while n < min(limit, len(drafts)) and drafts[n] == target[n]:
        n += 1
    return n


def cheapest_end(end: int, rows: list[dict], num_drafts: int) -> int:
    """Of all right edges that leave every unfinished row room, the smallest that moves the fewest columns."""
    going = [row for row in rows if not row["finished"]]
    costs = {}
    for new_end in range(end + 1, end + num_drafts + 2):
        shifts = [new_end - (end + row["n"] + 1) for row in going]
        if all(row["start"] + shift >= 0 for row, shift in zip(going, shifts, strict=True)):
            moved = [row["length"] + row["n"] for row, shift in zip(going, shifts, strict=True) if shift]
            costs[new_end] = sum(moved)
    return min(costs, key=costs.get)


def packed_end(end: int, rows: list[dict]) -> int:
    return max((row["length"] + row["n"] + 1 for row in rows if not row["finished"]), default=end + 1)


def sees(query: int, column: int, start: int, window: int) -> bool:
    in_window = not window or query - column < window
    return (start <= column <= query and in_window) or query == column


def step_oracle(
    caches, tokens, draft_ids, target_ids, limit, max_length, stop_ids, n_accepted, start, length,
    new_start, new_length, position_ids, masks, windows, summary, max_position, placement,
):  # fmt: skip
    num_drafts = draft_ids.shape[1]
    end = int(start[0] + length[0])
    stops = set(stop_ids.tolist())
    rows = []
    for b in range(len(start)):
        drafts, target = draft_ids[b].tolist(), target_ids[b].tolist()
        n = accept(drafts, target, int(limit[b])) if n_accepted is None else int(n_accepted[b])
        gained = [*drafts[:n], target[n]]
        row = {"n": n, "gained": gained, "start": int(start[b]), "length": int(length[b])}
        row["finished"] = bool(stops & set(gained)) or row["length"] + n + 1 >= int(max_length[b])
        rows.append(row)
    new_end = packed_end(end, rows) if placement else cheapest_end(end, rows, num_drafts)
    for b, row in enumerate(rows):
        n, first = row["n"], row["start"]
        tokens[b, end : end + n + 1] = torch.tensor(row["gained"])
        shift = 0 if row["finished"] else new_end - (end + n + 1)
        for cache in caches:
            move(cache, b, first, row["length"] + n, shift)
        move(tokens[:, None, :, None], b, first, row["length"] + n + 1, shift)
        new_start[b], new_length[b] = first + shift, row["length"] + n + 1
        summary[b] = torch.tensor([n, row["finished"], new_end, *row["gained"], *[0] * (num_drafts - n)])
        for q in range(position_ids.shape[1]):
            query = new_end - 2 + q
            position_ids[b, q] = min(max(query - first - shift, 0), max_position)
            for mask, window in zip(masks, windows, strict=True):
                visible, hidden = (True, False) if mask.dtype == torch.bool else (0, torch.finfo(mask.dtype).min)
                line = [visible if sees(query, j, first + shift, window) else hidden for j in range(mask.shape[3])]
                mask[b, 0, q] = torch.tensor(line, dtype=mask.dtype)


@examples(300)
@given(step_cases())
def test_realign_step(case):
    rows, columns, caches = case["shapes"]
    case = case | {"shapes": (min(rows, 5), min(columns, 40), caches)}
    actual, expected = Arena(), Arena()
    reference.realign_step_(*step_arguments(actual, case))
    step_oracle(*step_arguments(expected, case))
    assert_same_bytes(actual, expected)


@examples(30)
@given(cache_shapes())
def test_a_row_that_does_not_move_keeps_every_byte(shapes):
    rows, columns, caches = shapes
    still = [torch.zeros(rows, dtype=torch.int64), torch.full((rows,), columns), torch.zeros(rows, dtype=torch.int64)]
    actual, untouched = Arena(), Arena()
    reference.realign_(make_caches(actual, rows, columns, caches), *still)
    make_caches(untouched, rows, columns, caches)
    assert_same_bytes(actual, untouched)
