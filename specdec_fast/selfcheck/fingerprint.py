"""The state of a model that a verdict about it holds for."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

# an attribute of a module, by its place, or of a class
Key = tuple[int | type, str]
Fingerprint = dict[Key, Hashable]

# of nn.Module's own attributes, those that no forward reads
_UNREAD = frozenset(name for name in vars(nn.Module()) if "backward" in name or "state_dict" in name)
_OWN = frozenset({*vars(nn.Module()), "settings", "class"} - {"_buffers"})
_DEEPEST = 6
# unlike an id, a number is never used again
_numbers = WeakIdKeyDictionary()
_next_number = count()


def fingerprint(model: nn.Module) -> Fingerprint:
    """Classes, configs, modes, settings, hooks, adapters, weights and buffers of a model, by module and attribute.

    It changes with every write to a weight, except one through ``weight.data``, which PyTorch does not count.
    """
    modules = list(model.modules())
    state: Fingerprint = {
        (place, name): _value(content)
        for place, module in enumerate(modules)
        for name, content in vars(module).items()
        if name not in _UNREAD and (not isinstance(content, (dict, set)) or content)
    }
    state |= {(place, "class"): _number(type(module)) for place, module in enumerate(modules)}
    configs = {
        id(own["config"]): (place, own["config"]) for place, own in enumerate(map(vars, modules)) if "config" in own
    }
    state |= {(place, "settings"): _value(vars(config)) for place, config in configs.values()}
    kinds = {kind for module in modules for kind in type(module).__mro__ if issubclass(kind, nn.Module)}
    state |= {(kind, name): id(content) for kind in kinds - {nn.Module} for name, content in vars(kind).items()}
    return state


def differences(a: Fingerprint, b: Fingerprint) -> set[Key]:
    """The attributes in which two states differ."""
    return {key for key, _ in a.items() ^ b.items()}


def can_be_a_counter(key: Key) -> bool:
    """The attribute is one that a model may change whenever it runs, none of those that every module has."""
    return key[1] not in _OWN


def _value(content: Any, depth: int = 0) -> Hashable:
    """Plain values as they are; of others, a number that no other object ever had."""
    if isinstance(content, (bool, int, float, str, type(None))):
        return content
    if isinstance(content, torch.Tensor):
        return _number(content), content.data_ptr(), -1 if content.is_inference() else content._version
    if depth == _DEEPEST:
        return _number(content)
    if isinstance(content, (list, tuple)):
        return tuple(_value(x, depth + 1) for x in content)
    if isinstance(content, (set, frozenset)):
        return frozenset(_value(x, depth + 1) for x in content)
    if isinstance(content, dict):
        return tuple((_value(key, depth + 1), _value(x, depth + 1)) for key, x in content.items())
    return _number(content)


def _number(content: Any) -> int:
    try:
        return _numbers.setdefault(content, next(_next_number))
    except TypeError:
        # cannot be referred to weakly
        return id(content)
