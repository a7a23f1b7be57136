"""Models, prompts and settings as transformers users hand them over: served, or refused with what to do."""

from __future__ import annotations

import pytest
import torch
from accelerate import cpu_offload
from tiny_models import greedy_oracle, left_pad, make_draft, make_model, make_prompts
from transformers import BatchEncoding

from specdec_fast import EQSpec, EXSpec, ModelDrafter, NgramDrafter, hf
from specdec_fast.errors import InputError, UnsupportedModelError
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


TEXTS = ["Once upon a time", "def add(a, b):"]
TOKENIZE = r"tokenizer\(prompts, return_tensors='pt', padding=True, padding_side='left'\)"
NO_TENSORS = {
    "a string": (TEXTS[0], f"input_ids is a str.*{TOKENIZE}"),
    "strings": (TEXTS, f"input_ids is a list.*{TOKENIZE}"),
    "lists of ids": ([[5, 6], [7, 8]], f"input_ids is a list.*{TOKENIZE}"),
    "a tokenizer's batch": (BatchEncoding({"input_ids": BATCH[0]}), f"input_ids is a BatchEncoding.*{TOKENIZE}"),
    "nothing": (None, f"input_ids is a NoneType.*{TOKENIZE}"),
}


@pytest.mark.parametrize(("prompts", "message"), NO_TENSORS.values(), ids=NO_TENSORS)
def test_prompts_that_are_no_tensor_are_refused_with_what_to_do(prompts, message):
    with pytest.raises(InputError, match=message):
        EQSpec(make_model("llama", seed=2), NgramDrafter()).generate(prompts, max_new_tokens=NEW)


def test_a_mask_that_is_no_tensor_is_refused():
    decoder = EQSpec(make_model("llama", seed=2), NgramDrafter())
    with pytest.raises(InputError, match=r"attention_mask is a list; need a tensor"):
        decoder.generate(BATCH[0], BATCH[1].tolist(), max_new_tokens=NEW)


def test_right_padding_is_refused_with_what_to_do():
    model, message = make_model("llama", seed=2), "row 0 of attention_mask is not left-padded.*padding_side='left'"
    ids, mask = (x.flip(1) for x in BATCH)
    with pytest.raises(InputError, match=message):
        EQSpec(model, NgramDrafter()).generate(ids, mask, max_new_tokens=NEW)
    with pytest.raises(InputError, match=message):
        model.generate(ids, attention_mask=mask, max_new_tokens=NEW, custom_generate=hf.eqspec(NgramDrafter()))


def test_strings_are_refused_by_exspec_with_what_to_do():
    decoder = EXSpec(make_model("llama", seed=2), NgramDrafter())
    for row in decoder.generate_all(TEXTS, max_new_tokens=NEW):
        assert row.error and "a prompt is of type str" in row.error and "tokenizer(prompt)['input_ids']" in row.error
    batch = BatchEncoding({"input_ids": PROMPTS})
    for prompts, name in ((TEXTS[0], "str"), (batch, "BatchEncoding")):
        with pytest.raises(InputError, match=rf"prompts is of type {name}.*tokenizer\(prompt\)\['input_ids'\]"):
            decoder.generate(prompts, max_new_tokens=NEW)


NO_MODELS = {
    "a name": ("ngram", r"draft is 'ngram'; need a Drafter, such as NgramDrafter\(\), or a loaded model"),
    "a class": (NgramDrafter, r"draft is <class .*NgramDrafter'>; need a Drafter, such as NgramDrafter\(\)"),
    "nothing": (None, r"draft is None; need a Drafter"),
}


@pytest.mark.parametrize(("draft", "message"), NO_MODELS.values(), ids=NO_MODELS)
def test_a_draft_that_is_no_drafter_is_refused_with_what_to_do(draft, message):
    model = make_model("llama", seed=2)
    for call in (EQSpec, EXSpec, lambda _, draft: hf.eqspec(draft)):
        with pytest.raises(InputError, match=message):
            call(model, draft)


def test_a_model_by_name_is_refused_with_what_to_do():
    message = r"is 'smollm2'; need a loaded model.*specdec_fast\.models\.load"
    for kind in (EQSpec, EXSpec):
        with pytest.raises(InputError, match=f"target {message}"):
            kind("smollm2", NgramDrafter())
    with pytest.raises(InputError, match=f"model {message}"):
        ModelDrafter("smollm2")
