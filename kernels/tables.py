"""Tables that kernels read in device memory, copied there once for every content."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .move import NARROW_CHUNK
from .strips import alignment, cut

# of a launch: a pipelined loop could load columns after an earlier turn has overwritten them; there are no floats, but
# Triton warns where this is left open
OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}
WIDTHS = (16, 8, 4, 2, 1)
# a captured CUDA graph goes on reading its tables, so they are dropped late
_MOST_TABLES = 1024


class StripTable(NamedTuple):
    """The strips of all caches; ``rows`` and ``lanes`` are for :func:`specdec_fast.kernels.move.move_row`."""

    rows: Tensor
    num_strips: int
    heads: int
    lanes: tuple[int, ...]


class MaskTable(NamedTuple):
    """Masks and windows, for :func:`specdec_fast.kernels.masks.write_masks`."""

    rows: Tensor
    sizes: tuple[bool, ...]
    aligned: bool


def strip_table(caches: Sequence[Tensor], device: torch.device) -> StripTable:
    """The strips of caches ``[B, H, C, D]``."""
    return _strip_table(
        tuple((x.data_ptr(), x.element_size(), x.shape, x.stride()) for x in caches if x.numel()), device
    )


@functools.lru_cache(_MOST_TABLES)
def _strip_table(caches: tuple, device: torch.device) -> StripTable:
    blocks = sum(shape[0] * shape[1] for _, _, shape, _ in caches)
    # where layers, rows and heads give too few blocks, the head dim is split
    pieces = -(-wanted_blocks(device) // max(blocks, 1))
    rows = []
    for address, element, shape, strides in caches:
        aligned = alignment(address, shape, strides, element)
        stride = strides[3] if shape[3] > 1 else 1
        outer = tuple(x * element for x in strides[:3])
        # a column may not be wider than a chunk, and a wide vector is four words
        most = NARROW_CHUNK.value // 4
        for offset, step, vectors, size in cut(shape[3], element, stride, aligned, pieces, most):
            rows.append((address + offset, *outer, step, shape[1], vectors, size))
    widest = [max((vectors for *_, vectors, size in rows if size == width), default=0) for width in WIDTHS]
    # a vector of 16 bytes is moved as four words
    padded = tuple(triton.next_power_of_2(n * (4 if i == 0 else 1)) if n else 0 for i, n in enumerate(widest))
    return StripTable(device_rows(rows, device), len(rows), max((row[5] for row in rows), default=1), padded)


def mask_table(masks: Sequence[Tensor], windows: Sequence[int], device: torch.device) -> MaskTable:
    """Masks ``[B, 1, Q, C]`` and their windows."""
    views = tuple((x.data_ptr(), x.dtype, x.shape, x.stride()) for x in masks)
    return _mask_table(views, tuple(windows), device)


@functools.lru_cache(_MOST_TABLES)
def _mask_table(masks: tuple, windows: tuple, device: torch.device) -> MaskTable:
    rows, aligned = [], True
    for (address, dtype, shape, strides), window in zip(masks, windows, strict=True):
        size = dtype.itemsize
        row, _, query, column = (stride * size for stride in strides)
        rows.append((address, row, query, column, shape[3], window, size, _hidden_bits(dtype)))
        aligned &= column == size and (address | row | query | shape[3] * size) % 16 == 0
    sizes = {row[6] for row in rows}
    return MaskTable(device_rows(rows, device), tuple(n in sizes for n in WIDTHS[1:]), aligned)


def device_rows(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """``[N, M]`` int64 on the device, copied there without waiting for it."""
    table = torch.tensor(rows, dtype=torch.int64)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def wanted_blocks(device: torch.device) -> int:
    """Blocks that keep every processor busy."""
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _hidden_bits(dtype: torch.dtype) -> int:
    """The smallest value of a mask's dtype as an integer of its size."""
    if dtype == torch.bool:
        return 0
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return int(torch.tensor(torch.finfo(dtype).min, dtype=dtype).view(integer))
