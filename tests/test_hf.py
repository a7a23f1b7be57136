"""``model.generate(custom_generate=...)`` gives what transformers' own greedy search gives, row by row."""

import pytest
import torch
from tiny_models import DRAFT_NOISE, greedy_oracle, left_pad, make_draft, make_model, make_prompts
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    LlamaForCausalLM,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from specdec_fast import EQSpec, EXSpec, ModelDrafter, NgramDrafter, hf
from specdec_fast.errors import InputError, UnsupportedModelError
from specdec_fast.integrations import compat


def generate(model, prompts, draft, **options):
    input_ids, attention_mask = left_pad(prompts, 0)
    defaults = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    return model.generate(
        input_ids, attention_mask=attention_mask, custom_generate=hf.eqspec(draft), **defaults | options
    )


@pytest.mark.parametrize("eos", [None, 11, [11, 12, 13]])
@pytest.mark.parametrize("lengths", [[5], [3, 9, 1, 6]])
def test_rows_equal_greedy_search(lengths, eos):
    model = make_model("llama", seed=2)
    prompts = make_prompts(lengths, seed=5)
    drafter = ModelDrafter(make_draft(model, DRAFT_NOISE["llama"], 3))
    out = generate(model, prompts, drafter, eos_token_id=eos)
    for row, prompt in zip(out.tolist(), prompts, strict=True):
        want = greedy_oracle(model, prompt, 20, eos)
        new = row[max(lengths) :]
        assert new[: len(want)] == want and set(new[len(want) :]) <= {0}


def test_a_dict_is_returned_when_asked_for():
    model = make_model("llama", seed=2)
    prompts = make_prompts([4, 2], seed=5)
    out = generate(model, prompts, NgramDrafter(), return_dict_in_generate=True)
    assert torch.equal(out.sequences, generate(model, prompts, NgramDrafter()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"do_sample": True}, "do_sample=True"),
        ({"num_beams": 2}, "num_beams"),
        ({"repetition_penalty": 1.5}, "RepetitionPenalty"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
        ({"max_time": 10.0}, "MaxTimeCriteria"),
        ({"position_ids": torch.tensor([[3, 4, 5, 6]])}, "position_ids"),
        ({"inputs_embeds": torch.zeros(1, 4, 64, dtype=torch.float64)}, "inputs_embeds"),
    ],
)
def test_what_greedy_cannot_honour_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        generate(make_model("llama", seed=2), make_prompts([4], seed=5), NgramDrafter(), **options)


class Shorter(MaxLengthCriteria):
    """Ends a row in a way of its own."""


@pytest.mark.parametrize(
    ("criterion", "message"),
    [
        (MaxLengthCriteria(18), r"MaxLengthCriteria.*max_length=24"),
        (EosTokenCriteria(11), r"EosTokenCriteria.*eos_token_id=\[5, 6\]"),
        (EosTokenCriteria([5, 6, 7]), r"EosTokenCriteria"),
        (Shorter(24), r"Shorter"),
    ],
)
def test_a_limit_of_the_callers_own_is_refused(criterion, message):
    options = {"eos_token_id": [5, 6], "stopping_criteria": StoppingCriteriaList([criterion])}
    with pytest.raises(InputError, match=message):
        generate(make_model("llama", seed=2), make_prompts([4], seed=5), NgramDrafter(), **options)


def test_a_limit_that_says_what_the_generation_config_says_is_served():
    model, prompt = make_model("llama", seed=2), make_prompts([4], seed=5)
    criteria = StoppingCriteriaList([MaxLengthCriteria(24), EosTokenCriteria([6, 5])])
    want = generate(model, prompt, NgramDrafter(), eos_token_id=[5, 6])
    for eos in ([5, 6], torch.tensor([5, 6])):
        out = generate(model, prompt, NgramDrafter(), eos_token_id=eos, stopping_criteria=criteria)
        assert torch.equal(out, want)


