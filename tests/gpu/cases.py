"""Random arguments of the operators, small enough to emulate."""

from __future__ import annotations

from typing import Any

import torch
from arena import Arena
from hypothesis import strategies as st
from test_ops_parity import (
    append_arguments,
    append_cases,
    draw_moves,
    make_caches,
    realign_cases,
    step_arguments,
    step_cases,
)

from specdec_fast import reference

from .arguments import duplicate, storages

Shapes = tuple[int, int, list]


def arguments(operation: str, budget: int, fixed: dict[str, Any] | None = None) -> st.SearchStrategy[list[Any]]:
    """Arguments for ``operation`` with at most about ``budget`` bytes in a cache tensor.

    Args:
        fixed: what is not drawn, for kernels that are compiled anew for other values: ``caches``, and for a step
            also ``decided``, ``placement`` and ``masks``; for an append ``sides`` and ``dtype``. With ``most_rows``
            there are no more rows than that.
    """
    cases, build = {
        "realign_": (realign_cases(), _realign),
        "realign_step_": (step_cases(), _realign_step),
        "append_kv_": (append_cases(), _append_kv),
    }[operation]
    return cases.map(lambda case: build(case, budget, fixed or {}))


def _shrink(shapes: Shapes, budget: int, fixed: dict[str, Any]) -> Shapes:
    rows, columns, caches = shapes
    rows, caches = min(rows, fixed.get("most_rows", rows)), fixed.get("caches", caches)
    size = max([heads * dim * dtype.itemsize for _, heads, dim, dtype in caches], default=1)
    while rows * columns * size > budget and rows > 2:
        rows = (rows + 1) // 2
    while rows * columns * size > budget and columns > 5:
        columns = (columns + 1) // 2
    return rows, columns, caches


def _realign(case: tuple, budget: int, fixed: dict[str, Any]) -> list[Any]:
    shapes, kind, seed = case
    rows, columns, caches = _shrink(shapes, budget, fixed)
    return [make_caches(Arena(), rows, columns, caches), *draw_moves(kind, rows, columns, seed)]


def _realign_step(case: dict, budget: int, fixed: dict[str, Any]) -> list[Any]:
    rows, columns, caches = case["shapes"]
    # most rounds are drawn without caches
    shapes = rows, columns, caches or [("narrow", 2, 80, torch.float16)] * (case["seed"] % 4 != 1)
    return step_arguments(Arena(), {**case, **fixed, "shapes": _shrink(shapes, budget, fixed)})


def _append_kv(case: tuple, budget: int, fixed: dict[str, Any]) -> list[Any]:
    rows, columns, sides, dtype, tokens, transposed, seed = case
    sides, dtype = fixed.get("sides", sides), fixed.get("dtype", dtype)
    rows, columns, _ = _shrink((rows, columns, [(*side, dtype) for side in sides]), budget, {})
    return append_arguments(Arena(), (rows, columns, sides, dtype, min(tokens, rows * columns), transposed, seed))


def ragged_round(columns: int = 300, dtype: torch.dtype = torch.bfloat16, dim: int = 64, rows: int = 6) -> list[Any]:
    """A round in which rows move right, left and not at all, and one row is finished."""
    arena, drafts, end = Arena(), 4, columns - 10
    n_accepted = torch.tensor([2, 0, 4, 2, 1, 3]).repeat(-(-rows // 6))[:rows]
    length = torch.tensor([end - 20, 7, 40, end - 30, 1, 120]).repeat(-(-rows // 6))[:rows].clamp(max=end)
    target_ids = torch.arange(10, 10 + rows * (drafts + 1)).view(rows, drafts + 1)
    accepted = torch.arange(drafts) < n_accepted[:, None]
    max_length = torch.full((rows,), 10_000)
    max_length[-1] = 1
    integers = torch.int64
    return [
        [arena.tensor((rows, 2, columns, dim), dtype) for _ in range(4)],
        arena.tensor((rows, columns), integers),
        torch.where(accepted, target_ids[:, :drafts], 1),
        target_ids,
        torch.full((rows,), drafts),
        max_length,
        torch.tensor([2, 3]),
        None,
        end - length,
        length,
        arena.tensor((rows,), integers),
        arena.tensor((rows,), integers),
        arena.tensor((rows, drafts + 2), integers),
        [arena.tensor((rows, 1, drafts + 2, columns), mask) for mask in (torch.bfloat16, torch.bool)],
        [0, 16],
        arena.tensor((rows, drafts + 4), integers),
        4096,
        0,
    ]


def moves_of(arguments: list[Any]) -> list[torch.Tensor]:
    """``start``, ``num_columns`` and ``shift`` of the KV that a round moves, by the definition."""
    after = duplicate(arguments)
    reference.realign_step_(*after)
    start, length, summary = arguments[8], arguments[9], after[15]
    n_accepted, finished, new_end = summary[:, :3].unbind(1)
    return [start, length + n_accepted, (new_end - (start + length + n_accepted + 1)) * (1 - finished)]


def count_bytes(cache: torch.Tensor, start: torch.Tensor, num_columns: torch.Tensor) -> torch.Tensor:
    """1 for every byte of the storage of ``cache`` in columns ``[start_b, start_b + num_columns_b)``, else 0."""
    (mark,) = duplicate([cache])
    (count,) = storages(mark).values()
    count.zero_()
    for row, (first, columns) in enumerate(zip(start.tolist(), num_columns.tolist(), strict=True)):
        mark.view(torch.uint8)[row, :, first : first + columns] = 1
    return count
