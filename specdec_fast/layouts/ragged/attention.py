"""Attention of packed tokens over a pool of slots, as transformers calls it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ... import ops
from ...integrations import compat
from ...operators import checks
from .cache import RaggedCache
from .packing import Packing

NAME = "specdec_fast"
# of the Triton kernel
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_running = threading.local()


@contextmanager
def over(cache: RaggedCache, packing: Packing) -> Iterator[None]:
    """Let this thread's attention read and write ``cache`` for the tokens of ``packing``."""
    outer = getattr(_running, "cache", None)
    cache.packing, _running.cache = packing, cache
    try:
        yield
    finally:
        cache.packing, _running.cache = None, outer


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_,
) -> tuple[Tensor, None]:
    """A model's attention: ``query`` ``[1, Hq, N, D]`` over the pools its cache returned; ``[1, N, Hq, D]``.

    Raises:
        RuntimeError: outside a packed forward, where the mask of an ordinary call would be ignored.
    """
    cache = getattr(_running, "cache", None)
    if cache is None:
        raise RuntimeError(
            f"attn_implementation={NAME!r} serves packed forwards over a RaggedCache only; if another thread is "
            "decoding with this model, give each a copy or use layout='padded'"
        )
    if attention_mask is not None:
        raise RuntimeError(f"{type(module).__name__} makes an attention mask of its own; no packed forward has one")
    if (key.shape[0], key.shape[2], query.shape[2]) != (cache.num_slots, cache.capacity, len(cache.packing)):
        raise RuntimeError(f"{type(module).__name__} attends to keys that did not come from its cache")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return ragged_attention(query, key, value, cache.packing, scale, sliding_window, softcap, s_aux), None


def ragged_attention(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    packing: Packing,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of the packed tokens; :func:`specdec_fast.ops.ragged_attention_` explains the arguments.

    Raises:
        RuntimeError: tensors do not fit each other, or are not what the backend that was asked for serves.
    """
    triton = None if torch.compiler.is_compiling() else ops.triton_kernel("ragged_attention_", query.device.type)
    if triton and query.dtype in _DTYPES:
        # what is known on the host makes a better launch than the operator's table
        checks.ragged_attention(query, k_pool, v_pool, packing, window, soft_cap, sinks)
        bounds = packing.table, packing.most_tokens, packing.longest
        return triton.ragged_attention(query, k_pool, v_pool, *bounds, scale, window, soft_cap, sinks)
    out = query.new_empty(1, query.shape[2], query.shape[1], v_pool.shape[3])
    ops.ragged_attention_(out, query, k_pool, v_pool, packing.table, scale, window, soft_cap, sinks)
    return out


compat.register_attention(NAME, attend)
