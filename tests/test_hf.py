"""``model.generate(custom_generate=...)`` gives what transformers' own greedy search gives, row by row."""

import pytest
import torch
from tiny_models import DRAFT_NOISE, greedy_oracle, left_pad, make_draft, make_model, make_prompts

from specdec_fast import ModelDrafter, NgramDrafter, hf
from specdec_fast.errors import InputError


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
    ],
)
def test_what_greedy_cannot_honour_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        generate(make_model("llama", seed=2), make_prompts([4], seed=5), NgramDrafter(), **options)
