"""Operator arguments as memory: copied with their storages, compared byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def tensors(arguments: Any) -> Iterator[Tensor]:
    """Every tensor among the arguments, lists included."""
    if isinstance(arguments, Tensor):
        yield arguments
    elif isinstance(arguments, (list, tuple)):
        for argument in arguments:
            yield from tensors(argument)


def storages(arguments: Any) -> dict[int, Tensor]:
    """Address to bytes of every allocation behind the arguments."""
    found = {}
    for tensor in tensors(arguments):
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    return found


def duplicate(arguments: Any, device: str | torch.device = "cpu") -> Any:
    """The same arguments over copies of their storages; views of one storage stay views of one storage."""
    copies = {address: data.clone().to(device) for address, data in storages(arguments).items()}

    def copy(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(copy(item) for item in value)
        if not isinstance(value, Tensor) or not value.untyped_storage().nbytes():
            return value
        storage = copies[value.untyped_storage().data_ptr()].untyped_storage()
        new = torch.empty(0, dtype=value.dtype, device=device)
        return new.set_(storage, value.storage_offset(), value.shape, value.stride())

    return copy(arguments)


def assert_same_memory(got: Any, want: Any) -> None:
    """Every byte of every allocation is equal, those outside of the tensors included."""
    for i, (a, b) in enumerate(zip(storages(got).values(), storages(want).values(), strict=True)):
        differ = (a.cpu() != b.cpu()).nonzero()
        assert not len(differ), f"allocation {i}: {len(differ)} of {len(a)} bytes differ, first at {int(differ[0])}"
