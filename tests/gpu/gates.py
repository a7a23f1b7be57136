"""Gates for the kernels of every backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec_fast import reference

from . import cases
from .arguments import assert_same_memory, duplicate
from .ptx import Statistics

Run = Callable[[str, list[Any]], Statistics]


def expected(operation: str, arguments: list[Any]) -> list[Any]:
    """The arguments after the definition has run on a copy of them."""
    want = duplicate(arguments)
    getattr(reference, operation)(*want)
    return want


def for_each(strategy: st.SearchStrategy, count: int, check: Callable[[Any], None]) -> None:
    """The same ``count`` draws in every run."""
    every = settings(
        max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    every(given(strategy)(check))()


def moves_each_byte_once(run: Run, operation: str) -> None:
    """Bytes of moved columns are read once and written once, all others not at all; 16 bytes at a time."""
    step = cases.ragged_round()
    start, num_columns, shift = cases.moves_of(step)
    assert set(shift.tolist()) == {-2, 0, 1, 2}
    arguments = step if operation == "realign_step_" else [step[0], start, num_columns, shift]
    statistics = run(operation, arguments)
    moved = num_columns * (shift != 0)
    for cache in arguments[0]:
        region = statistics.region(cache)
        assert region.loads.tolist() == cases.count_bytes(cache, start, moved).tolist()
        assert region.stores.tolist() == cases.count_bytes(cache, start + shift, moved).tolist()
        assert set(region.widths) == {16}
        # full sectors: neighbouring threads touch neighbouring bytes
        assert region.sectors * 32 == region.loads.sum() + region.stores.sum()


def appends_each_byte_once(run: Run) -> None:
    """Bytes of new KV are read once and written once, 16 at a time."""
    pools = [torch.zeros(3, 4, 8, 128, dtype=torch.bfloat16), torch.zeros(3, 2, 8, 64, dtype=torch.bfloat16)]
    new = [torch.randn(1, 9, x.shape[1], x.shape[3]).bfloat16().transpose(1, 2) for x in pools]
    arguments = [*pools, *new, torch.arange(9) // 3, torch.arange(9) % 3 + 2]
    want = expected("append_kv_", arguments)
    statistics = run("append_kv_", arguments)
    assert_same_memory(arguments, want)
    for pool, source in zip(pools, new, strict=True):
        written, read = statistics.region(pool), statistics.region(source)
        assert written.stores.tolist() == cases.count_bytes(pool, torch.full((3,), 2), torch.full((3,), 3)).tolist()
        assert (read.loads == 1).all()
        assert written.loads.sum() == read.stores.sum() == 0
        assert set(written.widths) == set(read.widths) == {16}


UNMOVED = ("one row", "uniform acceptance", "all rows finished")


def moves_nothing(run: Run, name: str) -> None:
    """A round that leaves every row where it is reads and writes no KV."""
    arguments = cases.ragged_round(rows=1 if name == "one row" else 6)
    if name == "uniform acceptance":
        arguments[7] = torch.full((6,), 2)
    arguments[5].fill_(1 if name == "all rows finished" else 10_000)
    want = expected("realign_step_", arguments)
    statistics = run("realign_step_", arguments)
    assert_same_memory(arguments, want)
    for cache in arguments[0]:
        region = statistics.region(cache)
        assert region.loads.sum() == region.stores.sum() == 0


def moves_far(run: Run, shift: int) -> None:
    """Moves of more than 1,024 columns."""
    cache = torch.randint(256, (2, 1, 4096, 24), dtype=torch.uint8)
    arguments = [[cache], *(torch.tensor(x) for x in ([1500, 1600], [1801, 0], [shift, shift]))]
    want = expected("realign_", arguments)
    run("realign_", arguments)
    assert_same_memory(arguments, want)


def moves_all_layers(run: Run) -> None:
    """One launch for keys and values of 126 layers."""
    caches = [torch.randn(2, 1, 6, 8) for _ in range(252)]
    arguments = [caches, *(torch.tensor(x) for x in ([1, 2], [3, 4], [2, -1]))]
    want = expected("realign_", arguments)
    run("realign_", arguments)
    assert_same_memory(arguments, want)


FAR = (1, 700, -3, -1500)
