"""A small float32 model of another's architecture, in which a wrong mask or position cannot hide behind rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from . import compat

THRESHOLD = 8
"""Tokens at which windows and the like take effect in a miniature."""
_MOST_PARAMETERS = 100_000_000
_SIZES = {
    "vocab_size": 128, "vocab_size_per_layer_input": 128, "intermediate_size": 64, "moe_intermediate_size": 32,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "hidden_size": 64, "num_attention_heads": 4, "rotary_dim": 8,
}  # fmt: skip
# sizes, and whether layers are left out: what a model derives from its sizes is its own affair, so the first that runs
_WIDTHS = ("hidden_size", "num_attention_heads", "rotary_dim")
_FULL_WIDTH = {name: size for name, size in _SIZES.items() if name not in _WIDTHS}
_ATTEMPTS = ((_SIZES | {"head_dim": 16}, True), (_SIZES, True), (_FULL_WIDTH, True), (_SIZES, False))


@torch.no_grad()
def build_miniature(
    model: PreTrainedModel, longest: int, runs: Callable[[PreTrainedModel], bool]
) -> PreTrainedModel | None:
    """A model of the same class and settings with random weights, or ``None`` if the class cannot be built that small.

    Args:
        longest: tokens of the longest text. Windows and other sizes beyond which tokens are hidden or scaled take
            effect after a few tokens if such a text reaches them.
        runs: tells whether a candidate can be used.
    """
    for sizes, fewer_layers in _ATTEMPTS:
        try:
            config = copy.deepcopy(model.config)
            _shrink(config, sizes, fewer_layers, longest)
            if compat.new_model(model, config, "meta").num_parameters() > _MOST_PARAMETERS:
                continue
            small = compat.new_model(model, config, "cpu").to(model.device)
            _sharpen(small)
            if runs(small):
                return small
        except torch.OutOfMemoryError:
            raise
        except Exception:
            # a size that this class cannot have
            continue
    return None


def _shrink(config, sizes: dict[str, int], fewer_layers: bool, longest: int) -> None:
    text = config.get_text_config(decoder=True)
    if fewer_layers:
        for part in {id(part): part for part in (text, *compat.sub_configs(config))}.values():
            _drop_layers(part)
    heads, kv_heads = (_size(text, name) for name in ("num_attention_heads", "num_key_value_heads"))
    if heads and kv_heads and "num_attention_heads" in sizes:
        sizes = sizes | {"num_key_value_heads": sizes["num_attention_heads"] // (2 if kv_heads < heads else 1)}
    for name, size in sizes.items():
        if (_size(text, name) or 0) > size:
            setattr(text, name, size)
    for name, value in vars(text).items():
        if name.endswith("_token_id") and type(value) is int and value >= text.vocab_size:
            setattr(text, name, text.vocab_size - 1)
    for holder, name, size in list(compat.thresholds(text)):
        if size < longest:
            _assign(holder, name, min(size, THRESHOLD))


def _size(config, name: str) -> int | None:
    try:
        size = getattr(config, name, None)
    except Exception:
        # a size that every layer has for itself
        return None
    return size if type(size) is int else None


def _assign(holder: Any, name: str, value: int) -> None:
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)


def _drop_layers(config) -> None:
    """Keep the first layer of each kind, and the last."""
    count = _size(config, "num_hidden_layers")
    if count is None:
        return
    kinds = getattr(config, "layer_types", None) or [None] * count
    kept = sorted({kinds.index(kind) for kind in kinds} | {0, count - 1})
    for name, value in vars(config).items():
        if isinstance(value, (list, tuple)) and len(value) == count:
            setattr(config, name, type(value)(value[i] for i in kept))
    config.num_hidden_layers = len(kept)


def _sharpen(model: PreTrainedModel) -> None:
    """Draw weights under which attention is far from uniform, else masks and positions would hardly matter."""
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.ndim >= 2:
            weight.copy_(torch.randn(weight.shape, generator=generator, device="cpu") * 1.6 * weight.shape[-1] ** -0.5)
