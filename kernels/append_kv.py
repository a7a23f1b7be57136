"""Triton kernel of the ragged layout's scatter."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import strips
from .tables import OPTIONS, device_rows

# elements that a program copies
TILE = tl.constexpr(2048)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def scatter_head(pool, new, row_of, position_of, strides, tokens, BYTES: tl.constexpr, LANES: tl.constexpr):
    """Copy some tokens of one head; a vector of 16 bytes is four words, any other is one element.

    ``strides`` is ``[9]`` int64: strides of the pool's row, head, column and element and of the new KV's head, token
    and element in bytes, heads, and bytes of a column.
    """
    ELEMENT: tl.constexpr = 4 if BYTES == 16 else BYTES
    PER_VECTOR: tl.constexpr = BYTES // ELEMENT
    TOKENS: tl.constexpr = max(1, TILE // LANES)
    dtype = tl.int64 if ELEMENT == 8 else tl.int32 if ELEMENT == 4 else tl.int16 if ELEMENT == 2 else tl.int8
    head = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    # keys and values may have different numbers of heads
    exists = token < tl.where(head < tl.load(strides + 7), tokens, 0)
    row, column = tl.load(row_of + token, mask=exists, other=0), tl.load(position_of + token, mask=exists, other=0)
    to = row * tl.load(strides) + head * tl.load(strides + 1) + column * tl.load(strides + 2)
    start = token * tl.load(strides + 5) + head * tl.load(strides + 4)
    # every stride is a multiple of the vector, which the compiler cannot know
    to = tl.multiple_of(to // ELEMENT, PER_VECTOR)
    start = tl.multiple_of(start // ELEMENT, PER_VECTOR)
    lane = tl.arange(0, LANES)[None, :]
    to_lane = lane if BYTES == 16 else lane * (tl.load(strides + 3) // ELEMENT)
    from_lane = lane if BYTES == 16 else lane * (tl.load(strides + 6) // ELEMENT)
    source = tl.multiple_of(new.to(tl.pointer_type(dtype), bitcast=True), BYTES)
    target = tl.multiple_of(pool.to(tl.pointer_type(dtype), bitcast=True), BYTES)
    elements = (tl.load(strides + 8) // BYTES * PER_VECTOR).to(tl.int32)
    inside = exists[:, None] & (lane < elements)
    values = tl.load(source + start[:, None] + from_lane, mask=inside)
    tl.store(target + to[:, None] + to_lane, values, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def append_kv_kernel(
    k_pool,
    v_pool,
    k,
    v,
    row_of,
    position_of,
    strides,
    tokens,
    K_BYTES: tl.constexpr,
    K_LANES: tl.constexpr,
    V_BYTES: tl.constexpr,
    V_LANES: tl.constexpr,
):
    """One program for a few tokens of one head, of keys or values."""
    if tl.program_id(2) == 0:
        scatter_head(k_pool, k, row_of, position_of, strides, tokens, K_BYTES, K_LANES)
    else:
        scatter_head(v_pool, v, row_of, position_of, strides + 9, tokens, V_BYTES, V_LANES)


def append_kv_(k_pool: Tensor, v_pool: Tensor, k: Tensor, v: Tensor, row_of: Tensor, position_of: Tensor) -> None:
    tokens, device = len(row_of), row_of.device
    if not k_pool.numel() + v_pool.numel() or not tokens:
        return
    keys, values = _strides(k_pool, k), _strides(v_pool, v)
    per_program = TILE.value // max(keys.lanes, values.lanes)
    append_kv_kernel[(triton.cdiv(tokens, max(per_program, 1)), max(k_pool.shape[1], v_pool.shape[1]), 2)](
        *(x.view(_INTEGERS[x.element_size()]) for x in (k_pool, v_pool, k, v)),
        row_of.contiguous(),
        position_of.contiguous(),
        _rows((keys.row, values.row), device),
        tokens,
        keys.vector,
        keys.lanes,
        values.vector,
        values.lanes,
        **OPTIONS,
    )


class _Strides(NamedTuple):
    row: tuple[int, ...]
    vector: int
    lanes: int


# strides stay the same from call to call, addresses do not
_rows = functools.lru_cache(1024)(device_rows)


def _strides(pool: Tensor, new: Tensor) -> _Strides:
    element, width = pool.element_size(), pool.shape[3]
    strides = [x * element for x in (*pool.stride(), *new.stride()[1:])]
    vector = element
    if width == 1 or pool.stride(3) == new.stride(3) == 1:
        aligned = (strips.alignment(x.data_ptr(), x.shape, x.stride(), element) for x in (pool, new))
        vector = min(*aligned, strips.power_of_two_in(width * element | strips.WIDEST_VECTOR))
        strides[3] = strides[6] = vector
    lanes = triton.next_power_of_2(width * element // min(vector, 4 if vector == 16 else vector))
    return _Strides((*strides, pool.shape[1], width * element), vector, lanes)
