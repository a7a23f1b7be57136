"""The metrics on hand-made candidates, against oracles of tiny random models."""

import copy
from dataclasses import replace

import pytest
import torch
from tiny_models import greedy_oracle, make_model, make_prompts
from transformers import GenerationConfig

from specdec_fast.audit.equivalence import (
    EquivalenceCheck,
    exact_match,
    first_divergence,
    is_near_tie,
    partial_match,
)
from specdec_fast.audit.oracle import Oracle

NEW_TOKENS = 12
PROMPT = make_prompts([5], seed=0)[0]


@pytest.fixture(scope="module")
def model():
    return make_model("llama", seed=0)


@pytest.fixture
def check(model):
    return EquivalenceCheck(Oracle(model, eos_token_id=None, pad_token_id=0, max_new_tokens=NEW_TOKENS))


def oracle_of(model, eos_token_id=None):
    return greedy_oracle(model, PROMPT, NEW_TOKENS, eos_token_id)


def changed(tokens, position):
    return tokens[:position] + [(tokens[position] + 1) % 97] + tokens[position + 1 :]


def plant_noise(monkeypatch, check, *noises):
    decode, values = check._oracle.decode, iter(noises)
    monkeypatch.setattr(check._oracle, "decode", lambda ids: replace(decode(ids), noise=next(values)))


def only_row(check, candidate, prompt=PROMPT):
    check.add(0, prompt, candidate)
    report = check.report()
    return report, report.rows[0]


@pytest.mark.parametrize(
    ("oracle", "candidate", "divergence", "partial"),
    [
        ([4, 5, 6, 7], [4, 5, 6, 7], None, 1.0),
        ([4, 5, 6, 7], [9, 5, 6, 7], 0, 0.0),
        ([4, 5, 6, 7], [4, 5, 6, 9], 3, 0.75),
        ([4, 5, 6, 7], [4, 5], 2, 0.5),
        ([4, 5, 6, 7], [], 0, 0.0),
        ([4, 5], [4, 5, 6], 2, 1.0),
        ([], [], None, 1.0),
        ([], [4], 0, 0.0),
    ],
)
def test_metrics(oracle, candidate, divergence, partial):
    assert first_divergence(oracle, candidate) == divergence
    assert partial_match(oracle, candidate) == partial
    assert exact_match(oracle, candidate) == (divergence is None)


def test_near_tie_is_a_gap_below_twice_the_noise():
    assert is_near_tie(0.19, noise=0.1)
    assert not is_near_tie(0.2, noise=0.1)
    assert not is_near_tie(0.0, noise=0.0)
    assert not is_near_tie(None, noise=1.0)


@pytest.mark.parametrize("no_eos", [None, []])
def test_exact_row(model, no_eos):
    check = EquivalenceCheck(Oracle(model, eos_token_id=no_eos, pad_token_id=None, max_new_tokens=NEW_TOKENS))
    report, row = only_row(check, oracle_of(model))
    assert (row.exact, row.partial, row.first_divergence, row.near_tie, row.gap) == (True, 1.0, None, False, None)
    assert (report.exact_match, report.partial_match) == (1.0, 1.0)
    assert (report.near_ties, report.mismatches) == (0, 0)


@pytest.mark.parametrize("rank", [1, 2, 7, 60])
def test_changed_token_is_a_mismatch_with_the_oracles_gap(model, check, rank):
    tokens = oracle_of(model)
    text = torch.tensor([PROMPT + tokens[:7]])
    logits, ranked = model(input_ids=text).logits[0, -1].sort(descending=True)
    report, row = only_row(check, [*tokens[:7], ranked[rank].item(), *tokens[8:]])
    assert row.first_divergence == 7
    assert row.partial == pytest.approx(7 / NEW_TOKENS)
    # of tokens further behind, no more is known than that they are
    assert row.gap == pytest.approx((logits[0] - logits[min(rank, 8)]).item(), rel=1e-4)
    assert not row.exact and not row.near_tie
    assert (report.mismatches, report.near_ties) == (1, 0)


