"""Ragged attention against dense attention over every row, and what it must never read."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specdec_fast import ops
from specdec_fast.layouts.ragged import Packing, Segment
from specdec_fast.layouts.ragged.attention import ragged_attention
from specdec_fast.operators import backends, checks

compiled_only = pytest.mark.skipif(not backends.is_built("_C"), reason="the C++ operators are not built")
# a prompt, a row without drafts, a verify, a first token, a chunk of a prompt
SEGMENTS = [Segment(4, 0, 5), Segment(0, 11, 1), Segment(2, 6, 4), Segment(6, 0, 1), Segment(1, 3, 40)]
CAPACITY = 48
OPTIONS = {
    "plain": {},
    "window": {"window": 4},
    "window of one": {"window": 1},
    "soft cap": {"soft_cap": 3.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)},
    "all": {"window": 3, "soft_cap": 2.0, "sinks": torch.tensor([1.0, 0.0, -2.0, 3.0], dtype=torch.float64)},
}


def make(kv_heads=2, dtype=torch.float64, value_dim=6):
    generator = torch.Generator().manual_seed(0)
    tokens = sum(s.size for s in SEGMENTS)
    shapes = ((1, 4, tokens, 8), (7, kv_heads, CAPACITY, 8), (7, kv_heads, CAPACITY, value_dim))
    query, k_pool, v_pool = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return query, k_pool, v_pool


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=compiled_only),
        "reference",
    ]
)
def attend(request):
    """Attention of ``SEGMENTS`` by the compiled operator or by its definition."""

    def run(query, k_pool, v_pool, **options):
        packing = Packing(SEGMENTS, [s.size for s in SEGMENTS], query.device)
        if request.param == "cpu":
            return ragged_attention(query, k_pool, v_pool, packing, 0.3, **options)
        out = query.new_empty(1, query.shape[2], query.shape[1], v_pool.shape[3])
        rest = (options.get(name) for name in ("window", "soft_cap", "sinks"))
        definition = ops._checked("ragged_attention_", ops._OPERATORS["ragged_attention_"][2])
        definition(out, query, k_pool, v_pool, packing.table, 0.3, *rest)
        return out

    return run


def dense(query, k_pool, v_pool, segments, scale, window=None, soft_cap=None, sinks=None):
    """One query and one head at a time, over explicit lists of what it sees."""
    out, token = [], 0
    per_group = query.shape[1] // k_pool.shape[1]
    for slot, start, size in segments:
        for p in range(start, start + size):
            seen = [j for j in range(p + 1) if window is None or p - j < window]
            heads = []
            for h in range(query.shape[1]):
                keys, values = (pool[slot, h // per_group, seen] for pool in (k_pool, v_pool))
                scores = keys @ query[0, h, token] * scale
                if soft_cap is not None:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                weights = scores.exp()
                weights = weights / (weights.sum() + (0 if sinks is None else sinks[h].exp()))
                heads.append(weights @ values)
            out.append(torch.stack(heads))
            token += 1
    return torch.stack(out)[None]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_equals_attention_token_by_token(attend, options, kv_heads):
    query, k_pool, v_pool = make(kv_heads)
    got = attend(query, k_pool, v_pool, **options)
    torch.testing.assert_close(got, dense(query, k_pool, v_pool, SEGMENTS, 0.3, **options), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_nothing_beyond_a_row_is_read(attend, options):
    query, k_pool, v_pool = make()
    want = attend(query, k_pool, v_pool, **options)
    window = options.get("window", 99)
    for pool in (k_pool, v_pool):
        poisoned = torch.full_like(pool, float("nan"))
        for slot, start, size in SEGMENTS:
            seen = slice(max(0, start + 1 - window), start + size)
            poisoned[slot, :, seen] = pool[slot, :, seen]
        pool.copy_(poisoned)
    assert torch.equal(attend(query, k_pool, v_pool, **options), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sums_are_float32_or_wider(attend, dtype):
    query, k_pool, v_pool = make(dtype=dtype)
    got = attend(query, k_pool, v_pool)
    assert got.dtype == dtype
    want = dense(query.double(), k_pool.double(), v_pool.double(), SEGMENTS, 0.3)
    # weights are rounded before they meet the values, as in any fused attention
    torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)


COMPARE_WITH_THE_DEFINITION = """
import sys, torch
from gpu import gates
from gpu.attention_cases import cases, telling
from specdec_fast.layouts.ragged.attention import ragged_attention
check = lambda case: case.check(
    ragged_attention(case.query, case.k_pool, case.v_pool, case.packing, case.scale, **case.options)
)
for dtype in (torch.float16, torch.bfloat16, torch.float32):
    for case in telling(dtype):
        check(case)
