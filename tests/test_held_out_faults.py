"""Every held-out fault decodes to the end, and spoils outputs exactly where it says that it does."""

from functools import cache
from typing import get_args

import pytest
import torch
from tiny_models import DRAFT_NOISE, left_pad, make_draft, make_model, make_prompts
from transformers import PreTrainedModel

from benchmarks.held_out import FOURTH, HELD_OUT, SECOND, THIRD, HeldOut
from specdec_fast import EQSpec, ModelDrafter
from specdec_fast.audit.diagnosis import Invariant
from specdec_fast.audit.probe.violation import Kind
from specdec_fast.audit.strategies import CORRECT, FAULTS
from specdec_fast.result import GenerationResult

ALL = HELD_OUT | SECOND | THIRD | FOURTH
BLIND = SECOND | THIRD | FOURTH
SEEDS = (1, 2, 3)
PROMPT_LENGTHS = [3, 9, 4, 15]
LIMITS = {"max_new_tokens": 24, "eos_token_id": [17, 28, 40, 61, 72, 83]}


@cache
def models(family: str, seed: int) -> tuple[PreTrainedModel, ModelDrafter]:
    model = make_model(family, seed)
    return model, ModelDrafter(make_draft(model, DRAFT_NOISE[family], seed + 10))


@cache
def decode(decoder: type[EQSpec], family: str, seed: int) -> GenerationResult:
    input_ids, attention_mask = left_pad(make_prompts(PROMPT_LENGTHS, seed), 0)
    result = decoder(*models(family, seed), num_draft_tokens=4).generate(input_ids, attention_mask, **LIMITS)
    new = result.sequences[:, input_ids.shape[1] :]
    assert torch.equal(result.sequences[:, : input_ids.shape[1]], input_ids)
    assert all(row.token_ids == ids[: len(row.token_ids)] for row, ids in zip(result.rows, new.tolist(), strict=True))
    return result


def texts(decoder: type[EQSpec], family: str, seed: int) -> list[list[int]]:
    return [row.token_ids for row in decode(decoder, family, seed).rows]


def is_spoiled(fault: type[HeldOut], family: str, seed: int) -> bool:
    right = decode(EQSpec, family, seed)
    assert any(len({n for _, _, n in counts}) > 1 for counts in right.stats.accepted_by_round)
    return texts(fault, family, seed) != texts(EQSpec, family, seed)


@pytest.mark.parametrize("name", HELD_OUT)
def test_fault_spoils_outputs_if_it_says_so(name):
    fault = HELD_OUT[name]
    family = "gemma3" if name == "short-window" else "llama"
    assert any(is_spoiled(fault, family, seed) for seed in SEEDS) == (fault.suspect is not None)


@pytest.mark.parametrize("fault", BLIND.values(), ids=BLIND)
def test_fault_of_a_blind_set_spoils_most_outputs_or_none(fault):
    spoiled = sum(is_spoiled(fault, "llama", seed) for seed in SEEDS)
    assert spoiled > len(SEEDS) / 2 if fault.suspect else spoiled == 0


@pytest.mark.parametrize("fault", BLIND.values(), ids=BLIND)
def test_fault_of_a_blind_set_is_deterministic(fault):
    assert texts(fault, "llama", 1) == [row.token_ids for row in decode.__wrapped__(fault, "llama", 1).rows]


def test_a_short_window_spoils_nothing_without_windows():
    assert not is_spoiled(HELD_OUT["short-window"], "llama", 1)


@pytest.mark.parametrize("fault", ALL.values(), ids=ALL)
def test_findings_have_names_that_exist(fault):
    assert fault.kind in (None, *get_args(Kind))
    assert fault.suspect in (None, *get_args(Invariant))


def test_no_two_candidates_share_a_name_or_a_class():
    known = {"autoregressive": None} | CORRECT | FAULTS
    assert len(known | ALL) == len(known) + len(HELD_OUT) + len(SECOND) + len(THIRD) + len(FOURTH)
    assert len({*ALL.values()}) == len(ALL)