@pytest.mark.parametrize("length_change", ["shorter", "longer", "empty"])
def test_length_difference_is_never_a_near_tie(model, check, monkeypatch, length_change):
    plant_noise(monkeypatch, check, 1e9)
    tokens = oracle_of(model)
    candidate = {"shorter": tokens[:-3], "longer": tokens + [5], "empty": []}[length_change]
    report, row = only_row(check, candidate)
    assert row.first_divergence == min(len(tokens), len(candidate))
    assert row.gap is None
    assert (report.mismatches, report.near_ties) == (1, 0)


@pytest.mark.parametrize(("offset", "near_ties"), [(1e-7, 1), (1e-2, 0)])
def test_planted_near_tie(offset, near_ties):
    model = make_model("llama", seed=1, dtype=torch.float32)
    tokens = greedy_oracle(model, PROMPT, NEW_TOKENS)
    rival = next(t for t in range(3, 97) if t not in tokens)
    weight = model.lm_head.weight.data
    weight[rival] = weight[tokens[-1]] * (1 - offset)

    check = EquivalenceCheck(Oracle(model, eos_token_id=None, pad_token_id=0, max_new_tokens=NEW_TOKENS))
    oracle = check._oracle.decode(PROMPT).token_ids
    pair = {tokens[-1], rival}
    tied = next(i for i, token in enumerate(oracle) if token in pair)
    (loser,) = pair - {oracle[tied]}
    report, row = only_row(check, oracle[:tied] + [loser] + oracle[tied + 1 :])

    assert report.noise > 0
    assert row.first_divergence == tied
    assert (report.near_ties, report.mismatches) == (near_ties, 1 - near_ties)


def test_a_wrong_token_where_two_others_tie_is_no_near_tie():
    model = make_model("llama", seed=1, dtype=torch.float32)
    tokens = greedy_oracle(model, PROMPT, NEW_TOKENS)
    rival = next(t for t in range(3, 97) if t not in tokens)
    model.lm_head.weight.data[rival] = model.lm_head.weight.data[tokens[0]] * (1 - 1e-7)
    check = EquivalenceCheck(Oracle(model, eos_token_id=None, pad_token_id=0, max_new_tokens=NEW_TOKENS))
    oracle = check._oracle.decode(PROMPT)
    assert oracle.gaps[0] < 2 * oracle.noise, "the target's two best tokens must tie"
    worst = model(input_ids=torch.tensor([PROMPT])).logits[0, -1].argmin().item()
    report, _ = only_row(check, [worst, *oracle.token_ids[1:]])
    assert (report.near_ties, report.mismatches) == (0, 1)


def test_a_float32_copy_judges_the_tokens_of_a_model_in_half_precision():
    model = make_model("llama", seed=1, dtype=torch.bfloat16)
    oracle = Oracle(model, eos_token_id=None, pad_token_id=0, max_new_tokens=NEW_TOKENS)
    tokens = oracle.decode(PROMPT).token_ids
    assert tokens == greedy_oracle(model, PROMPT, NEW_TOKENS), "the text stays the model's own"
    logits = copy.deepcopy(model).float()(input_ids=torch.tensor([PROMPT + tokens[:7]])).logits[0, -1]
    ranked = logits.argsort(descending=True).tolist()
    other = next(token for token in ranked if token != tokens[7])
    report, row = only_row(EquivalenceCheck(oracle), [*tokens[:7], other, *tokens[8:]])
    assert row.gap == pytest.approx((logits[tokens[7]] - logits[other]).item(), rel=1e-3)
    assert report.noise > 0 and model.dtype == torch.bfloat16
    same = Oracle(model, eos_token_id=None, pad_token_id=0, max_new_tokens=NEW_TOKENS, float32_judge=False)
    assert same.decode(PROMPT).token_ids == tokens and same.decode(PROMPT).gaps != oracle.decode(PROMPT).gaps


