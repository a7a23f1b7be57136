"""Settings of a generation config that go beyond plain greedy search."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, PreTrainedModel

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
    return {
        name: value
        for name, value in values.items()
        if value is not None and value is not False and value != defaults[name]
    }


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
