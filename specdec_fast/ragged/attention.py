"""Attention of packed tokens over a pool of slots, as transformers calls it."""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .. import backends, checks, compat, reference
from . import rows
from .cache import RaggedCache
from .packing import Packing, Segment

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
    if torch.compiler.is_compiling():
        arguments = query, key, value, cache.packing.table, scale, sliding_window, softcap, s_aux
        return torch.ops.specdec_fast.ragged_attention.default(*arguments), None
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
    """Attention of the packed tokens; :func:`specdec_fast.reference.ragged_attention` explains the arguments.

    On a GPU, float16, bfloat16 and float32 run in one Triton kernel. Where there is none, and on the CPU, every row is
    a call of PyTorch's attention, unless there is a soft cap or sinks: those are left to the definition.

    Raises:
        RuntimeError: tensors do not fit each other, or are not what the backend that was asked for serves.
    """
    checks.ragged_attention(query, k_pool, v_pool, packing, window, soft_cap, sinks)
    wanted = backends.requested()
    if wanted == "triton" or (wanted == "auto" and query.is_cuda and query.dtype in _DTYPES and _triton()):
        bounds = packing.table, packing.most_tokens, packing.longest
        return _in_triton(query, k_pool, v_pool, bounds, scale, window, soft_cap, sinks)
    if wanted != "reference" and soft_cap is None and sinks is None:
        return rows.attention(query, k_pool, v_pool, packing, scale, window)
    return reference.ragged_attention(query, k_pool, v_pool, packing.segments, scale, window, soft_cap, sinks)


def _in_triton(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    bounds: tuple[Tensor, int, int],
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    kernel = _triton()
    if kernel is None or query.dtype not in _DTYPES or not (query.is_cuda or backends.interprets_triton()):
        raise RuntimeError(
            f"ragged_attention got {query.dtype} on {query.device}, which {backends.VARIABLE}=triton does not serve; "
            "it serves float16, bfloat16 and float32 on a GPU"
        )
    return kernel(query, k_pool, v_pool, *bounds, scale, window, soft_cap, sinks)


@functools.cache
def _triton() -> Callable[..., Tensor] | None:
    """The Triton kernel where it can run; found at the first call, to keep importing cheap."""
    if next(backend.available for backend in backends.available() if backend.name == "triton"):
        return importlib.import_module("specdec_fast.kernels.ragged_attention").ragged_attention
    return None


def _of_table(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    table: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """:func:`ragged_attention` of the segments in ``table`` ``[4, S]``, where those of size 0 do not exist."""
    if query.is_cuda:
        # sizes are on the device, so an even share and the whole width are expected
        bounds = table, -(-query.shape[2] // table.shape[1]), k_pool.shape[2]
        return _in_triton(query, k_pool, v_pool, bounds, scale, window, soft_cap, sinks)
    segments = [Segment(slot, end - size, size) for slot, end, size, _ in table.T.tolist() if size]
    packing = Packing(segments, [0] * len(segments), table.device)
    return ragged_attention(query, k_pool, v_pool, packing, scale, window, soft_cap, sinks)


def _register() -> torch.library.Library:
    """The operator that stands for attention in compiled forwards."""
    library = torch.library.Library("specdec_fast", "FRAGMENT")
    library.define(
        "ragged_attention(Tensor query, Tensor k_pool, Tensor v_pool, Tensor table, float scale, int? window, "
        "float? soft_cap, Tensor? sinks) -> Tensor"
    )
    library.impl("ragged_attention", _of_table, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "specdec_fast::ragged_attention",
        lambda query, k_pool, v_pool, *_: query.new_empty(1, query.shape[2], query.shape[1], v_pool.shape[3]),
        lib=library,
    )
    return library


_library = _register()
compat.register_attention(NAME, attend)
