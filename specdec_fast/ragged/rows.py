"""Ragged attention as one call of PyTorch's attention per row, on views of the pools."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .. import reference
from .packing import Packing, Segment

# a mask of more queries than this is not repeated for every query head
MOST_GROUPED = 32


def attention(
    query: Tensor, k_pool: Tensor, v_pool: Tensor, packing: Packing, scale: float, window: int | None
) -> Tensor:
    """:func:`specdec_fast.reference.ragged_attention` without soft cap and sinks."""
    out = query.new_empty(1, query.shape[2], query.shape[1], v_pool.shape[3])
    first = 0
    for segment in packing.segments:
        tokens = slice(first, first + segment.size)
        low = 0 if window is None else max(0, segment.start + 1 - window)
        k, v = (pool[segment.slot, None, :, low : segment.end] for pool in (k_pool, v_pool))
        out[:, tokens] = _row(query[:, :, tokens], k, v, packing, segment, scale, window).transpose(1, 2)
        first += segment.size
    return out


def _row(
    query: Tensor, k: Tensor, v: Tensor, packing: Packing, segment: Segment, scale: float, window: int | None
) -> Tensor:
    """``query`` ``[1, Hq, n, D]`` of one row over the ``k`` and ``v`` ``[1, H, L, D]`` that it may see."""
    whole = segment.start == 0 and (window is None or segment.size <= window)
    if segment.size > MOST_GROUPED or (whole and segment.size > 1):
        mask = None if whole else _mask(packing, segment, window, query.dtype, 1)
        return scaled_dot_product_attention(query, k, v, mask, is_causal=whole, scale=scale, enable_gqa=True)
    # the query heads of a KV head become queries of one head: its keys are read once, and few queries take less time
    groups = query.shape[1] // k.shape[1]
    grouped = query.reshape(1, k.shape[1], -1, query.shape[3])
    mask = None if segment.size == 1 else _mask(packing, segment, window, query.dtype, groups)
    return scaled_dot_product_attention(grouped, k, v, mask, scale=scale).view(*query.shape[:3], -1)


def _mask(packing: Packing, segment: Segment, window: int | None, dtype: torch.dtype, groups: int) -> Tensor:
    """Additive mask ``[groups * n, L]``, made once for all layers of a forward."""
    key = (segment, window, dtype, groups)
    if key not in packing.masks:
        low = 0 if window is None else max(0, segment.start + 1 - window)
        p = torch.arange(segment.start, segment.end, device=packing.row_of.device)[:, None]
        j = torch.arange(low, segment.end, device=packing.row_of.device)
        seen = j <= p if window is None else (j <= p) & (p - j < window)
        packing.masks[key] = reference.mask_values(seen, dtype).repeat(groups, 1)
    return packing.masks[key]
