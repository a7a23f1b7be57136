"""Tensors in memory that is watched: every byte around and between their elements is compared too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

GUARD = 64
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
LAYOUTS = ("plain", "narrow", "heads_inside", "columns_inside", "strided", "paired")


class Arena:
    """Allocates tensors between guard bytes; equal calls on two arenas give equal bytes."""

    def __init__(self, seed: int = 0):
        self.flats: list[Tensor] = []
        self._generator = torch.Generator().manual_seed(seed)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor with a distinct value in every slot, as far as its dtype has that many."""
        element = torch.empty((), dtype=dtype).element_size()
        guard = GUARD // element
        count = torch.Size(shape).numel()
        if element == 1:
            flat = torch.randint(256, (count + 2 * guard,), dtype=torch.uint8, generator=self._generator)
        else:
            flat = torch.arange(count + 2 * guard, dtype=torch.int64).to(INTEGERS[element])
        self.flats.append(flat)
        return flat[guard : guard + count].view(dtype).view(*shape)

    def caches(self, layout: str, rows: int, heads: int, columns: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
        """One cache ``[B, H, C, D]``, or two that share their storage, in one of ``LAYOUTS``."""
        if layout == "plain":
            return [self.tensor((rows, heads, columns, dim), dtype)]
        if layout == "narrow":
            return [self.tensor((rows + 1, heads, columns + 5, dim), dtype)[:rows, :, 3 : 3 + columns]]
        if layout == "heads_inside":
            return [self.tensor((rows, columns, heads, dim), dtype).transpose(1, 2)]
        if layout == "columns_inside":
            return [self.tensor((rows, heads, dim, columns), dtype).transpose(2, 3)]
        if layout == "strided":
            return [self.tensor((rows, heads, columns, 2 * dim), dtype)[..., ::2]]
        both = self.tensor((rows, heads, columns, 2 * dim + 1), dtype)
        return [both[..., :dim], both[..., dim:]]

    def matrix(self, rows: int, columns: int, dtype: torch.dtype, transposed: bool) -> Tensor:
        return self.tensor((columns, rows), dtype).t() if transposed else self.tensor((rows, columns), dtype)


def assert_same_bytes(actual: Arena, expected: Arena) -> None:
    for a, e in zip(actual.flats, expected.flats, strict=True):
        if not torch.equal(a, e):
            where = (a != e).nonzero()[:, 0]
            raise AssertionError(f"{len(where)} of {len(a)} slots differ, the first at {where[0]}")
