"""One device-to-host copy per round; nothing else waits for the device."""

from itertools import pairwise

import pytest
import torch
from tiny_models import FAMILIES, left_pad, make_draft, make_model, make_prompts

from benchmarks.harness import DispatchCounter
from specdec_fast import EQSpec, ModelDrafter, NgramDrafter
from specdec_fast.layouts import LAYOUTS


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["model", "ngram"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_read_per_round(family, kind, layout):
    model = make_model(family, seed=1)
    drafter = ModelDrafter(make_draft(model, 0.02, 2)) if kind == "model" else NgramDrafter()
    decoder = EQSpec(model, drafter, num_draft_tokens=3, layout=layout)
    input_ids, mask = left_pad(make_prompts([3, 8, 5], 1), 0)
    arguments = {"max_new_tokens": 16, "eos_token_id": [11, 12, 13]}
    decoder.generate(input_ids, mask, **arguments)
    marks = []
    with DispatchCounter() as counter:
        result = decoder.generate(input_ids, mask, **arguments, on_round=lambda _: marks.append(counter.syncs))
    assert result.stats.rounds > 4
    per_round = [b - a for a, b in pairwise(marks)]
    assert per_round == [1] * len(per_round)
    assert result.stats.host_reads == result.stats.rounds


def test_a_read_in_a_forward_is_seen():
    """The counter itself can fail: a model that looks at its mask adds reads."""
    model = make_model("llama", seed=1)
    model.model.register_forward_pre_hook(lambda *_: bool(torch.ones(1)) and None)
    input_ids, mask = left_pad(make_prompts([3, 8], 1), 0)
    marks = []
    with DispatchCounter() as counter:
        EQSpec(model, NgramDrafter(), layout="padded").generate(
            input_ids, mask, max_new_tokens=9, eos_token_id=[], on_round=lambda _: marks.append(counter.syncs)
        )
    assert marks[-1] - marks[-2] == 2
