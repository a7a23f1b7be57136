"""Every held-out fault decodes to the end, and spoils outputs exactly where it says that it does."""

from typing import get_args

import pytest
import torch
from tiny_models import DRAFT_NOISE, left_pad, make_draft, make_model, make_prompts

from benchmarks.held_out_faults import HELD_OUT, HeldOut, Suspect
from specdec_fast import EQSpec, ModelDrafter
from specdec_fast.audit.probe.violation import Kind
from specdec_fast.result import GenerationResult

SEEDS = (1, 2, 3)
PROMPT_LENGTHS = [3, 9, 4, 15]
LIMITS = {"max_new_tokens": 24, "eos_token_id": [17, 40, 61]}


def decode(decoder: type[EQSpec], family: str, seed: int) -> GenerationResult:
    model = make_model(family, seed)
    drafter = ModelDrafter(make_draft(model, DRAFT_NOISE[family], seed + 10))
    input_ids, attention_mask = left_pad(make_prompts(PROMPT_LENGTHS, seed), 0)
    result = decoder(model, drafter, num_draft_tokens=4).generate(input_ids, attention_mask, **LIMITS)
    new = result.sequences[:, input_ids.shape[1] :]
    assert torch.equal(result.sequences[:, : input_ids.shape[1]], input_ids)
    assert all(row.token_ids == ids[: len(row.token_ids)] for row, ids in zip(result.rows, new.tolist(), strict=True))
    return result


def is_spoiled(fault: type[HeldOut], family: str, seed: int) -> bool:
    right = decode(EQSpec, family, seed)
    assert any(len({n for _, _, n in counts}) > 1 for counts in right.stats.accepted_by_round)
    spoiled = decode(fault, family, seed)
    return [row.token_ids for row in spoiled.rows] != [row.token_ids for row in right.rows]


@pytest.mark.parametrize("name", HELD_OUT)
def test_fault_spoils_outputs_if_it_says_so(name):
    fault = HELD_OUT[name]
    family = "gemma3" if name == "short-window" else "llama"
    assert any(is_spoiled(fault, family, seed) for seed in SEEDS) == (fault.suspect is not None)


def test_a_short_window_spoils_nothing_without_windows():
    assert not is_spoiled(HELD_OUT["short-window"], "llama", 1)


@pytest.mark.parametrize("fault", HELD_OUT.values(), ids=HELD_OUT)
def test_findings_have_names_that_exist(fault):
    assert fault.kind in (None, *get_args(Kind))
    assert fault.suspect in (None, *get_args(Suspect))
