"""EQSPEC inside transformers: ``model.generate(..., custom_generate=specdec_fast.hf.eqspec(draft))``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from .decoding.acceptance import Acceptance
from .decoding.eqspec import EQSpec
from .drafters import Drafter
from .drafters.model import as_drafter
from .errors import InputError
from .integrations.generation_config import beyond_greedy, describe

_PLAIN_INPUTS = ("attention_mask", "cache_position", "logits_to_keep", "use_cache")


def eqspec(
    draft: Drafter | PreTrainedModel, *, num_draft_tokens: int = 5, acceptance: Acceptance | None = None
) -> Callable[..., Tensor | GenerateDecoderOnlyOutput]:
    """A decoding method for ``model.generate(custom_generate=...)``, for any batch size.

    transformers prepares inputs, limits and EOS ids as for its own methods, and gets its own result type back. Only
    greedy decoding is served: sampling, beams and every other way of generating, logits processors (a repetition
    penalty, say) and stopping criteria other than the generation config's length and EOS raise
    :class:`~specdec_fast.errors.InputError`, and so do inputs other than tokens and their mask (a soft prompt, say),
    position IDs of the caller's own and a cache that holds something. A cache that is passed stays empty.

    Pass no ``streamer``: transformers keeps it to itself, so it can be neither served nor refused. It gets the prompt
    and nothing more, and a reader of a ``TextIteratorStreamer`` waits for ever unless that has a ``timeout``. Tokens
    come as they are committed from :meth:`EXSpec.serve <specdec_fast.EXSpec.serve>`. An ``assistant_model`` is ignored
    likewise; the draft takes its place.

    Args:
        draft: a drafter or a draft model.
        num_draft_tokens: most drafts per row and round (K).
        acceptance: how drafts are judged; greedy by default.

    Example:
        >>> model.generate(**batch, max_new_tokens=64, do_sample=False, custom_generate=eqspec(NgramDrafter()))
    """
    drafter = as_drafter(draft)

    def decode(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        # a parameter of that name would take the mask away from transformers' own preparation
        attention_mask = model_kwargs.get("attention_mask")
        _refuse(logits_processor, stopping_criteria, generation_config)
        _refuse_inputs(model_kwargs, input_ids)
        decoder = _Hooked(model, drafter, num_draft_tokens=num_draft_tokens, acceptance=acceptance)
        eos = generation_config.eos_token_id
        result = decoder.generate(
            input_ids.to(model.device),
            None if attention_mask is None else attention_mask.to(model.device),
            max_new_tokens=generation_config.max_length - input_ids.shape[1],
            eos_token_id=[] if eos is None else eos,
            pad_token_id=generation_config.pad_token_id,
        )
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=result.sequences)
        return result.sequences

    return decode


class _Hooked(EQSpec):
    applies_generation_config = True


def _refuse(processors: LogitsProcessorList, criteria: StoppingCriteriaList, config: GenerationConfig) -> None:
    if config.do_sample:
        raise InputError("do_sample=True: only greedy decoding is supported; pass do_sample=False")
    if (config.num_beams or 1) > 1 or (config.num_return_sequences or 1) > 1:
        raise InputError("num_beams and num_return_sequences must be 1; only greedy decoding is supported")
    if config.output_scores or config.output_logits or config.output_attentions or config.output_hidden_states:
        raise InputError("output_scores, output_logits, output_attentions and output_hidden_states are not supported")
    asked = [describe({name: value}) for name, value in beyond_greedy(config).items()]
    asked += [type(x).__name__ for x in (*processors, *(x for x in criteria if not _repeats(config, x)))]
    if asked:
        raise InputError(
            f"{', '.join(asked)} cannot be applied; supported is greedy decoding up to the limits of the generation "
            f"config, max_length={config.max_length} and eos_token_id={config.eos_token_id}"
        )


def _repeats(config: GenerationConfig, criterion: StoppingCriteria) -> bool:
    """True if ``criterion`` asks for nothing but what ``config`` says; a caller's own takes the place of that."""
    if type(criterion) is MaxLengthCriteria:
        return criterion.max_length == config.max_length
    if type(criterion) is EosTokenCriteria and config.eos_token_id is not None:
        own, given = (torch.as_tensor(x, device="cpu").flatten() for x in (config.eos_token_id, criterion.eos_token_id))
        return set(own.tolist()) == set(given.tolist())
    return False


def _refuse_inputs(model_kwargs: dict[str, Any], input_ids: Tensor) -> None:
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    for name, value in model_kwargs.items():
        if name in ("cache", "past_key_values"):
            if value is not None and value.get_seq_length() > 0:
                raise InputError(f"{name} holds {value.get_seq_length()} tokens; only an empty cache is supported")
        elif name == "position_ids":
            own = (mask.cumsum(-1) - 1)[mask.bool()]
            if value is not None and not torch.equal(value.expand_as(mask)[mask.bool()], own):
                raise InputError("position_ids are not those of attention_mask; leave them out")
        elif name not in _PLAIN_INPUTS and value is not None and value is not False:
            raise InputError(f"{name} is no input that batch speculative decoding can pass on; leave it out")
