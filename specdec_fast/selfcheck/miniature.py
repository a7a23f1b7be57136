"""A small float32 model of another's architecture, in which a wrong mask or position cannot hide behind rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from ..integrations import compat

THRESHOLD = 8
"""Tokens at which windows and the like take effect in a miniature."""
_MOST_PARAMETERS = 400_000_000
_SIZES = {
    "vocab_size": 128, "vocab_size_per_layer_input": 128, "intermediate_size": 64, "moe_intermediate_size": 32,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "hidden_size": 64, "num_attention_heads": 4, "rotary_dim": 8,
}  # fmt: skip
_WIDTHS = ("hidden_size", "num_attention_heads", "rotary_dim")
_FULL_WIDTH = {name: size for name, size in _SIZES.items() if name not in _WIDTHS}
# a class may use the number of a layer, as every second one being local
_MOST_LAYERS = 12
# sizes, whether heads keep theirs, most layers; a class may derive anything from them, so the first that runs is taken
_ATTEMPTS = (
    (_SIZES | {"head_dim": 16}, False, _MOST_LAYERS),
    (_SIZES, True, _MOST_LAYERS),
    (_SIZES, False, _MOST_LAYERS),
    (_FULL_WIDTH, False, 1),
    (_SIZES, False, None),
)
_LAYER_COUNTS = ("num_hidden_layers", "depth")


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
    for sizes, keeps_heads, most_layers in _ATTEMPTS:
        try:
            config = copy.deepcopy(model.config)
            if keeps_heads:
                _fix_head_dim(config.get_text_config(decoder=True))
            _shrink(config, sizes, most_layers, longest)
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


def _fix_head_dim(text) -> None:
    """Write down what follows from other sizes: the factors of RoPE may be made for it."""
    width, heads = _size(text, "hidden_size"), _size(text, "num_attention_heads")
    if width and heads and not _size(text, "head_dim"):
        text.head_dim = width // heads


def _shrink(config, sizes: dict[str, int], most_layers: int | None, longest: int) -> None:
    text = config.get_text_config(decoder=True)
    if most_layers is not None:
        for part in {id(part): part for part in (text, *compat.sub_configs(config))}.values():
            _drop_layers(part, most_layers if part is text else 1)
    heads, kv_heads = (_size(text, name) for name in ("num_attention_heads", "num_key_value_heads"))
    if heads and kv_heads and "num_attention_heads" in sizes:
        sizes = sizes | {"num_key_value_heads": sizes["num_attention_heads"] // (2 if kv_heads < heads else 1)}
    for name, size in sizes.items():
        if (_size(text, name) or 0) > size:
            setattr(text, name, size)
    for name, value in vars(text).items():
        if name.endswith("_token_id") and type(value) is int and value >= text.vocab_size:
            setattr(text, name, text.vocab_size - 1)
    for holder, name, _ in list(compat.thresholds(text)):
        entries = holder if isinstance(holder, dict) else vars(holder)
        entries[name] = _within(entries[name], longest)


def _size(config, name: str) -> int | None:
    try:
        size = getattr(config, name, None)
    except Exception:
        # a size that every layer has for itself
        return None
    return size if type(size) is int else None


def _within(value: Any, longest: int) -> Any:
    """Sizes that texts of ``longest`` tokens reach, one or several, made to take effect after a few tokens."""
    if isinstance(value, (list, tuple)):
        return type(value)(_within(part, longest) for part in value)
    return min(value, THRESHOLD) if type(value) is int and value < longest else value


def _drop_layers(config, most: int) -> None:
    """Keep the first ``most`` layers, the first of each kind, and the last."""
    name, count = next(((name, n) for name in _LAYER_COUNTS if (n := _size(config, name))), (None, 0))
    if name is None:
        return
    kinds = getattr(config, "layer_types", None) or [None] * count
    kept = sorted({kinds.index(kind) for kind in kinds} | {*range(min(most, count)), count - 1})
    for key, value in vars(config).items():
        if isinstance(value, (list, tuple)) and len(value) == count:
            setattr(config, key, type(value)(value[i] for i in kept))
    setattr(config, name, len(kept))


def _sharpen(model: PreTrainedModel) -> None:
    """Draw weights under which attention is far from uniform, else masks and positions would hardly matter."""
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.ndim >= 2:
            weight.copy_(torch.randn(weight.shape, generator=generator, device="cpu") * 1.6 * weight.shape[-1] ** -0.5)
