"""Tiny random causal LMs whose greedy text is varied and sensitive to every position.

Default initialisation gives short loops that hide wrong position IDs, so the weights are sharpened:
wide projections, sharp attention, small embeddings.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    Glm4Config,
    Glm4ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 97
SLIDING_WINDOW = 6
FAMILIES = ("llama", "qwen3", "glm4", "gemma3")
# weight noise at which the draft agrees with about 0.7 of the greedy tokens
DRAFT_NOISE = {"llama": 0.025, "qwen3": 0.005, "glm4": 0.018, "gemma3": 0.003}

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "attn_implementation": "sdpa",
}
_GEMMA3 = {
    "num_hidden_layers": 4,
    "query_pre_attn_scalar": 16,
    "sliding_window": SLIDING_WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_BUILDERS: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": lambda **kw: LlamaForCausalLM(LlamaConfig(**kw)),
    "qwen3": lambda **kw: Qwen3ForCausalLM(Qwen3Config(**kw)),
    "glm4": lambda **kw: Glm4ForCausalLM(Glm4Config(**kw)),
    "gemma3": lambda **kw: Gemma3ForCausalLM(Gemma3TextConfig(**kw | _GEMMA3)),
}


def make_model(
    family: str,
    seed: int,
    dtype: torch.dtype = torch.float64,
    *,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
) -> PreTrainedModel:
    """A sharpened random model of one of ``FAMILIES``; equal arguments give equal weights."""
    tokens = {"eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
    model = _BUILDERS[family](**_COMMON | tokens).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            weight.data.normal_(std=_sharp_std(name), generator=generator)
        elif "q_norm" in name or "k_norm" in name:
            # gemma's norms multiply by 1 + weight
            weight.data.fill_(3.0 if family == "gemma3" else 4.0)
    return model


def _sharp_std(name: str) -> float:
    if "embed_tokens" in name:
        return 0.006
    return 0.24 if "self_attn" in name else 0.08


def make_draft(model: PreTrainedModel, noise: float, seed: int) -> PreTrainedModel:
    """A copy of ``model`` with noise of that share of each matrix's standard deviation."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for weight in draft.parameters():
        if weight.ndim == 2:
            jitter = torch.empty_like(weight).normal_(generator=generator)
            weight.data += noise * weight.std() * jitter
    return draft


def make_prompts(lengths: Sequence[int], seed: int, vocab: int = VOCAB_SIZE) -> list[list[int]]:
    """Random prompts of the given lengths, without the ids 0 to 2 (pad, bos, eos)."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``(input_ids, attention_mask)`` of shape ``[B, longest prompt]``."""
    width = max(map(len, prompts))
    input_ids = torch.tensor([[pad_id] * (width - len(p)) + list(p) for p in prompts])
    attention_mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return input_ids, attention_mask


_oracles: WeakKeyDictionary[PreTrainedModel, dict[tuple, list[int]]] = WeakKeyDictionary()


def greedy_oracle(
    model: PreTrainedModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    eos_token_id: int | list[int] | None = None,
) -> list[int]:
    """New tokens of the model's own greedy ``generate`` at batch 1; remembered per model."""
    known = _oracles.setdefault(model, {})
    key = (tuple(prompt), max_new_tokens, str(eos_token_id))
    if key not in known:
        config = GenerationConfig(
            max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=eos_token_id, pad_token_id=0
        )
        input_ids = torch.tensor([list(prompt)], device=model.device)
        # generate fills every unset field from the model's own generation config
        with mock.patch.object(model, "generation_config", GenerationConfig()):
            output = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config)
        known[key] = output[0, len(prompt) :].tolist()
    return list(known[key])
