"""Random packed forwards for ragged attention, with nothing finite where nothing may be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from specdec_fast import reference
from specdec_fast.layouts.ragged import Packing, Segment

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DIMS = (16, 64, 80, 128)
# roundings of the dtype that an output may be off by: half precision rounds the weights and the result
_ROUNDINGS = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 32}


@dataclass
class Case:
    """Arguments of ``ragged_attention``, and processors to keep busy."""

    query: Tensor
    k_pool: Tensor
    v_pool: Tensor
    segments: list[Segment]
    options: dict[str, Any]
    wanted_blocks: int = 1

    @property
    def packing(self) -> Packing:
        return Packing(self.segments, [1] * len(self.segments), self.query.device)

    @property
    def scale(self) -> float:
        return self.query.shape[3] ** -0.5

    def expected(self) -> Tensor:
        """The definition in float64; rows are read from memory in which all that is not theirs is NaN."""
        wide = (x.double() for x in (self.query, self.k_pool, self.v_pool))
        return reference.ragged_attention(*wide, self.segments, self.scale, **self.options)

    def check(self, got: Tensor) -> None:
        assert got.dtype == self.query.dtype
        bound = _ROUNDINGS[got.dtype] * torch.finfo(got.dtype).eps
        torch.testing.assert_close(got.double(), self.expected(), rtol=bound, atol=bound)


def build(
    segments: list[tuple[int, int]],
    groups: int = 2,
    heads: int = 2,
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.bfloat16,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
    packed_query: bool = True,
    wanted_blocks: int = 1,
    seed: int = 0,
) -> Case:
    """A case whose rows lie in slots of any order.

    Args:
        segments: first position and size each.
        dims: of keys and values.
        packed_query: tokens lie one after the other, as a model's projections leave them.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    slots = torch.randperm(len(segments) + 2, generator=generator).tolist()
    placed = [Segment(slot, *segment) for slot, segment in zip(slots, segments, strict=False)]
    tokens, capacity = sum(s.size for s in placed), max(s.end for s in placed) + 3
    pools = [torch.full((len(slots), heads, capacity, dim), float("nan"), dtype=dtype) for dim in dims]
    for slot, start, size in placed:
        low = 0 if window is None else max(0, start + 1 - window)
        for pool in pools:
            pool[slot, :, low : start + size] = normal(heads, start + size - low, pool.shape[3])
    query = normal(1, tokens, heads * groups, dims[0]).transpose(1, 2)
    options = {"window": window, "soft_cap": soft_cap, "sinks": normal(heads * groups) if sinks else None}
    return Case(query if packed_query else query.contiguous(), *pools, placed, options, wanted_blocks)


def telling(dtype: torch.dtype) -> list[Case]:
    """Cases that any one mistake spoils: a prompt beside long rows in splits, and a window shorter than rows."""
    return [
        build([(0, 6), (530, 4), (290, 1)], dtype=dtype, sinks=True, wanted_blocks=1000),
        build([(0, 12), (40, 4)], dtype=dtype, window=7),
    ]


def segments(longest: int, most_tokens: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Prompts, chunks of them and verifies, side by side."""
    prompt = st.tuples(st.just(0), st.integers(1, most_tokens))
    verify = st.tuples(st.integers(0, longest), st.integers(1, 6))
    chunk = st.tuples(st.integers(0, 90), st.integers(1, most_tokens))
    return st.lists(prompt | verify | chunk, min_size=1, max_size=4)


def cases(longest: int, most_tokens: int = 40, **fixed: Any) -> st.SearchStrategy[Case]:
    """Random cases.

    Args:
        longest: first position of a verify, at most.
        most_tokens: of a prompt, or of a chunk of one.
        fixed: arguments of :func:`build`, or strategies for them.
    """
    dim = st.sampled_from(DIMS)
    drawn = {
        "segments": segments(longest, most_tokens),
        "groups": st.sampled_from([1, 2, 3, 4, 8]),
        "heads": st.sampled_from([1, 2]),
        "dims": dim.map(lambda n: (n, n)) | st.tuples(dim, dim),
        "dtype": st.sampled_from(DTYPES),
        "window": st.none() | windows(longest),
        "soft_cap": st.none() | st.floats(0.5, 30.0),
        "sinks": st.booleans(),
        "packed_query": st.booleans(),
        "wanted_blocks": st.sampled_from([1, 24, 1000]),
        "seed": st.integers(0, 1000),
    }
    chosen = {name: x if isinstance(x, st.SearchStrategy) else st.just(x) for name, x in fixed.items()}
    return st.builds(build, **(drawn | chosen))


def windows(longest: int) -> st.SearchStrategy[int]:
    return st.integers(1, 20) | st.integers(1, longest)
