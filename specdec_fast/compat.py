"""The one place that knows how transformers models and versions differ (5.17 to 5.24)."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, DynamicCache, GenerationConfig, PreTrainedModel

from .errors import InputError, UnsupportedModelError

_ATTENTION = ("sdpa", "eager")
_LAYER_TYPES = ("full_attention", "sliding_attention")
# models may share a config, so all of them take turns
_switched = threading.RLock()


@dataclass(frozen=True)
class ModelTraits:
    """What a decoder must know to call a model.

    Attributes:
        cache_argument: name of the forward argument that takes the cache.
        logits_to_keep: whether forward can skip logits nobody reads.
        windows: sliding window of each kind of attention mask the model takes, None for full attention.
        mask_per_kind: the model takes a dict of masks, one per kind, instead of one mask.
        max_position: largest position ID the model was made for.
    """

    cache_argument: str
    logits_to_keep: bool
    windows: dict[str, int | None]
    mask_per_kind: bool
    max_position: int


def require_model(name: str, model: Any) -> None:
    """Refuse anything but a model as the argument ``name``."""
    if not isinstance(model, torch.nn.Module):
        raise InputError(
            f"{name} is {model!r}; need a loaded model: AutoModelForCausalLM.from_pretrained and "
            "specdec_fast.models.load give one"
        )


def text_config(model: PreTrainedModel):
    return model.config.get_text_config(decoder=True)


def cache_argument(model: PreTrainedModel) -> str:
    """Name of the forward argument that takes the cache: ``cache`` from 5.24 on, ``past_key_values`` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _takes_logits_to_keep(model: PreTrainedModel) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def model_traits(model: PreTrainedModel, layout: str | None = None) -> ModelTraits:
    """Read a model's traits, or raise :class:`UnsupportedModelError` naming why it cannot be served.

    With a ``layout`` (``"padded"`` or ``"ragged"``), also why that layout cannot serve it.
    """
    _refuse_unsupported(model)
    if layout is not None:
        _REFUSALS[layout](model)
    config, windows = text_config(model), window_of_kinds(model)
    return ModelTraits(
        cache_argument=cache_argument(model),
        logits_to_keep=_takes_logits_to_keep(model),
        windows=windows,
        mask_per_kind=len(windows) > 1,
        max_position=(getattr(config, "max_position_embeddings", None) or 2**31) - 1,
    )


def window_of_kinds(model: PreTrainedModel) -> dict[str, int | None]:
    """Sliding window of each kind of attention mask the model takes, None for full attention."""
    config = text_config(model)
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    if "sliding_attention" in kinds:
        return {kind: window if kind == "sliding_attention" else None for kind in _LAYER_TYPES}
    return {"full_attention": None if kinds else window}


def _refuse_unsupported(model: PreTrainedModel) -> None:
    name = type(model).__name__
    config = text_config(model)
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder; a decoder-only causal LM is needed")
    if not model.can_generate():
        raise UnsupportedModelError(f"{name} cannot generate; load it with AutoModelForCausalLM")
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{name} keeps a recurrent or state-space state, which cannot be rolled back row by row when drafts are "
            "rejected; only attention layers are supported"
        )
    other = set(getattr(config, "layer_types", None) or ()) - set(_LAYER_TYPES)
    if other:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(sorted(other))}; supported are {' and '.join(_LAYER_TYPES)}"
        )
    if model.device.type == "meta":
        raise UnsupportedModelError(
            f"{name} has weights on the meta device: offloaded to CPU or disk, or never loaded; load it without offload"
        )


def _refuse_maskless(model: PreTrainedModel) -> None:
    attention = text_config(model)._attn_implementation
    if attention not in _ATTENTION:
        raise UnsupportedModelError(
            f"{type(model).__name__} uses attn_implementation={attention!r}, which takes no 4D mask; "
            f"call model.set_attn_implementation with one of {', '.join(_ATTENTION)}"
        )


def _refuse_fixed_attention(model: PreTrainedModel) -> None:
    if not model._can_set_attn_implementation():
        raise UnsupportedModelError(
            f"{type(model).__name__} does not take its attention function from AttentionInterface, which the ragged "
            "layout needs; use layout='padded'"
        )


_REFUSALS = {"padded": _refuse_maskless, "ragged": _refuse_fixed_attention}


def register_attention(name: str, function: Callable) -> None:
    """Make ``function`` known as an attention implementation that takes no mask: transformers then builds none."""
    AttentionInterface.register(name, function)


