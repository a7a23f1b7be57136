"""Options that a record asks for itself: none is served, so what would change its text is refused."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from ..errors import InputError

_LIMITS = ("max_tokens", "max_new_tokens", "max_completion_tokens", "max_output_tokens", "max_length")
_CHAT = ("system", "history")
_UNSET: tuple[Any, ...] = (False, "", [], {})
# by the names of transformers, OpenAI and vLLM: the values that leave greedy text as it is
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys((*_LIMITS, "seed"), ()),
    **dict.fromkeys(_CHAT, _UNSET),
    **dict.fromkeys(("temperature", "min_p", "presence_penalty", "frequency_penalty"), (0,)),
    **dict.fromkeys(("min_tokens", "min_new_tokens", "min_length", "no_repeat_ngram_size", "top_logprobs"), (0,)),
    **dict.fromkeys(("n", "best_of", "num_return_sequences", "num_beams", "beam_width"), (1,)),
    **dict.fromkeys(("top_p", "typical_p", "repetition_penalty", "length_penalty"), (1,)),
    "top_k": (-1, 0, 1),
    **dict.fromkeys(("do_sample", "use_beam_search", "ignore_eos", "logprobs", "prompt_logprobs", "echo"), _UNSET),
    **dict.fromkeys(("stop", "stop_strings", "stop_sequences", "stop_token_ids", "eos_token_id"), _UNSET),
    **dict.fromkeys(("bad_words", "bad_words_ids", "suppress_tokens", "logit_bias", "suffix"), _UNSET),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), _UNSET),
    **dict.fromkeys(("tools", "functions", "chat_template", "chat_template_kwargs", "reasoning_effort"), _UNSET),
    **dict.fromkeys(("sampling_params", "generation_config", "parameters", "extra_body"), _UNSET),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "add_generation_prompt": (True,),
}


def refuse_options(fields: dict[str, Any], where: str) -> None:
    """``InputError`` for the first option of ``fields`` that would have to be served for this prompt alone."""
    for name, value in fields.items():
        if name in _NEUTRAL and value is not None and value not in _NEUTRAL[name]:
            given = textwrap.shorten(json.dumps(value), 60)
            raise InputError(f"{where}: {name} {given} is not served per prompt: {_advice(name)}")


def _advice(name: str) -> str:
    if name in _LIMITS:
        return "leave it out; --max-new-tokens sets the limit of all prompts"
    if name in _CHAT:
        return "make it part of messages"
    return "leave it out; decoding is greedy, without options of its own"