gates.for_each(cases(longest=700), int(sys.argv[1]), check)
"""


@compiled_only
@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_parity_at_every_vector_width(capability, count):
    code = [sys.executable, "-c", COMPARE_WITH_THE_DEFINITION, str(count)]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": str(Path(__file__).parent)}
    run = subprocess.run(code, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-4000:]


ATTEND_BESIDE_FORBIDDEN_MEMORY = """
import ctypes, mmap, sys, torch
from specdec_fast import ops
lengths, beyond = [2000, *[100] * 7], int(sys.argv[1])
heads, columns, dim, page, no_access = 2, 4096, 64, mmap.PAGESIZE, 0
pools = []
for _ in range(2):
    memory = mmap.mmap(-1, len(lengths) * heads * columns * dim * 4)
    pool = torch.frombuffer(memory, dtype=torch.float32).view(len(lengths), heads, columns, dim)
    for slot, length in enumerate(lengths):
        for head in range(heads):
            first = -(-length * dim * 4 // page) * page
            address, size = pool[slot, head].data_ptr() + first, columns * dim * 4 - first
            assert not ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), no_access)
    pools.append(pool)
readable = sum(-(-n * dim * 4 // page) * page for n in lengths)
assert readable <= 1.05 * sum(lengths) * dim * 4
ends = [n + beyond * (page // dim // 4) for n in lengths]
table = torch.tensor([list(range(8)), ends, [5] * 8, list(range(0, 40, 5))])
query = torch.randn(1, 2 * heads, 40, dim)
ops.ragged_attention_(torch.empty(1, 40, 2 * heads, dim), query, *pools, table, 0.1)
"""


@compiled_only
@pytest.mark.parametrize(("beyond", "signal"), [(0, 0), (1, -11)])
def test_one_row_of_2000_tokens_and_seven_of_100_are_read_to_their_lengths(beyond, signal):
    # at most 5 % more can be read: whoever reads beyond dies of signal 11
    code = [sys.executable, "-c", ATTEND_BESIDE_FORBIDDEN_MEMORY, str(beyond)]
    run = subprocess.run(code, capture_output=True)
    assert run.returncode == signal, run.stderr.decode()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_infinite_and_tiny_scores(attend, dtype):
    """As in the definition: -inf weighs nothing, wherever it stands, and so does what lies far below the peak."""
    query, k_pool, v_pool = make(dtype=dtype)
    query[:] = 1
    k_pool[1, :, :30] = float("-inf")
    k_pool[2, :, 0], v_pool[2, :, 0] = -1e4, torch.finfo(dtype).max / 2
    got = attend(query, k_pool, v_pool)
    torch.testing.assert_close(got, dense(query, k_pool, v_pool, SEGMENTS, 0.3), rtol=1e-4, atol=1e-5, equal_nan=True)


REFUSED = {
    "query has 3 heads": lambda q, k, v: ((q[:, :3], k, v), {}),
    "query is": lambda q, k, v: ((q[:, :, 1:], k, v), {}),
    "k_pool is torch.float32": lambda q, k, v: ((q, k.float(), v), {}),
    "v_pool is": lambda q, k, v: ((q, k, v[:6]), {}),
    "slots 0..5 and columns 0..47": lambda q, k, v: ((q, k[:6], v[:6]), {}),
    "column 42; need slots 0..6 and columns 0..41": lambda q, k, v: ((q, k[:, :, :42], v[:, :, :42]), {}),
    "window is 0": lambda q, k, v: ((q, k, v), {"window": 0}),
    "soft_cap is 0": lambda q, k, v: ((q, k, v), {"soft_cap": 0.0}),
    "sinks is": lambda q, k, v: ((q, k, v), {"sinks": torch.zeros(2)}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_misuse_is_refused_before_a_launch(message):
    tensors, options = REFUSED[message](*make())
    packing = Packing(SEGMENTS, [s.size for s in SEGMENTS], torch.device("cpu"))
    with pytest.raises(RuntimeError, match=message):
        checks.ragged_attention(*tensors, packing, *(options.get(name) for name in ("window", "soft_cap", "sinks")))