@pytest.mark.parametrize(
    "options",
    [
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "low"},
        {"force_words_ids": [[5]]},
        {"constraints": [object()]},
        {"use_mtp": True},
        {"prompt_lookup_num_tokens": 3},
        {"token_healing": True},
        {"assistant_early_exit": 1},
    ],
    ids=lambda options: next(iter(options)),
)
def test_another_way_of_generating_is_refused_by_name(options, monkeypatch):
    # it looks for a tokenizer before anything is decoded
    monkeypatch.setattr(LlamaForCausalLM, "heal_tokens", lambda self, ids, tokenizer=None: ids)
    with pytest.raises(InputError, match=next(iter(options))):
        generate(make_model("llama", seed=2), make_prompts([4], seed=5), NgramDrafter(), **options)


def soft_prompt(model, inputs):
    """PEFT's prompt tuning: vectors before the prompt."""
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    return inputs | {"input_ids": None, "inputs_embeds": torch.cat([embeds[:, :1] + 1, embeds], 1)}


def prefix(model, inputs):
    """PEFT's prefix tuning: a cache that is filled already."""
    name = next(name for name in inputs if name in ("cache", "past_key_values"))
    return inputs | {name: DynamicCache(config=model.config)}


def fill(model, inputs):
    """The same in place."""
    name = next(name for name in inputs if name in ("cache", "past_key_values"))
    inputs[name].update(*torch.zeros(2, 1, 2, 3, 16, dtype=torch.float64), 0)
    return inputs


def shifted(model, inputs):
    return inputs | {"position_ids": inputs["position_ids"] + 1}


def fails(model, inputs):
    raise KeyError("task_ids")


def as_peft_does(model, change):
    right = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = lambda *args, **kwargs: change(model, right(*args, **kwargs))
    return model


CHANGES = [
    (soft_prompt, "inputs_embeds"),
    (prefix, "cache|past_key_values"),
    (fill, "cache"),
    (shifted, "position_ids"),
    (fails, "KeyError.*task_ids"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_soft_prompt_is_refused_by_name(change, message):
    model = as_peft_does(make_model("llama", seed=2), change)
    match = f"LlamaForCausalLM.prepare_inputs_for_generation.*({message})"
    with pytest.raises(UnsupportedModelError, match=match):
        generate(model, make_prompts([4], seed=5), NgramDrafter())
    for kind in (EQSpec, EXSpec):
        with pytest.raises(UnsupportedModelError, match=match):
            kind(model, NgramDrafter())


def test_a_class_that_changes_its_inputs_is_refused_by_name():
    class Prompted(LlamaForCausalLM):
        def prepare_inputs_for_generation(self, *args, **kwargs):
            return soft_prompt(self, super().prepare_inputs_for_generation(*args, **kwargs))

    with pytest.raises(UnsupportedModelError, match=r"Prompted.*inputs_embeds"):
        EQSpec(Prompted(make_model("llama", seed=2).config), NgramDrafter())


def test_inputs_that_are_merely_passed_on_are_served():
    prompts = make_prompts([3, 9], seed=5)
    want = generate(make_model("llama", seed=2), prompts, NgramDrafter())

    def dropped(model, inputs):
        # a model may make its positions itself
        return {name: value for name, value in inputs.items() if name != "position_ids"} | {"labels": None}

    for change in (lambda model, inputs: inputs, dropped):
        model = as_peft_does(make_model("llama", seed=2), change)
        assert torch.equal(generate(model, prompts, NgramDrafter()), want)


def test_a_streamer_never_reaches_a_decoding_method():
    class Recorder:
        def __init__(self):
            self.heard = []

        def put(self, value):
            self.heard.append(value.tolist())

        def end(self):
            self.heard.append("end")

    prompt, streamer = make_prompts([4], seed=5), Recorder()
    generate(make_model("llama", seed=2), prompt, NgramDrafter(), streamer=streamer)
    assert streamer.heard == [prompt], "transformers now hands it on: serve it, and change the docstring"


def test_a_cache_that_holds_something_is_refused():
    model = make_model("llama", seed=2)
    cache = DynamicCache(config=model.config)
    prompt = make_prompts([4], seed=5)
    name = compat.cache_argument(model)
    model(torch.tensor(prompt)[:, :3], **{name: cache})
    with pytest.raises(InputError, match="holds 3 tokens"):
        generate(model, prompt, NgramDrafter(), **{name: cache})
