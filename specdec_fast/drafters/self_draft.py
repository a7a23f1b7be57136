"""Drafts from a subset of the target's own layers."""

from __future__ import annotations

import copy
import re

from torch import nn
from transformers import PreTrainedModel

from ..errors import InputError
from ..integrations import compat
from .model import ModelDrafter


class SelfDrafter(ModelDrafter):
    """A draft for any model without a second download: some of the target's layers, weights shared.

    Args:
        target: the target model.
        layers: indices of the layers to keep, ascending; at least one.

    Raises:
        InputError: no layers, or an index the target does not have.
    """

    def __init__(self, target: PreTrainedModel, layers: list[int]):
        super().__init__(layer_subset(target, layers))
        self.target = target

    @classmethod
    def from_spec(cls, target: PreTrainedModel, spec: str) -> SelfDrafter:
        """Build from text: ``0-13,15-29`` keeps these layers, ``~14,17`` keeps all but these."""
        return cls(target, parse_layers(spec, compat.text_config(target).num_hidden_layers))

    def check(self, target: PreTrainedModel) -> None:
        if target is not self.target:
            raise InputError("this SelfDrafter was made from another model than the target")
        super().check(target)


def parse_layers(spec: str, num_layers: int) -> list[int]:
    """Layer indices named by ``spec`` (see :meth:`SelfDrafter.from_spec`)."""
    named: set[int] = set()
    for part in spec.removeprefix("~").split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?", part)
        if not match:
            raise InputError(f"layers {spec!r}: {part!r} is neither an index nor a range such as 0-13")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < num_layers:
            raise InputError(f"layers {spec!r}: {part!r} is not within the model's layers 0-{num_layers - 1}")
        named.update(range(first, last + 1))
    return [i for i in range(num_layers) if i not in named] if spec.startswith("~") else sorted(named)


def layer_subset(model: PreTrainedModel, layers: list[int]) -> PreTrainedModel:
    """A model that runs only ``layers`` of ``model`` and shares every weight with it."""
    config = compat.text_config(model)
    if not layers or sorted(set(layers)) != list(layers) or layers[0] < 0 or layers[-1] >= config.num_hidden_layers:
        raise InputError(
            f"layers={layers}: need ascending indices of 1 to {config.num_hidden_layers} layers, from 0 on"
        )
    subset = _clone(model)
    subset.config = copy.deepcopy(model.config)
    own = compat.text_config(subset)
    own.num_hidden_layers = len(layers)
    if getattr(own, "layer_types", None):
        own.layer_types = [config.layer_types[i] for i in layers]
    stacks = [(m, name) for m in subset.modules() for name, child in m.named_children() if _is_stack(child, config)]
    if len(stacks) != 1:
        raise InputError(
            f"{type(model).__name__}: cannot tell which module holds its {config.num_hidden_layers} layers"
        )
    parent, name = stacks[0]
    setattr(parent, name, nn.ModuleList(getattr(parent, name)[i] for i in layers))
    for module in subset.modules():
        if hasattr(module, "config") and module is not subset:
            module.config = own
    for position, layer in enumerate(getattr(parent, name)):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = position
    return subset


def _is_stack(module: nn.Module, config) -> bool:
    return isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers


def _clone(module: nn.Module) -> nn.Module:
    """Copy the tree of modules; parameters and buffers stay the same tensors."""
    clone = copy.copy(module)
    clone._modules = {name: child and _clone(child) for name, child in module._modules.items()}
    return clone
