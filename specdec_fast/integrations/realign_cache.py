"""Realign for other people's decoders: a KV cache and a left-padded mask in, both back in step."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from .. import ops, reference
from ..errors import InputError, UnsupportedModelError


def realign_cache(
    cache, attention_mask: Tensor, n_accepted: Tensor, num_drafted: int, num_next: int
) -> tuple[Tensor, Tensor]:
    """Bring a left-padded batch back in step after a verify, whatever each row accepted.

    Call it once a round, after the target has run over the last committed token and ``num_drafted`` drafts of every
    row. The KV of rejected drafts is dropped, rows move (as few as possible) so that all end in one column, and what
    comes back fits the next forward: feed it the bonus token of every row first. It reads back to the host once.

    Parameters
    ----------
    cache
        A transformers ``DynamicCache`` or ``StaticCache`` with full-attention layers only, or a list of ``(k, v)``,
        ``[B, H, C, D]`` each. A list's entries become views that end where the valid columns end.
    attention_mask
        ``[B, C]``, left-padded, as the verify got it: the drafts are in it.
    n_accepted
        ``[B]`` int64, 0..``num_drafted``.
    num_drafted
        Drafts of every row in this round.
    num_next
        Tokens of every row in the next forward: the bonus, and the next drafts if they are verified at once.

    Returns
    -------
    attention_mask
        ``[B, C' + num_next]`` for the next forward, ``C'`` being the columns now in the cache.
    position_ids
        ``[B, num_next]``. Pass them: a model that makes them up itself ignores left padding.

    Raises
    ------
    UnsupportedModelError
        A layer that drops columns or keeps a state: no row of it can be rolled back.
    InputError
        Arguments that do not belong together.
    """
    layers = _layers(cache)
    pairs = cache if layers is None else [(layer.keys, layer.values) for layer in layers]
    width = _check(pairs, attention_mask, n_accepted, num_drafted, num_next)
    visible = attention_mask.bool()
    length = visible.sum(1) - num_drafted
    end = width - num_drafted
    start = end - length
    column = torch.arange(width, device=visible.device)
    left_padded = (visible == (column >= start[:, None])).all(1) & (length > 0)
    in_range = (n_accepted >= 0) & (n_accepted <= num_drafted)
    nobody = torch.zeros_like(in_range)
    new_end, shift = reference.plan_realign(start, torch.full_like(start[0], end), n_accepted, nobody, num_drafted)
    filled = (
        start.new_tensor(width) if layers is None else torch.as_tensor(layers[0].get_seq_length(), device=start.device)
    )
    facts = [left_padded, in_range, n_accepted, new_end.expand_as(start), filled.expand_as(start)]
    padded, ranged, counts, ends, columns = torch.stack([fact.long() for fact in facts]).tolist()
    if columns[0] != width:
        raise InputError(
            f"cache holds {columns[0]} columns, attention_mask {width}; pass the verify's, drafts included"
        )
    if 0 in padded:
        raise InputError(f"row {padded.index(0)} of attention_mask is not zeros, then ones up to the last draft")
    if 0 in ranged:
        row = ranged.index(0)
        raise InputError(f"n_accepted[{row}] is {counts[row]}; need 0..{num_drafted}")
    ops.realign_([x for pair in pairs for x in pair], start, length + n_accepted, shift)
    # the bonus token at the new end has no KV yet
    kept = ends[0] - 1
    if layers is None:
        cache[:] = [(k[:, :, :kept], v[:, :, :kept]) for k, v in cache]
    else:
        for layer in layers:
            _keep(layer, kept)
    column = torch.arange(kept + num_next, device=start.device)
    new_start = (start + shift)[:, None]
    return (column >= new_start).to(attention_mask.dtype), column[kept:] - new_start


def _layers(cache) -> list | None:
    """The layers of a transformers cache, ``None`` for a list of pairs."""
    if isinstance(cache, list):
        return None
    from transformers.cache_utils import DynamicLayer, StaticLayer

    layers = getattr(cache, "layers", None)
    if not isinstance(layers, list):
        raise InputError(f"cache is a {type(cache).__name__}; need a DynamicCache, a StaticCache or a list of (k, v)")
    for i, layer in enumerate(layers):
        if type(layer) not in (DynamicLayer, StaticLayer):
            raise UnsupportedModelError(
                f"layer {i} of the cache is a {type(layer).__name__}; only DynamicLayer and StaticLayer keep every "
                "column of every row (sliding windows drop columns, states cannot be rolled back row by row)"
            )
    return [layer for layer in layers if layer.is_initialized]


def _check(pairs: list, attention_mask: Tensor, n_accepted: Tensor, num_drafted: int, num_next: int) -> int:
    """Columns that the verify left in the cache."""
    _check_types(pairs, attention_mask, n_accepted, num_drafted, num_next)
    if not pairs:
        raise InputError("cache is empty; need one that a verify has filled")
    if attention_mask.dim() != 2:
        raise InputError(f"attention_mask is {list(attention_mask.shape)}; need [rows, columns]")
    rows, width = attention_mask.shape
    if n_accepted.dtype != torch.int64 or n_accepted.shape != (rows,) or n_accepted.device != attention_mask.device:
        raise InputError(
            f"n_accepted is {n_accepted.dtype} {list(n_accepted.shape)} on {n_accepted.device}; "
            f"need int64 [{rows}] on {attention_mask.device}"
        )
    if not 0 <= num_drafted < width:
        raise InputError(f"num_drafted={num_drafted}; need 0..{width - 1} for a mask of {width} columns")
    if num_next < 1:
        raise InputError(f"num_next={num_next}; need at least 1, the bonus token")
    for i, pair in enumerate(pairs):
        for x in pair:
            if x.dim() != 4 or x.shape[0] != rows or x.shape[2] < width:
                raise InputError(
                    f"layer {i} of the cache holds {list(x.shape)}; attention_mask of the verify, drafts included, "
                    f"asks for [{rows}, heads, at least {width}, dim]"
                )
    return width


def _check_types(pairs: list, attention_mask: Any, n_accepted: Any, num_drafted: Any, num_next: Any) -> None:
    tensors = [("attention_mask", attention_mask, "[rows, columns]"), ("n_accepted", n_accepted, "int64 [rows]")]
    for name, value, shape in tensors:
        if not isinstance(value, Tensor):
            raise InputError(f"{name} is a {type(value).__name__}; need a tensor, {shape}")
    for name, value in (("num_drafted", num_drafted), ("num_next", num_next)):
        if not isinstance(value, Integral):
            raise InputError(f"{name}={value!r}; need an integer")
    for i, pair in enumerate(pairs):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            size = f" of {len(pair)}" if isinstance(pair, list | tuple) else ""
            raise InputError(f"layer {i} of the cache is a {type(pair).__name__}{size}; need (k, v)")
        for x in pair:
            if not isinstance(x, Tensor):
                raise InputError(f"layer {i} of the cache holds a {type(x).__name__}; need tensors")


def _keep(layer, columns: int) -> None:
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length.fill_(columns)
    else:
        layer.keys, layer.values = layer.keys[:, :, :columns], layer.values[:, :, :columns]
