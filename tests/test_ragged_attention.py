"""Ragged attention against dense attention over every row, and what it must never read."""

import pytest
import torch
from tiny_models import make_model

from specdec_fast.ragged import Packing, RaggedPool, Segment, rows
from specdec_fast.ragged.attention import ragged_attention

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


def attend(query, k_pool, v_pool, **options):
    packing = Packing(SEGMENTS, [s.size for s in SEGMENTS], query.device)
    return ragged_attention(query, k_pool, v_pool, packing, 0.3, **options)


@pytest.fixture(params=["auto", "reference"])
def backend(request, monkeypatch):
    monkeypatch.setenv("SPECDEC_FAST_BACKEND", request.param)


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


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_equals_attention_token_by_token(options, kv_heads):
    query, k_pool, v_pool = make(kv_heads)
    got = attend(query, k_pool, v_pool, **options)
    torch.testing.assert_close(got, dense(query, k_pool, v_pool, SEGMENTS, 0.3, **options), rtol=1e-12, atol=1e-13)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_nothing_beyond_a_row_is_read(options):
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


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sums_are_float32_or_wider(dtype):
    query, k_pool, v_pool = make(dtype=dtype)
    got = attend(query, k_pool, v_pool)
    assert got.dtype == dtype
    want = dense(query.double(), k_pool.double(), v_pool.double(), SEGMENTS, 0.3)
    # weights are rounded before they meet the values, as in any fused attention
    torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)


@torch.no_grad()
def test_each_byte_of_a_row_is_read_once(monkeypatch):
    """One row of 2,000 tokens and seven of 100, as attention reads them in one verify."""
    lengths = [2000, *[100] * 7]
    model = make_model("llama", seed=1, dtype=torch.float32)
    pool = RaggedPool(8, [], torch.device("cpu"))
    follower = pool.follow(model)
    slots = [pool.lease(torch.full((n,), 5), 4096) for n in lengths]
    follower.forward([follower.missing(slot) for slot in slots], [1] * 8)
    read = []
    inner = rows.scaled_dot_product_attention
    monkeypatch.setattr(
        rows, "scaled_dot_product_attention", lambda q, k, v, *a, **kw: read.append((k, v)) or inner(q, k, v, *a, **kw)
    )
    pool.select(slots)
    pool.open_round(4)
    follower.verify(torch.full((8, 4), 6), [4] * 8)
    views = [x for pair in read for x in pair]
    pools = {x.untyped_storage().data_ptr() for x in follower.cache.tensors()}
    assert {x.untyped_storage().data_ptr() for x in views} == pools, "a row was copied"
    needed = sum(n + 4 for n in lengths) * follower.cache.bytes_per_column
    assert sum(x.numel() * x.element_size() for x in views) <= 1.05 * needed


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


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("message", REFUSED)
def test_misuse_is_refused_by_name(message):
    tensors, options = REFUSED[message](*make())
    with pytest.raises(RuntimeError, match=message):
        attend(*tensors, **options)


def test_a_backend_that_was_asked_for_is_not_replaced(monkeypatch):
    monkeypatch.setenv("SPECDEC_FAST_BACKEND", "triton")
    with pytest.raises(RuntimeError, match=r"float64 on cpu, which SPECDEC_FAST_BACKEND=triton does not serve"):
        attend(*make())
