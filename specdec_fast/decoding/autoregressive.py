"""The baseline: transformers' own batched greedy decoding, reported like a speculative run."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from ..errors import UnappliedSettingsWarning
from ..integrations.generation_config import unapplied
from ..result import GenerationResult, GenerationStats, RowResult


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    max_new_tokens: int,
    eos_token_id: list[int],
    pad_token_id: int,
    on_round: Callable[[GenerationStats], None] | None = None,
    on_finish: Callable[[RowResult], None] | None = None,
) -> GenerationResult:
    """Greedy ``model.generate`` of ``input_ids`` ``[B, P]``; the callbacks are called at the end.

    Args, result and callbacks are those of ``EQSpec.generate``. A round is one forward pass and all of its time is
    counted as ``verify``.
    """
    config = GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=eos_token_id or None, pad_token_id=pad_token_id
    )
    began = time.perf_counter()
    with no_generation_defaults(model), torch.inference_mode():
        sequences = model.generate(input_ids, attention_mask=attention_mask, generation_config=config)
    new = sequences[:, input_ids.shape[1] :].tolist()
    seconds = time.perf_counter() - began
    lengths = attention_mask.sum(1).tolist()
    rows = [
        new_row(i, length, tokens, eos_token_id) for i, (length, tokens) in enumerate(zip(lengths, new, strict=True))
    ]
    stats = GenerationStats(tokens=sum(len(row.token_ids) for row in rows), seconds=seconds, rounds=len(new[0]))
    stats.stage_seconds["verify"] = seconds
    for row in rows:
        if on_finish:
            on_finish(row)
    if on_round:
        on_round(stats)
    return GenerationResult(sequences, rows, stats)


@contextlib.contextmanager
def no_generation_defaults(model: PreTrainedModel) -> Iterator[None]:
    """Hide the model's generation config: ``generate`` fills a given one from it, a repetition penalty included."""
    if text := unapplied(model):
        warnings.warn(text, UnappliedSettingsWarning, stacklevel=4)
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


def new_row(index: int, prompt_length: int, tokens: list[int], eos_ids: list[int]) -> RowResult:
    """A row from its new tokens, cut after the first EOS."""
    stop = next((i for i, token in enumerate(tokens) if token in eos_ids), None)
    if stop is None:
        return RowResult(index, prompt_length, tokens, "length", rounds=len(tokens))
    return RowResult(index, prompt_length, tokens[: stop + 1], "eos", rounds=stop + 1)
