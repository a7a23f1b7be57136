"""The state of a model that a verdict about it holds for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def fingerprint(model: nn.Module) -> int:
    """A number that changes with the modules, modes, settings and hooks of a model, and with writes to its weights.

    Writes that autograd does not count, through ``weight.data``, are not seen, nor are forward pre-hooks, which
    observers of a forward register.
    """
    modules = tuple((id(type(module)), _settings(module)) for module in model.modules())
    weights = tuple((weight.data_ptr(), weight.dtype, _version(weight)) for weight in model.parameters())
    return hash((modules, weights))


def _settings(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Attributes by value where they are plain: training mode, dropout, windows, the adapters in use, hooks."""
    own = vars(module).items()
    return tuple((name, _plain(value)) for name, value in own if not name.startswith("_forward_pre_hooks"))


def _plain(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    if isinstance(value, (set, frozenset)):
        return frozenset(map(_plain, value))
    if isinstance(value, dict):
        return tuple((_plain(key), _plain(content)) for key, content in value.items())
    return id(value)


def _version(weight: torch.Tensor) -> int:
    return -1 if weight.is_inference() else weight._version
