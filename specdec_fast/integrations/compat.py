"""The one place that knows how transformers models and versions differ (5.17 to 5.24)."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, DynamicCache, GenerationConfig, PreTrainedConfig, PreTrainedModel

from ..errors import InputError, UnsupportedModelError

_ATTENTION = ("sdpa", "eager")
_LAYER_TYPES = ("full_attention", "sliding_attention")
# names of sizes that matter once a text is longer than they are
_THRESHOLD = re.compile(r"(window|chunk|span|local_attention|floor_scale|original_max_position)(?!.*layers)")
# one lock for all models, because configs may be shared
_turn = threading.RLock()


@dataclass(frozen=True)
class ModelTraits:
    """Facts that a decoder needs to call a model.

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
    return _cache_name(_parameters(model))


def cache_name(function: Callable) -> str:
    """The same of a function of transformers."""
    return _cache_name(inspect.signature(function).parameters)


def _cache_name(parameters: Iterable[str]) -> str:
    return "cache" if "cache" in parameters else "past_key_values"


def _takes_logits_to_keep(model: PreTrainedModel) -> bool:
    return "logits_to_keep" in _parameters(model)


def _parameters(model: PreTrainedModel) -> Mapping[str, inspect.Parameter]:
    """Of forward, those included that a subclass passes on as ``**kwargs``."""
    found: dict[str, inspect.Parameter] = {}
    for kind in plain_class(model).__mro__:
        if "forward" in vars(kind):
            own = inspect.signature(vars(kind)["forward"]).parameters
            found = {**own, **found}
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values()):
                break
    return found


def model_traits(model: PreTrainedModel, layout: str | None = None) -> ModelTraits:
    """Read a model's traits, or raise :class:`UnsupportedModelError` naming why it cannot be served.

    With a ``layout`` (``"padded"`` or ``"ragged"``), also why that layout cannot serve it.
    """
    with _turn:
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
    kinds = set(getattr(text_config(model), "layer_types", None) or ())
    other = kinds - set(_LAYER_TYPES)
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder; a decoder-only causal LM is needed")
    if not model.can_generate():
        raise UnsupportedModelError(f"{name} cannot generate; load it with AutoModelForCausalLM")
    # a class that may keep a state is served where this model's layers are all attention
    if getattr(model, "_is_stateful", False) and (other or not kinds):
        raise UnsupportedModelError(
            f"{name} keeps a recurrent or state-space state, which cannot be rolled back row by row when drafts are "
            "rejected; only attention layers are supported"
        )
    if other:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(sorted(other))}; supported are {' and '.join(_LAYER_TYPES)}"
        )
    if not {"cache", "past_key_values"} & set(_parameters(model)):
        raise UnsupportedModelError(f"{name} takes no KV cache")
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
            "layout needs"
        )


_REFUSALS = {"padded": _refuse_maskless, "ragged": _refuse_fixed_attention}


def register_attention(name: str, function: Callable) -> None:
    """Make ``function`` known as an attention implementation that takes no mask: transformers then builds none."""
    AttentionInterface.register(name, function)


def attention_configs(model: PreTrainedModel) -> list:
    """Every config object that a module of ``model`` reads its attention implementation from."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in configs if hasattr(config, "_attn_implementation")}.values())


def turn() -> threading.RLock:
    """A lock to hold while a model runs with its own attention, which another thread may have replaced."""
    return _turn


@contextmanager
def attention_set(configs: list, name: str) -> Iterator[None]:
    """Run with another attention implementation, and put the former one back; one thread at a time."""
    with _turn:
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
    return _own_logits(model, text, keep, use_cache=False)


def incremental_logits(model: PreTrainedModel, text: torch.Tensor, prefix: int, keep: int) -> torch.Tensor:
    """The same ``[keep, V]`` through the model's own cache: ``prefix`` tokens first, the rest after them."""
    cache = {"use_cache": True, cache_argument(model): DynamicCache(config=model.config)}
    first, rest = text.split([prefix, len(text) - prefix])
    before = _own_logits(model, first, max(1, keep - len(rest)), **cache)
    return torch.cat([before, _own_logits(model, rest, len(rest), **cache)])[-keep:]


def _own_logits(model: PreTrainedModel, text: torch.Tensor, keep: int, **cache: Any) -> torch.Tensor:
    extra = {"logits_to_keep": keep} if _takes_logits_to_keep(model) else {}
    return model(input_ids=text[None], **cache, **extra).logits[0, -keep:]


def takes_4d_mask(model: PreTrainedModel, text: torch.Tensor) -> bool:
    """A forward over ``text`` runs with a 4D mask."""
    mask = torch.zeros(1, 1, len(text), len(text), dtype=model.dtype, device=text.device)
    masks = mask if len(window_of_kinds(model)) == 1 else dict.fromkeys(window_of_kinds(model), mask)
    try:
        model(input_ids=text[None], attention_mask=masks, use_cache=False)
    except Exception:
        return False
    return True


def refuse_autocast(device: torch.device) -> None:
    """Raise ``InputError`` under ``torch.autocast``, where KV does not have the dtype of the weights."""
    if torch.is_autocast_enabled(device.type):
        raise InputError(
            f"torch.autocast is on for {device.type}, and is not supported: the KV cache has the dtype of the weights; "
            "load the model in the dtype it is to run in, and generate outside of torch.autocast"
        )


def rope_switch(model: PreTrainedModel) -> int | None:
    """Tokens beyond which longrope turns all positions of a forward by other angles; None without longrope."""
    config = text_config(model)
    scaling = getattr(config, "rope_parameters", None) or {}
    kinds = [scaling, *(value for value in scaling.values() if isinstance(value, dict))]
    own = getattr(config, "original_max_position_embeddings", None)
    sizes = [kind.get("original_max_position_embeddings", own) for kind in kinds if kind.get("rope_type") == "longrope"]
    return min((size for size in sizes if size is not None), default=None)


def thresholds(config) -> Iterator[tuple[Any, str, tuple[int, ...]]]:
    """Sizes in a text config beyond which tokens are hidden or scaled, each with its holder and its name."""
    yield from _thresholds(config, vars(config))


def _thresholds(holder: Any, entries: Mapping[str, Any]) -> Iterator[tuple[Any, str, tuple[int, ...]]]:
    for name, value in entries.items():
        several = value if isinstance(value, (list, tuple)) else (value,)
        for part in several:
            if isinstance(part, PreTrainedConfig):
                yield from _thresholds(part, vars(part))
            elif isinstance(part, dict) and part.get("rope_type") != "longrope":
                yield from _thresholds(part, part)
        sizes = tuple(part for part in several if type(part) is int and part > 0)
        if sizes and _THRESHOLD.search(str(name)):
            yield holder, name, sizes


def sub_configs(config) -> list:
    """The configs that a composite config holds."""
    held = (getattr(config, name, None) for name in getattr(config, "sub_configs", ()))
    return [part for part in held if part is not None]


def new_model(model: PreTrainedModel, config, device: torch.device | str) -> PreTrainedModel:
    """A float32 model of ``model``'s class with random weights, for inference."""
    with torch.random.fork_rng(devices=[]), torch.device(device):
        # torch.manual_seed would seed GPUs as well
        torch.default_generator.manual_seed(0)
        return plain_class(model)._from_config(config, dtype=torch.float32).eval()


def plain_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """Class of a model, beneath what ``torch.compile`` or an adapter library wraps around it."""
    model = getattr(model, "_orig_mod", model)
    return type(model.get_base_model() if hasattr(model, "get_base_model") else model)


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
