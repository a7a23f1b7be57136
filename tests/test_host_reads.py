"""One device-to-host copy per round; nothing else waits for the device."""

from itertools import pairwise

import pytest
import torch
from tiny_models import FAMILIES, left_pad, make_draft, make_model, make_prompts
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_fast import EQSpec, ModelDrafter, NgramDrafter

READS = ("tolist", "numpy", "cpu", "item", "__bool__", "__int__", "__float__", "__index__", "nonzero")


class ScalarReads(TorchDispatchMode):
    """Reads that reach the dispatcher, such as those made inside compiled library code."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **kwargs or {})


@pytest.fixture
def reads(monkeypatch):
    """Names of the tensor methods that read back, in order of their calls; a read inside a read counts once."""
    calls, depth = [], [0]
    for name in READS:
        original = getattr(torch.Tensor, name)

        def counting(self, *args, _name=name, _original=original, **kwargs):
            if depth[0] == 0:
                calls.append(_name)
            depth[0] += 1
            try:
                return _original(self, *args, **kwargs)
            finally:
                depth[0] -= 1

        monkeypatch.setattr(torch.Tensor, name, counting)
    return calls


@pytest.mark.parametrize("kind", ["model", "ngram"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_read_per_round(family, kind, reads):
    model = make_model(family, seed=1)
    drafter = ModelDrafter(make_draft(model, 0.02, 2)) if kind == "model" else NgramDrafter()
    decoder = EQSpec(model, drafter, num_draft_tokens=3)
    input_ids, mask = left_pad(make_prompts([3, 8, 5], 1), 0)
    arguments = {"max_new_tokens": 16, "eos_token_id": [11, 12, 13]}
    decoder.generate(input_ids, mask, **arguments)
    marks = []
    with ScalarReads() as scalar_reads:
        result = decoder.generate(
            input_ids, mask, **arguments, on_round=lambda _: marks.append((len(reads), scalar_reads.count))
        )
    assert result.stats.rounds > 4
    per_round = [b[0] - a[0] for a, b in pairwise(marks)]
    assert per_round == [1] * len(per_round)
    assert marks[0][1] == marks[-1][1]
    assert result.stats.host_reads == result.stats.rounds


def test_a_read_in_a_forward_is_seen(reads):
    """The counter itself can fail: a model that looks at its mask adds reads."""
    model = make_model("llama", seed=1)
    model.model.register_forward_pre_hook(lambda *_: bool(torch.ones(1)) and None)
    input_ids, mask = left_pad(make_prompts([3, 8], 1), 0)
    marks = []
    EQSpec(model, NgramDrafter()).generate(
        input_ids, mask, max_new_tokens=9, eos_token_id=[], on_round=lambda _: marks.append(len(reads))
    )
    assert marks[-1] - marks[-2] == 2
