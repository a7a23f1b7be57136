"""The compiled operators against the definition, byte for byte, with guards around everything they write."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from arena import LAYOUTS, Arena, assert_same_bytes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec_fast import ops, reference
from specdec_fast.operators import backends

pytestmark = pytest.mark.skipif(not backends.is_built("_C"), reason="the C++ operators are not built")

DTYPES = (torch.int8, torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
MASK_DTYPES = (torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64)
HEAD_DIMS = (1, 3, 16, 64, 67, 80, 96, 128, 192, 256)
# 2,000 cases in the normal run, ten times that under `slow`
CASES = {"realign_": 900, "realign_step_": 600, "append_kv_": 200}
BYTES = 1 << 18


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def examples(count: int):
    return settings(
        max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )


@st.composite
def cache_shapes(draw, max_caches: int = 3):
    """``rows, columns`` and a layout, heads, dim and dtype for each of a few caches, within a budget of bytes."""
    rows = draw(st.integers(1, 33))
    columns = draw(st.one_of(st.integers(1, 40), st.integers(1, 300), st.integers(1025, 4096)))
    caches = [
        (draw(st.sampled_from(LAYOUTS)), draw(st.integers(1, 8)), draw(st.sampled_from(HEAD_DIMS)), dtype)
        for dtype in draw(st.lists(st.sampled_from(DTYPES), max_size=max_caches))
    ]
    size = max([heads * dim * dtype.itemsize for _, heads, dim, dtype in caches], default=1)
    while rows * columns * size > BYTES and rows > 1:
        rows = (rows + 1) // 2
    while rows * columns * size > BYTES and columns > 40:
        columns = (columns + 1) // 2
    return rows, columns, caches


def make_caches(arena: Arena, rows: int, columns: int, caches: list) -> list[torch.Tensor]:
    made = [arena.caches(layout, rows, heads, columns, dim, dtype) for layout, heads, dim, dtype in caches]
    return [x for pair in made for x in pair]


def draw_moves(kind: str, rows: int, columns: int, seed: int) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    start = rng.integers(0, columns + 1, rows)
    count = rng.integers(0, columns - start + 1)
    if kind == "empty":
        count[:] = 0
    shift = rng.integers(-start, columns - start - count + 1)
    if kind == "short":
        shift = shift.clip(-6, 6)
    elif kind == "left":
        shift = -start
    elif kind == "right":
        shift = columns - start - count
    elif kind == "still":
        shift[:] = 0
    elif kind == "half":
        shift[rng.random(rows) < 0.5] = 0
    return [torch.from_numpy(x) for x in (start, count, shift)]


@st.composite
def realign_cases(draw):
    kind = draw(st.sampled_from(["any", "short", "short", "left", "right", "still", "half", "empty"]))
    return draw(cache_shapes()), kind, draw(st.integers(0, 2**32))


def check_realign(case) -> None:
    (rows, columns, caches), kind, seed = case
    moves = draw_moves(kind, rows, columns, seed)
    actual, expected = Arena(), Arena()
    ops.realign_(make_caches(actual, rows, columns, caches), *moves)
    reference.realign_(make_caches(expected, rows, columns, caches), *moves)
    assert_same_bytes(actual, expected)


@st.composite
def append_cases(draw):
    rows, columns, _ = draw(cache_shapes(max_caches=0))
    sides = [
        [draw(st.sampled_from(LAYOUTS)), draw(st.integers(1, 8)), draw(st.sampled_from(HEAD_DIMS))] for _ in range(2)
    ]
    columns = max(1, min(columns, 2 * BYTES // (rows * max(h * d for _, h, d in sides) * 8)))
    tokens = draw(st.integers(0, min(64, rows * columns)))
    return rows, columns, sides, draw(st.sampled_from(DTYPES)), tokens, draw(st.booleans()), draw(st.integers(0, 2**32))


def append_arguments(arena: Arena, case) -> list[torch.Tensor]:
    rows, columns, sides, dtype, tokens, transposed, seed = case
    slots = np.random.default_rng(seed).choice(rows * columns, tokens, replace=False)
    pools = [arena.caches(layout, rows, heads, columns, dim, dtype)[0] for layout, heads, dim in sides]
    new = []
    for _, heads, dim in sides:
        x = arena.tensor((1, tokens, heads, dim), dtype).transpose(1, 2)
        new.append(x if transposed else x.contiguous())
    return [*pools, *new, torch.from_numpy(slots // columns), torch.from_numpy(slots % columns)]


def check_append(case) -> None:
    actual, expected = Arena(), Arena()
    ops.append_kv_(*append_arguments(actual, case))
    reference.append_kv_(*append_arguments(expected, case))
    assert_same_bytes(actual, expected)


@st.composite
def step_cases(draw):
    case = {"shapes": draw(cache_shapes(max_caches=2)), "num_drafts": draw(st.integers(0, 8))}
    case["accept"] = draw(st.sampled_from([*["any"] * 6, "all", "none", "uniform"]))
    case["decided"] = draw(st.booleans())
    case["placement"] = draw(st.integers(0, 1))
    case["queries"] = draw(st.integers(0, 11))
    masks = st.tuples(st.sampled_from(MASK_DTYPES), st.integers(0, 60), st.booleans())
    case["masks"] = draw(st.lists(masks, max_size=3))
    case["transposed"] = draw(st.booleans())
    case["finishing"] = draw(st.sampled_from([*["none", "some"] * 3, "edge", "all"]))
    case["stop_ids"] = draw(st.lists(st.integers(0, 60), max_size=2))
    case["max_position"] = draw(st.sampled_from([0, 7, 5000]))
    case["seed"] = draw(st.integers(0, 2**32))
    return case


def step_arguments(arena: Arena, case: dict) -> list:
    rng = np.random.default_rng(case["seed"])
    (rows, columns, caches), num_drafts = case["shapes"], case["num_drafts"]
    columns += num_drafts
    end = int(rng.integers(1, columns - num_drafts + 1))
    # short rows, any rows, and rows with little room on the left
    kind = rng.integers(0, 3, rows)
    length = rng.integers(np.where(kind == 2, max(end - 3, 1), 1), np.where(kind == 0, min(end, 6), end) + 1)
    drafts = rng.integers(0, 50, (rows, num_drafts))
    target = rng.integers(0, 50, (rows, num_drafts + 1))
    n = rng.integers(0, num_drafts + 1, rows)
    if case["accept"] != "any":
        n[:] = {"all": num_drafts, "none": 0, "uniform": int(n[0])}[case["accept"]]
    for row, count in enumerate(n):
        target[row, :count] = drafts[row, :count]
        if count < num_drafts:
            target[row, count] = drafts[row, count] + 1
    limit = np.where(rng.random(rows) < 0.8, num_drafts, rng.integers(0, num_drafts + 1, rows))
    some = np.where(rng.random(rows) < 0.5, 1, 10_000)
    room = {"none": 10_000, "edge": num_drafts + 1, "some": torch.from_numpy(some), "all": 1}[case["finishing"]]
    vectors = {name: torch.from_numpy(x) for name, x in (("n", n), ("limit", limit), ("length", length))}
    start = end - vectors["length"]
    masks = []
    for dtype, _, narrow in case["masks"]:
        width = columns + int(rng.integers(-columns + 1, 9))
        mask = arena.tensor((rows + narrow, 1, case["queries"] + 2 * narrow, width), dtype)
        masks.append(mask[:rows, :, : case["queries"]])
    integers = torch.int64
    return [
        make_caches(arena, rows, columns, caches),
        arena.matrix(rows, columns + 1 + int(rng.integers(0, 3)), integers, case["transposed"]),
        torch.from_numpy(drafts),
        torch.from_numpy(target),
        vectors["limit"],
        vectors["length"] + room,
        torch.tensor(case["stop_ids"], dtype=integers),
        vectors["n"] if case["decided"] else None,
        start,
        vectors["length"],
        arena.tensor((rows,), integers),
        arena.tensor((rows,), integers),
        arena.matrix(rows, case["queries"], integers, case["transposed"]),
        masks,
        [window for _, window, _ in case["masks"]],
        arena.matrix(rows, num_drafts + 4, integers, case["transposed"]),
        case["max_position"],
        case["placement"],
    ]


def check_step(case) -> None:
    actual, expected = Arena(), Arena()
    ops.realign_step_(*step_arguments(actual, case))
    reference.realign_step_(*step_arguments(expected, case))
    assert_same_bytes(actual, expected)


CHECKS = {
    "realign_": (realign_cases(), check_realign),
    "realign_step_": (step_cases(), check_step),
    "append_kv_": (append_cases(), check_append),
}


def run(name: str, count: int) -> None:
    cases, check = CHECKS[name]
    examples(count)(given(cases)(check))()


@pytest.mark.parametrize("name", CHECKS)
def test_parity(name):
    run(name, CASES[name])


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("name", CHECKS)
def test_parity_with_two_threads(name):
    run(name, 60)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_parity_at_length(name):
    run(name, 10 * CASES[name])
