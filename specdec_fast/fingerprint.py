"""The state of a model that a verdict about it holds for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def fingerprint(model: nn.Module) -> int:
    """A number that changes with the modules of a model, their modes and settings, and any write to its weights."""
    modules = tuple((id(type(module)), _settings(module)) for module in model.modules())
    weights = tuple((weight.data_ptr(), weight.dtype, _version(weight)) for weight in model.parameters())
    return hash((modules, weights))


def _settings(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Attributes by value where they are plain: training mode, dropout, windows, the adapters in use."""
    return tuple((name, _plain(value)) for name, value in vars(module).items())


def _plain(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    return id(value)


def _version(weight: torch.Tensor) -> int:
    return -1 if weight.is_inference() else weight._version