def test_where_no_float32_copy_can_be_made_the_model_judges_and_a_warning_says_so(monkeypatch):
    model = make_model("llama", seed=1, dtype=torch.bfloat16)
    settings = {"eos_token_id": None, "pad_token_id": 0, "max_new_tokens": NEW_TOKENS}
    expected = Oracle(model, **settings, float32_judge=False).decode(PROMPT)
    monkeypatch.setattr(type(model), "float", lambda self: (_ for _ in ()).throw(torch.OutOfMemoryError("too large")))
    with pytest.warns(UserWarning, match=r"no float32 copy .* torch\.bfloat16 does: too large"):
        assert Oracle(model, **settings).decode(PROMPT) == expected


@pytest.mark.parametrize(("noise", "weak"), [(1e9, True), (1e-9, False), (None, False)])
def test_a_check_whose_band_takes_in_other_tokens_is_weak(check, model, monkeypatch, noise, weak):
    plant_noise(monkeypatch, check, noise)
    report, _ = only_row(check, oracle_of(model))
    assert (report.weakness is not None) == weak and report.tied == (None if noise is None else float(weak))
    if weak:
        assert "less than 2e+09 logits apart" in report.weakness and "100%" in report.weakness


def test_noise_is_the_largest_of_the_run_and_judges_earlier_rows(model, check, monkeypatch):
    plant_noise(monkeypatch, check, 0.0, 1e9, 0.5)
    tokens = oracle_of(model)
    check.add(0, PROMPT, changed(tokens, 3))
    assert check.report().mismatches == 1
    check.add(1, PROMPT, tokens)
    check.add(2, PROMPT, tokens)
    report = check.report()
    assert report.noise == 1e9
    assert [row.near_tie for row in report.rows] == [True, False, False]
    assert (report.mismatches, report.near_ties) == (0, 1)
    assert report.exact_match == pytest.approx(2 / 3)
    assert report.partial_match == pytest.approx((3 / NEW_TOKENS + 2) / 3)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_measured_noise_is_rounding(family):
    model = make_model(family, seed=0, dtype=torch.float32)
    check = EquivalenceCheck(Oracle(model, eos_token_id=None, pad_token_id=0, max_new_tokens=NEW_TOKENS))
    report, _ = only_row(check, greedy_oracle(model, PROMPT, NEW_TOKENS))
    assert 0 < report.noise < 1e-2


@pytest.mark.parametrize("as_list", [False, True])
def test_eos_equal_to_pad_and_inside_the_prompt(model, as_list):
    tokens = oracle_of(model)
    eos = tokens[4]
    stop = tokens.index(eos) + 1
    check = EquivalenceCheck(
        Oracle(model, eos_token_id=[eos, 0] if as_list else eos, pad_token_id=eos, max_new_tokens=NEW_TOKENS)
    )
    prompt = [eos, *PROMPT]
    check.add(0, PROMPT, tokens[:stop])
    check.add(1, PROMPT, tokens)
    check.add(2, prompt, greedy_oracle(model, prompt, NEW_TOKENS, [eos, 0] if as_list else eos))
    runs_past_eos = check.report().rows[1]
    assert [row.exact for row in check.report().rows] == [True, False, True]
    assert (runs_past_eos.first_divergence, runs_past_eos.partial) == (stop, 1.0)


def test_oracle_ignores_the_models_generation_defaults(model):
    tokens = oracle_of(model)
    noisy = GenerationConfig(repetition_penalty=5.0, do_sample=True, eos_token_id=tokens[0], max_length=7)
    own, model.generation_config = model.generation_config, noisy
    try:
        check = EquivalenceCheck(Oracle(model, eos_token_id=None, pad_token_id=0, max_new_tokens=NEW_TOKENS))
        _, row = only_row(check, tokens)
        assert row.exact
        assert model.generation_config is noisy
    finally:
        model.generation_config = own


def test_no_rows(check):
    report = check.report()
    assert (report.rows, report.mismatches, report.noise) == ([], 0, None)
