"""Attention of packed tokens over a pool of slots; the definition, and what transformers calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .. import compat
from .cache import RaggedCache
from .packing import Packing, Segment

NAME = "specdec_fast"
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
    """What a model calls: ``query`` ``[1, Hq, N, D]`` over the pools that its cache returned; ``[1, N, Hq, D]``.

    Raises:
        RuntimeError: outside a packed forward, where the mask of an ordinary call would be ignored.
    """
    cache = getattr(_running, "cache", None)
    if cache is None or attention_mask is not None:
        raise RuntimeError(f"attn_implementation={NAME!r} serves packed forwards over a RaggedCache only")
    if (key.shape[0], key.shape[2], query.shape[2]) != (cache.num_slots, cache.capacity, len(cache.packing)):
        raise RuntimeError(f"{type(module).__name__} attends to keys that did not come from its cache")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return ragged_attention(query, key, value, cache.packing.segments, scale, sliding_window, softcap, s_aux), None


def ragged_attention(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    segments: Sequence[Segment],
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The token at position p of a row sees the positions ``j <= p`` of that row with ``p - j < window``.

    Scores are ``soft_cap * tanh(q k scale / soft_cap)``, the softmax runs over them and the head's sink, in float32 or
    wider. Nothing beyond a row's last query is read.

    Args:
        query: ``[1, Hq, N, D]``, the tokens of ``segments`` in their order.
        k_pool, v_pool: ``[W, H, C, D]``; H divides Hq, the D of values may differ.
        sinks: ``[Hq]``, a score without a value.

    Returns:
        ``[1, N, Hq, D]`` of the values' D, in the query's dtype.
    """
    heads, groups = k_pool.shape[1], query.shape[1] // k_pool.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    out = query.new_empty(1, query.shape[2], query.shape[1], v_pool.shape[3])
    # [H, groups, N, D]
    grouped = query[0].unflatten(0, (heads, groups))
    first = 0
    for slot, start, size in segments:
        tokens = slice(first, first + size)
        first += size
        end = start + size
        low = 0 if window is None else max(0, start + 1 - window)
        k, v = (pool[slot, :, None, low:end].to(wide) for pool in (k_pool, v_pool))
        scores = grouped[:, :, tokens].to(wide) @ k.mT * scale
        if soft_cap is not None:
            scores = soft_cap * (scores / soft_cap).tanh()
        p = torch.arange(start, end, device=query.device)[:, None]
        j = torch.arange(low, end, device=query.device)
        hidden = j > p if window is None else (j > p) | (p - j >= window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            sink = sinks.to(wide).view(heads, groups, 1, 1).expand(-1, -1, size, -1)
            scores = torch.cat([scores, sink], -1)
        # [H, groups, size, D]
        row = scores.softmax(-1)[..., : end - low] @ v
        out[0, tokens] = row.flatten(0, 1).transpose(0, 1).to(out.dtype)
    return out


compat.register_attention(NAME, attend)