def attention_configs(model: PreTrainedModel) -> list:
    """Every config object that a module of ``model`` reads its attention implementation from."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in configs if hasattr(config, "_attn_implementation")}.values())


@contextmanager
def attention_set(configs: list, name: str) -> Iterator[None]:
    """Run with another attention implementation, and put the former one back; one thread at a time."""
    with _switched:
        former = [config._attn_implementation for config in configs]
        try:
            for config in configs:
                # the public setter would also reach sub-configs, whose own value is then lost
                config._attn_implementation_internal = name
            yield
        finally:
            for config, own in zip(configs, former, strict=True):
                config._attn_implementation_internal = own


def call(
    model: PreTrainedModel,
    traits: ModelTraits,
    cache,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    masks: dict[str, torch.Tensor] | None,
    keep: int | torch.Tensor,
) -> torch.Tensor:
    """Forward pass over ``input_ids`` ``[B, Q]``.

    Args:
        masks: 4D masks by kind, or ``None`` where attention takes none.
        keep: trailing columns whose logits are returned, 0 for all, or the indices of columns.
    """
    extra = {"logits_to_keep": keep} if traits.logits_to_keep else {}
    output = model(
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=masks if masks is None or traits.mask_per_kind else next(iter(masks.values())),
        use_cache=True,
        **{traits.cache_argument: cache},
        **extra,
    )
    if isinstance(keep, int):
        return output.logits[:, -keep:]
    return output.logits if traits.logits_to_keep else output.logits[:, keep]


def one_shot_logits(model: PreTrainedModel, text: torch.Tensor, keep: int) -> torch.Tensor:
    """The model's own logits ``[keep, V]`` of the last tokens of one row, in one forward without a cache."""
    extra = {"logits_to_keep": keep} if _takes_logits_to_keep(model) else {}
    return model(input_ids=text[None], use_cache=False, **extra).logits[0, -keep:]


def incremental_logits(model: PreTrainedModel, text: torch.Tensor, prefix: int) -> torch.Tensor:
    """The same ``[N, V]`` through the model's own cache: ``prefix`` tokens first, the rest after them."""
    cache = {cache_argument(model): DynamicCache(config=model.config)}
    parts = text.split([prefix, len(text) - prefix])
    return torch.cat([model(input_ids=ids[None], use_cache=True, **cache).logits[0] for ids in parts])


def rope_depends_on_batch(model: PreTrainedModel) -> bool:
    """Dynamic and longrope scaling read the largest position of the batch, so a batch differs from single rows."""
    scaling = getattr(text_config(model), "rope_parameters", None) or {}
    kinds = [scaling, *(value for value in scaling.values() if isinstance(value, dict))]
    return any(kind.get("rope_type") in ("dynamic", "longrope") for kind in kinds)


def window_sizes(model: PreTrainedModel) -> list[int]:
    """Every size in the config that may hide tokens beyond it, whatever its model calls it."""
    config = text_config(model).to_dict()
    return [v for k, v in config.items() if ("window" in k or "chunk" in k) and type(v) is int and v > 0]


def generation_config(model: PreTrainedModel) -> GenerationConfig:
    """Its own, or what transformers derives from the model's config."""
    return model.generation_config or GenerationConfig.from_model_config(model.config)


def eos_ids(model: PreTrainedModel, eos_token_id: int | Iterable[int] | torch.Tensor | None) -> list[int]:
    """EOS ids as a list; ``None`` means the model's generation config."""
    if eos_token_id is None:
        eos_token_id = generation_config(model).eos_token_id
    if eos_token_id is None:
        return []
    given = eos_token_id.tolist() if isinstance(eos_token_id, torch.Tensor) else eos_token_id
    ids: list[Any] = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    if not all(type(i) is int and 0 <= i < 2**63 for i in ids):
        raise InputError(f"eos_token_id={eos_token_id!r}: need a token id, or several, as integers of at least 0")
    return ids


def pad_id(model: PreTrainedModel, pad_token_id: int | None, stop_ids: list[int]) -> int:
    """The pad id to write after a row's end: the given one, the model's, an EOS id, or 0."""
    if pad_token_id is None:
        pad_token_id = generation_config(model).pad_token_id
    if pad_token_id is None:
        pad_token_id = stop_ids[0] if stop_ids else 0
    return int(pad_token_id)
