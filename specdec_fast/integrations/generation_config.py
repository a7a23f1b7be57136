"""Things that ``model.generate`` does beyond plain greedy search over tokens: said or refused, never dropped."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, GenerationMixin, PreTrainedModel

from ..errors import UnsupportedModelError
from . import compat

# read only with do_sample=True, which counts by itself
_SAMPLING = {"temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
# read only by beam or assisted search, which count by themselves
_SEARCH = {
    *("early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty", "low_memory"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size"),
}
_LIMITS = {"max_length", "max_new_tokens", "eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id"}
_EXECUTION = {
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size"),
    *("compile_config", "disable_compile", "continuous_batching_config"),
}
_OUTPUT = {
    *("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states"),
    *("renormalize_logits", "transformers_version"),
}
_PLAIN = _SEARCH | _LIMITS | _EXECUTION | _OUTPUT
_NEUTRAL = {
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "guidance_scale"), 1),
    **dict.fromkeys(("num_beams", "num_return_sequences"), 1),
}


def beyond_greedy(config: GenerationConfig) -> dict[str, Any]:
    """Settings that may change the text of greedy search, with their values.

    Every attribute that the installed transformers knows counts unless it is listed here as harmless, so a new one is
    never missed.
    """
    defaults = vars(GenerationConfig()) | GenerationConfig._get_default_generation_params()
    harmless = _PLAIN if config.do_sample else _PLAIN | _SAMPLING
    values = {
        name: getattr(config, name, None) for name in defaults if name not in harmless and not name.startswith("_")
    }
    kept: dict[str, tuple[Any, ...]] = {name: (defaults[name], _NEUTRAL.get(name), [], {}) for name in values}
    return {name: value for name, value in values.items() if not _is_empty(value) and value not in kept[name]}


def describe(settings: dict[str, Any]) -> str:
    """``name=value``, comma-separated."""
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


def unapplied(model: PreTrainedModel) -> str | None:
    """A sentence that names the generation defaults of ``model`` that greedy decoding leaves out, if there are any."""
    settings = beyond_greedy(compat.generation_config(model))
    if not settings:
        return None
    return (
        f"the generation config of {type(model).__name__} sets {describe(settings)}: model.generate would apply that, "
        "here it is not applied and the text is that of plain greedy search"
    )


def refuse_own_inputs(model: PreTrainedModel) -> None:
    """Refuse a model that ``generate`` would feed anything but its tokens, such as a soft prompt.

    A class or an adapter that does so replaces ``prepare_inputs_for_generation``, which no decoder here calls. One that
    passes on what transformers' own gives for a prompt is served.
    """
    prepare = model.prepare_inputs_for_generation
    if getattr(prepare, "__func__", None) is GenerationMixin.prepare_inputs_for_generation:
        return
    name = f"{type(model).__name__}.prepare_inputs_for_generation"
    try:
        changed = _changed_inputs(model)
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} is overridden and fails for a prompt of tokens alone ({type(error).__name__}: {error}), so what "
            "generate would feed the model is unknown"
        ) from error
    if changed:
        raise UnsupportedModelError(
            f"{name} is overridden and changes {', '.join(changed)}: generate would feed the model more than its "
            "tokens, such as a soft prompt, which cannot be passed on"
        )


def _changed_inputs(model: PreTrainedModel) -> list[str]:
    """Inputs of a first forward that the model's own preparation adds or gives other values."""
    plain = GenerationMixin.prepare_inputs_for_generation
    cache_name = compat.cache_name(plain)
    ids = torch.tensor([[0, 1, 2]], device=model.device)
    cache = DynamicCache(config=model.config)
    given: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(3, device=model.device)[None],
        "is_first_iteration": True,
        "use_cache": True,
        "logits_to_keep": 1,
    }
    known = given | {"past_key_values": cache, "cache": cache} | plain(model, ids, **given, **{cache_name: cache})
    own = model.prepare_inputs_for_generation(ids, **given, **{cache_name: cache})
    changed = [name for name, value in own.items() if not _is_empty(value) and not _equal(value, known.get(name))]
    return changed + ["cache"] * (cache.get_seq_length() > 0)


def _is_empty(value: Any) -> bool:
    return value is None or value is False


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a is b or bool(a == b)
