"""Misuse is refused by name before any byte moves, by the compiled operators and by the definition's checks alike."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

from specdec_fast import ops
from specdec_fast.operators import backends

ROWS, HEADS, COLUMNS, DIM, DRAFTS = 3, 2, 12, 4, 2
IMPLEMENTATIONS = [
    pytest.param("cpu", marks=pytest.mark.skipif(not backends.is_built("_C"), reason="not built")),
    "reference",
]


def call(implementation: str, name: str, arguments: dict) -> None:
    if implementation == "cpu":
        getattr(ops, name)(**arguments)
    else:
        ops._checked(name, ops._OPERATORS[name][2])(*arguments.values())


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def kv(rows: int = ROWS, columns: int = COLUMNS, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(rows * HEADS * columns * DIM).view(rows, HEADS, columns, DIM).to(dtype)


def realign_arguments() -> dict:
    return {
        "caches": [kv(), kv(columns=COLUMNS + 1)],
        "start": ints(2, 0, 5),
        "num_columns": ints(4, 6, 0),
        "shift": ints(-2, 6, 0),
    }


def append_arguments() -> dict:
    pools = {"k_pool": kv(), "v_pool": kv()}
    new = {name: torch.ones(1, HEADS, 2, DIM) for name in ("k", "v")}
    return pools | new | {"row_of": ints(0, 2), "position_of": ints(11, 0)}


def attention_arguments() -> dict:
    generator = torch.Generator().manual_seed(0)
    sizes = {"out": (1, 7, 2 * HEADS, DIM + 1), "query": (1, 2 * HEADS, 7, DIM)}
    pools = {"k_pool": (ROWS, HEADS, COLUMNS, DIM), "v_pool": (ROWS, HEADS, COLUMNS, DIM + 1)}
    tensors = {name: torch.randn(size, generator=generator) for name, size in (sizes | pools).items()}
    # a verify, a segment that does not exist, a prompt
    table = ints(2, 9, 1, 12, 99, 4, 3, 0, 4, 0, -9, 3).view(4, 3)
    return tensors | {"table": table, "scale": 0.3, "window": 5, "soft_cap": 2.0, "sinks": torch.zeros(2 * HEADS)}


def step_arguments() -> dict:
    return {
        "caches": [kv(), kv()],
        "tokens": torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS),
        "draft_ids": ints(5, 6, 5, 6, 5, 6).view(ROWS, DRAFTS),
        "target_ids": ints(5, 6, 7, 5, 0, 7, 0, 6, 7).view(ROWS, DRAFTS + 1),
        "limit": ints(2, 2, 2),
        "max_length": ints(99, 99, 99),
        "stop_ids": ints(96),
        "n_accepted": None,
        "start": ints(2, 3, 4),
        "length": ints(6, 5, 4),
        "new_start": ints(0, 0, 0),
        "new_length": ints(0, 0, 0),
        "position_ids": torch.zeros(ROWS, 4, dtype=torch.int64),
        "masks": [torch.zeros(ROWS, 1, 4, COLUMNS), torch.zeros(ROWS, 1, 4, COLUMNS, dtype=torch.bool)],
        "windows": [0, 3],
        "summary": torch.zeros(ROWS, DRAFTS + 4, dtype=torch.int64),
        "max_position": 50,
        "placement": 0,
    }


ARGUMENTS = {
    "realign_": realign_arguments,
    "append_kv_": append_arguments,
    "realign_step_": step_arguments,
    "ragged_attention_": attention_arguments,
}


def second_cache(x: torch.Tensor):
    """Puts ``x`` in place of the second cache."""
    return lambda a: a["caches"].__setitem__(1, x)


def overlapping(a: dict) -> None:
    a["caches"] = [kv(columns=COLUMNS + 1)[:, :, 1:], kv()]
    a["caches"][1] = a["caches"][0][:, :, :-1]


def shared_lanes(a: dict) -> None:
    both = torch.zeros(ROWS, HEADS, COLUMNS, 2 * DIM)
    a["caches"] = [both[..., : DIM + 1], both[..., DIM:]]


def mask_in_a_cache(a: dict) -> None:
    a.update(masks=[a["caches"][0].flatten()[: ROWS * 4 * 8].view(ROWS, 1, 4, 8)], windows=[0])


def change(name: str, value):
    return lambda a: a.__setitem__(name, value)


CACHES = {
    "rank": (second_cache(torch.zeros(ROWS, COLUMNS, DIM)), r"caches\[1\] is .*\[3, 12, 4\].*; need .*\[3, "),
    "rows": (second_cache(kv(rows=ROWS + 1)), r"caches\[1\] is .*\[4, 2, 12, 4\].*; need .*\[3, "),
    "device": (
        second_cache(torch.zeros(ROWS, HEADS, COLUMNS, DIM, device="meta")),
        r"caches\[1\] is .* on meta; need .* on cpu",
    ),
    "element size": (
        second_cache(kv(dtype=torch.complex128)),
        r"caches\[1\] has elements of 16 bytes; need 1, 2, 4 or 8",
    ),
    "overlap": (overlapping, r"caches\[\d\] and caches\[\d\] share memory"),
    "shared lanes": (shared_lanes, r"caches\[0\] and caches\[1\] share memory"),
    "expanded": (
        second_cache(torch.zeros(1, HEADS, COLUMNS, DIM).expand(ROWS, -1, -1, -1)),
        r"caches\[1\] has elements that share memory",
    ),
}
REALIGN = CACHES | {
    "start dtype": (change("start", ints(2, 0, 5).int()), r"start is .*[iI]nt.* \[3\] on cpu; need .*\[.\]"),
    "start rank": (change("start", torch.zeros(3, 1, dtype=torch.int64)), r"start is .*\[3, 1\].*; need .*\[.\]"),
    "num_columns rows": (change("num_columns", ints(1, 2)), r"num_columns is .*\[2\].*; need .*\[3\]"),
    "shift dtype": (change("shift", torch.zeros(3)), r"shift is .*[fF]loat.*; need .*\[3\]"),
    "start < 0": (change("start", ints(2, -1, 5)), r"start\[1\] is -1; need 0\.\.12"),
    "start beyond": (change("start", ints(2, 0, 13)), r"start\[2\] is 13; need 0\.\.12"),
    "num_columns < 0": (change("num_columns", ints(4, -1, 0)), r"num_columns\[1\] is -1; .* need 0\.\.12"),
    "num_columns beyond": (
        change("num_columns", ints(11, 6, 0)),
        r"num_columns\[0\] is 11; the row starts at 2 of 12, need 0\.\.10",
    ),
    "shift left": (
        change("shift", ints(-3, 0, 0)),
        r"shift\[0\] is -3; the row holds columns 2\.\.5 of 12, need -2\.\.6",
    ),
    "shift right": (
        change("shift", ints(-2, 7, 0)),
        r"shift\[1\] is 7; the row holds columns 0\.\.5 of 12, need 0\.\.6",
    ),
    "huge shift": (change("shift", ints(0, 2**63 - 1, 0)), r"shift\[1\] is 9223372036854775807; "),
    "shift shares a cache": (
        lambda a: a.update(caches=[a["shift"].view(3, 1, 1, 1)], num_columns=ints(0, 0, 0), start=ints(0, 0, 0)),
        r"(shift|caches\[0\]) share memory",
    ),
}
# of caches of another dim, the pools are refused first
APPEND = {
    "pool rank": (change("k_pool", torch.zeros(3, 4)), r"k_pool is .*\[3, 4\].*; need "),
    "pool rows": (change("v_pool", kv(rows=ROWS + 1)), r"v_pool has 4 rows, k_pool 3; need equal"),
    "k dtype": (
        change("k", torch.ones(1, HEADS, 2, DIM).double()),
        r"k is .*(Double|float64).*; need .*(Float|float32).*",
    ),
    "v tokens": (change("v", torch.ones(1, HEADS, 3, DIM)), r"v is .*\[1, 2, 3, 4\].*; need .*\[1, 2, 2, 4\]"),
    "row_of dtype": (change("row_of", ints(0, 2).int()), r"row_of is .*[iI]nt.*; need "),
    "position_of size": (change("position_of", ints(0)), r"position_of is .*\[1\].*; need .*\[2\]"),
    "row_of beyond": (change("row_of", ints(0, 3)), r"row_of\[1\] is 3; need 0\.\.2"),
    "row_of < 0": (change("row_of", ints(-1, 2)), r"row_of\[0\] is -1; need 0\.\.2"),
    "position_of beyond": (change("position_of", ints(12, 0)), r"position_of\[0\] is 12; need 0\.\.11"),
    "one pool": (lambda a: a.update(v_pool=a["k_pool"]), r"_pool and ._pool share memory"),
    "k is the pool": (lambda a: a.update(k=a["k_pool"][1:2, :, :2]), r"k_pool and k share memory"),
}
STEP = CACHES | {
    "no rows": (change("start", torch.zeros(0, dtype=torch.int64)), r"start is empty; need at least one row"),
    "draft_ids dtype": (lambda a: a.update(draft_ids=a["draft_ids"].int()), r"draft_ids is .*[iI]nt.*; need "),
    "target_ids width": (lambda a: a.update(target_ids=a["draft_ids"]), r"target_ids is .*\[3, 2\].*; need .*\[3, 3\]"),
    "limit rows": (change("limit", ints(2)), r"limit is .*\[1\].*; need .*\[3\]"),
    "n_accepted rows": (change("n_accepted", ints(2)), r"n_accepted is .*\[1\].*; need .*\[3\]"),
    "n_accepted beyond": (change("n_accepted", ints(0, 3, 0)), r"n_accepted\[1\] is 3; need 0\.\.2"),
    "n_accepted < 0": (change("n_accepted", ints(0, 0, -1)), r"n_accepted\[2\] is -1; need 0\.\.2"),
    "stop_ids rank": (change("stop_ids", torch.tensor(5)), r"stop_ids is .*\[\].*; need "),
    "summary width": (
        change("summary", torch.zeros(ROWS, DRAFTS + 3, dtype=torch.int64)),
        r"summary is .*\[3, 5\].*; need .*\[3, 6\]",
    ),
    "mask queries": (
        change("masks", [torch.zeros(ROWS, 1, 3, COLUMNS)]),
        r"masks\[0\] is .*\[3, 1, 3, 12\].*; need .*\[3, 1, 4, ",
    ),
    "mask dtype": (
        change("masks", [torch.zeros(ROWS, 1, 4, COLUMNS).int()]),
        r"masks\[0\] is .*[iI]nt.*; need bool, float16",
    ),
    "windows": (change("windows", [0]), r"windows has 1 entries, masks 2"),
    "window < 0": (change("windows", [0, -1]), r"windows\[1\] is -1; need "),
    "max_position": (change("max_position", -1), r"max_position is -1; need at least 0"),
    "placement": (change("placement", 2), r"placement is 2; need 0 \(minimal move\) or 1 \(packed\)"),
    "start < 0": (change("start", ints(2, 3, -1)), r"start\[2\] is -1; need at least 0"),
    "length 0": (change("length", ints(0, 5, 4)), r"length\[0\] is 0; the row starts at 2 and K is 2, need 1\.\.7"),
    "length beyond": (
        change("length", ints(6, 7, 4)),
        r"length\[1\] is 7; the row starts at 3 and K is 2, need 1\.\.6",
    ),
    "ends": (change("length", ints(6, 6, 4)), r"start\[1\] \+ length\[1\] is 9, row 0 ends at 8; need one end"),
    "same buffer": (lambda a: a.update(new_start=a["start"]), r"start share memory|new_start share memory"),
    "drafts in tokens": (lambda a: a.update(draft_ids=a["tokens"][:, :2]), r"tokens and draft_ids share memory"),
    "mask is a cache": (mask_in_a_cache, r"\[0\] and (masks|caches)\[0\] share memory"),
}
ATTENTION = {
    "integers": (
        lambda a: a.update(query=a["query"].int()),
        r"query is .*[iI]nt.*; need float16, bfloat16, float32 or float64",
    ),
    "query rows": (lambda a: a.update(query=a["query"].expand(2, -1, -1, -1)), r"query is .*\[2, 4, 7, 4\].*; need "),
    "query heads": (lambda a: a.update(query=a["query"][:, :3]), r"query has 3 heads, k_pool 2; need a multiple"),
    "k_pool dtype": (
        lambda a: a.update(k_pool=a["k_pool"].double()),
        r"k_pool is .*(Double|float64).*; need .*(Float|float32)",
    ),
    "k_pool dim": (lambda a: a.update(k_pool=a["v_pool"]), r"k_pool is .*\[3, 2, 12, 5\].*; need .*, 4\]"),
    "v_pool columns": (lambda a: a.update(v_pool=a["v_pool"][:, :, 1:]), r"v_pool is .*; need .*\[3, 2, 12, "),
    "out tokens": (lambda a: a.update(out=a["out"][:, 1:]), r"out is .*\[1, 6, 4, 5\].*; need .*\[1, 7, 4, 5\]"),
    "out dtype": (lambda a: a.update(out=a["out"].half()), r"out is .*(Half|float16).*; need .*(Float|float32)"),
    "table dtype": (lambda a: a.update(table=a["table"].int()), r"table is .*[iI]nt.*; need .*\[4, "),
    "table lines": (lambda a: a.update(table=a["table"][:3]), r"table is .*\[3, 3\].*; need .*\[4, "),
    "window": (change("window", 0), r"window is 0; need at least 1, or None for full attention"),
    "soft_cap is no number": (change("soft_cap", float("nan")), r"soft_cap is -?nan; need more than 0"),
    "soft_cap": (change("soft_cap", -1.0), r"soft_cap is -1(\.0)?; need more than 0, or None for no cap"),
    "sinks": (change("sinks", torch.zeros(2)), r"sinks is .*\[2\].*; need .*\[4\]"),
    "sinks dtype": (change("sinks", ints(0, 0, 0, 0)), r"sinks is .*; need float16, bfloat16, float32 or float64"),
    "slot": (lambda a: a["table"][0].fill_(3), r"table\[:, 0\] is \[3, 12, 3, 0\]; need a slot in 0\.\.2"),
    "slot < 0": (lambda a: a["table"][0, 2].fill_(-1), r"table\[:, 2\] is \[-1, 4, 4, 3\]; need "),
    "end": (lambda a: a["table"][1, 0].fill_(13), r"table\[:, 0\] is .*, an end in 0\.\.12"),
    "size": (lambda a: a["table"][2, 2].fill_(5), r"table\[:, 2\] is .*, a size up to the end"),
    "size < 0": (lambda a: a["table"][2, 2].fill_(-4), r"table\[:, 2\] is \[1, 4, -4, 3\]; need "),
    "first": (lambda a: a["table"][3, 2].fill_(4), r"table\[:, 2\] is .*, and a first token that leaves room in 7"),
    "first < 0": (lambda a: a["table"][3, 0].fill_(-1), r"table\[:, 0\] is \[2, 12, 3, -1\]; need "),
    "tokens of another": (
        lambda a: a["table"][3, 2].fill_(2),
        r"table\[3, 2\] is 2; the segments before it take tokens up to 2",
    ),
    "out is the pool": (
        lambda a: a.update(out=a["v_pool"].view(-1)[: 7 * 4 * 5].view(1, 7, 4, 5)),
        r"(out|v_pool) share memory",
    ),
}
MISUSE = [
    pytest.param(name, spoil, message, id=f"{name} {what}")
    for name, cases in (
        ("realign_", REALIGN),
        ("append_kv_", APPEND),
        ("realign_step_", STEP),
        ("ragged_attention_", ATTENTION),
    )
    for what, (spoil, message) in cases.items()
]


def contents(arguments: dict) -> list[torch.Tensor]:
    flat = [x for value in arguments.values() for x in (value if isinstance(value, list) else [value])]
    return [x.clone() for x in flat if isinstance(x, torch.Tensor) and x.device.type == "cpu"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("name", "spoil", "message"), MISUSE)
def test_misuse_is_refused_before_any_byte_moves(implementation, name, spoil, message):
    arguments = ARGUMENTS[name]()
    spoil(arguments)
    before = contents(arguments)
    with pytest.raises(RuntimeError, match=message):
        call(implementation, name, arguments)
    assert all(torch.equal(a, b) for a, b in zip(contents(arguments), before, strict=True))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_unspoilt_arguments_are_accepted_and_move_something(implementation, name):
    arguments = ARGUMENTS[name]()
    before = contents(arguments)
    call(implementation, name, arguments)
    assert not all(torch.equal(a, b) for a, b in zip(contents(arguments), before, strict=True))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_disjoint_views_of_one_storage_are_accepted(implementation):
    storage = torch.zeros(ROWS, 4, HEADS, COLUMNS, 2, DIM)
    caches = [storage[:, layer, :, :, side] for layer in range(4) for side in range(2)]
    call(implementation, "realign_", realign_arguments() | {"caches": caches})


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_is_written_must_not_require_grad(name):
    arguments = ARGUMENTS[name]()
    (arguments["caches"][1] if "caches" in arguments else arguments["v_pool"]).requires_grad_()
    with pytest.raises(RuntimeError, match=r"\[1\] requires grad"):
        getattr(ops, name)(**arguments)


def slots(x: torch.Tensor) -> set[int]:
    """Storage slots of the elements of ``x``."""
    index = sum(
        torch.arange(n).view(-1, *[1] * (x.dim() - i - 1)) * s
        for i, (n, s) in enumerate(zip(x.shape, x.stride(), strict=True))
    )
    return set((index + x.storage_offset()).flatten().tolist())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_shared_memory_is_told_from_interleaved_memory_slot_by_slot(implementation):
    rng = np.random.default_rng(0)
    seen = {True: 0, False: 0}
    for _ in range(1500):
        strides, extent = [], 1
        for size in reversed(rng.integers(1, 5, 4)):
            strides.insert(0, extent + int(rng.integers(0, 4)))
            extent = strides[0] * int(size)
        storage = torch.zeros(3 * extent + 4 * sum(strides), dtype=torch.int16)
        rows = int(rng.integers(1, 3))
        views = []
        for _ in range(2):
            limits = [strides[0] // strides[1], strides[1] // strides[2], strides[2] // strides[3]]
            shape = [rows, *(int(rng.integers(1, limit + 1)) for limit in limits)]
            views.append(storage.as_strided(shape, strides, int(rng.integers(0, extent))))
        shared = bool(slots(views[0]) & slots(views[1]))
        seen[shared] += 1
        none = torch.zeros(rows, dtype=torch.int64)
        arguments = {"caches": views, "start": none, "num_columns": none.clone(), "shift": none.clone()}
        with pytest.raises(RuntimeError, match="share memory") if shared else contextlib.nullcontext():
            call(implementation, "realign_", arguments)
    assert min(seen.values()) > 200
