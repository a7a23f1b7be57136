"""Models, prompts and settings as transformers users hand them over: served, or refused with what to do."""

from __future__ import annotations

import pytest
import torch
from accelerate import cpu_offload
from tiny_models import greedy_oracle, left_pad, make_draft, make_model, make_prompts

from specdec_fast import EQSpec, EXSpec, ModelDrafter, NgramDrafter, hf
from specdec_fast.errors import UnsupportedModelError
from specdec_fast.layouts import LAYOUTS

PROMPTS = make_prompts([7, 4, 9], seed=5)
BATCH = left_pad(PROMPTS, 0)
NEW = 12


def decode(kind, model, draft, layout="ragged", eos_token_id=()):
    """New tokens of every row of ``PROMPTS``."""
    decoder = kind(model, draft, layout=layout)
    if kind is EXSpec:
        rows = decoder.generate_all(PROMPTS, max_new_tokens=NEW, eos_token_id=eos_token_id)
    else:
        rows = decoder.generate(*BATCH, max_new_tokens=NEW, eos_token_id=eos_token_id).rows
    return [row.token_ids for row in rows]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [EQSpec, EXSpec])
@pytest.mark.parametrize("drafter", [lambda _: NgramDrafter(), lambda model: ModelDrafter(make_draft(model, 0.02, 3))])
def test_a_default_device_of_the_caller_is_not_the_models(kind, layout, drafter):
    model = make_model("llama", seed=2)
    draft, want = drafter(model), [greedy_oracle(model, prompt, NEW) for prompt in PROMPTS]
    # nothing can be read from there, so a tensor that strays shows
    with torch.device("meta"):
        assert decode(kind, model, draft, layout) == want


@pytest.mark.parametrize("kind", [EQSpec, EXSpec])
def test_a_model_without_a_generation_config_ends_rows_at_the_eos_of_its_config(kind):
    model = make_model("llama", seed=2)
    eos = greedy_oracle(model, PROMPTS[0], NEW)[3]
    model.config.eos_token_id, model.generation_config = eos, None
    want = [greedy_oracle(model, prompt, NEW, eos) for prompt in PROMPTS]
    assert decode(kind, model, NgramDrafter(), eos_token_id=None) == want
    assert model.generation_config is None


def test_offloaded_weights_are_refused_by_name():
    model = cpu_offload(make_model("llama", seed=2), torch.device("cpu"))
    calls = {
        "EQSpec": lambda: EQSpec(model, NgramDrafter()),
        "EXSpec": lambda: EXSpec(model, NgramDrafter()),
        "draft": lambda: EQSpec(make_model("llama", seed=2), model),
        "hook": lambda: model.generate(BATCH[0], max_new_tokens=4, custom_generate=hf.eqspec(NgramDrafter())),
    }
    for call in calls.values():
        with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM has weights on the meta device.*offload"):
            call()
