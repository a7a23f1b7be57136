"""Correct strategies audit clean and fault models do not, whatever the family."""

import re
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import DRAFT_NOISE, FAMILIES, greedy_oracle, make_draft, make_model, make_prompts

from specdec_fast import ModelDrafter
from specdec_fast.audit.candidates import foreign, resolve
from specdec_fast.audit.compare import CandidateRow, Run
from specdec_fast.audit.decoding import Judge, decode
from specdec_fast.audit.diagnosis import Observation, diagnose
from specdec_fast.audit.oracle import Oracle
from specdec_fast.audit.setting import Setting
from specdec_fast.audit.strategies import CORRECT, FAULTS
from specdec_fast.audit.text import repetition, rouge_l, special_rate
from specdec_fast.errors import InputError
from specdec_fast.prompts import pad_left

PROMPTS = make_prompts([1, 9, 4, 15, 2, 7], 1)
NEW_TOKENS = 20
DOCS = Path(__file__).parents[1] / "docs" / "audit.md"


def make_setting(family="llama", seed=1, **changes):
    model = make_model(family, seed)
    drafter = ModelDrafter(make_draft(model, DRAFT_NOISE[family], seed + 10))
    settings = {"num_draft_tokens": 4, "max_new_tokens": NEW_TOKENS, "eos_token_id": [], "pad_token_id": 0} | changes
    return Setting(model, drafter, **settings)


def audit(candidate, setting, batch_size=3, prompts=PROMPTS):
    answers: dict[int, CandidateRow] = {}
    decode(
        candidate,
        setting,
        prompts,
        batch_size,
        lambda index, row, seconds: answers.update({index: CandidateRow(row.token_ids, seconds)}),
    )
    ordered = [answers[index] for index in range(len(prompts))]
    judge = Judge(setting, Oracle(setting.target, **setting.limits), prompts)
    return judge.run(Run("candidate", batch_size), candidate, ordered)


@pytest.mark.parametrize("name", ["autoregressive", "exspec", "eqspec", "eqspec-ragged", *CORRECT])
@pytest.mark.parametrize("family", FAMILIES)
def test_correct_strategy_is_clean(family, name):
    setting = make_setting(family)
    run = audit(resolve(name, setting), setting)
    assert (run.exact_match, run.mismatches, run.rouge_l) == (1.0, 0, 1.0)
    assert run.equivalent and run.tokens_per_second > 0


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(name):
    runs = []
    for family in ("llama", "glm4"):
        setting = make_setting(family)
        runs.append(audit(resolve(name, setting), setting))
    if not FAULTS[name].suspects:
        assert all(run.equivalent and run.diagnosis == [] for run in runs), "no output may show it"
    else:
        assert all(run.mismatches > 0 and not run.equivalent and run.diagnosis for run in runs)


@pytest.mark.parametrize("seed", [1, 5])
def test_a_dropped_entry_is_no_row_order_where_prompts_repeat(seed):
    setting = make_setting(seed=seed, max_new_tokens=12)
    run = audit(resolve("lost-token", setting), setting, 2, [list(PROMPTS[1]), list(PROMPTS[1])])
    assert run.mismatches == 2
    assert "row_order" not in {suspect.name for suspect in run.diagnosis}


@pytest.mark.parametrize(
    ("own", "other", "candidate", "alone", "follows"),
    [
        ([1, 2, 3, 4], [5, 6, 7, 8], [5, 6, 7, 8], None, True),
        # both oracles are alike up to the divergence
        ([1, 2, 3, 4], [1, 2, 3, 9], [1, 2, 3, 5], None, False),
        # a short answer is the beginning of a longer one
        ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2], [1, 2, 3, 9], None, False),
        # of few possible answers, a wrong one is always another row's
        ([7, 0], [9, 0], [9, 0], [9, 0], False),
        ([7, 0], [9, 0], [9, 0], [7, 0], True),
    ],
)
def test_a_row_follows_another_only_where_that_explains_more_than_its_own(own, other, candidate, alone, follows):
    found = diagnose([Observation(own, candidate, others=[other], alone=alone)])
    assert ("row_order" in {suspect.name for suspect in found}) == follows


def test_a_foreign_callable_is_judged_like_any_decoder():
    setting = make_setting(eos_token_id=[17, 40])

    def greedy(input_ids, attention_mask, max_new_tokens, model):
        return model.generate(
            input_ids,
            attention_mask=attention_mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=[17, 40],
            pad_token_id=0,
        )

    def spoiled(input_ids, attention_mask, max_new_tokens, model):
        sequences = greedy(input_ids, attention_mask, max_new_tokens, model)
        sequences[0, input_ids.shape[1] + 2] += 1
        return sequences

    assert audit(foreign(greedy, setting), setting).exact_match == 1.0
    run = audit(foreign(spoiled, setting), setting)
    assert [row.first_divergence for row in run.rows] == [2, None, None, 2, None, None]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda ids: None, "returned NoneType"),
        (lambda ids: extended(ids).numpy(), "returned ndarray; need sequences"),
        (lambda ids: extended(ids).tolist()[:1], "returned 1 rows; need one for each of 3 prompts"),
        (lambda ids: extended(ids).tolist(), "returned a row 0 that does not begin with its prompt"),
        (lambda ids: ["a text"] * 3, "returned a row 0 that is none of token ids"),
        (lambda ids: [7] * 3, "returned a row 0 that is none of token ids"),
        (lambda ids: ids[:1], r"returned \[1, \d+\]"),
        (lambda ids: ids, "returned no new tokens"),
        (lambda ids: ids[:, :-1], "do not begin with input_ids"),
        (lambda ids: torch.cat([ids + 1, ids], 1), "do not begin with input_ids"),
        (lambda ids: extended(ids).double(), "returned torch.float64 on cpu"),
        (lambda ids: extended(ids).bool(), "returned torch.bool on cpu"),
        (lambda ids: extended(ids).to("meta"), "returned torch.int64 on meta"),
        (lambda ids: extended(ids, -1), "returned token id -1; the vocabulary has 97"),
        (lambda ids: extended(ids, 97), "returned token id 97"),
        (lambda ids: extended(ids, 2**62), f"returned token id {2**62}"),
        (lambda ids: 1 / 0, "candidate callable failed: ZeroDivisionError: division by zero"),
        (lambda ids: sys.exit(3), "candidate callable failed: SystemExit: 3"),
    ],
)
def test_a_foreign_answer_that_is_none(answer, message):
    setting = make_setting()
    with pytest.raises(InputError, match=message):
        audit(foreign(lambda ids, mask, n: answer(ids), setting), setting)


def extended(ids, token=1):
    return torch.nn.functional.pad(ids, (0, 1), value=token)


@pytest.mark.parametrize("row_type", [list, tuple, torch.tensor])
def test_an_answer_may_be_a_list_of_rows_without_padding(row_type):
    setting = make_setting(eos_token_id=[17, 40])

    def answer(input_ids, attention_mask, max_new_tokens):
        prompts = [ids[keep.bool()].tolist() for ids, keep in zip(input_ids, attention_mask, strict=True)]
        return [
            row_type(prompt + greedy_oracle(setting.target, prompt, max_new_tokens, [17, 40])) for prompt in prompts
        ]

    assert audit(foreign(answer, setting), setting).exact_match == 1.0


def test_arguments_are_told_by_their_names():
    setting = make_setting()

    def greedy(model, max_new_tokens, attention_mask, input_ids):
        return model.generate(
            input_ids, attention_mask=attention_mask, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0
        )

    assert audit(foreign(greedy, setting), setting).exact_match == 1.0


def test_the_callable_in_the_docs_is_a_candidate():
    setting = make_setting()
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    callable_, _, probing = blocks
    names = {"model": setting.target}
    exec(callable_, names)
    run = audit(foreign(names["decode"], setting), setting)
    assert run.exact_match == 1.0
    ids, mask = pad_left(PROMPTS, 0)
    exec(probing, names | {"input_ids": ids, "attention_mask": mask, "print": lambda found: names.update(found=found)})
    assert names["found"] is None


def test_what_follows_the_eos_is_no_answer():
    setting = make_setting(eos_token_id=[5])
    run = audit(foreign(lambda ids, mask, n: extended(extended(ids, 5), -100), setting), setting)
    assert all(row.token_ids == [5] for row in run.rows)


def test_an_interrupted_candidate_did_not_fail():
    def interrupted(input_ids, attention_mask, max_new_tokens):
        raise KeyboardInterrupt

    setting = make_setting()
    with pytest.raises(KeyboardInterrupt):
        audit(foreign(interrupted, setting), setting)


@pytest.mark.parametrize("calls", [2, 3, 8])
def test_a_verdict_outlives_its_controls(calls):
    left = iter(range(calls))

    def fails_later(input_ids, attention_mask, max_new_tokens):
        next(left)
        return extended(input_ids)

    setting = make_setting()
    run = audit(foreign(fails_later, setting), setting)
    assert run.mismatches == len(PROMPTS) and run.diagnosis


@pytest.mark.parametrize(
    "decode", [lambda ids, mask: ids, lambda model, ids, n: ids, lambda ids, mask, n, *, k: ids, iter, len, None]
)
def test_a_callable_that_takes_something_else(decode):
    with pytest.raises(InputError, match=r"must take \(input_ids, attention_mask, max_new_tokens\)"):
        foreign(decode, make_setting())


@pytest.mark.parametrize("body", ["raise ValueError('no')", "raise SystemExit('no')", "def f(:"])
def test_a_module_that_cannot_be_imported(tmp_path, monkeypatch, body):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "spoiled_module.py").write_text(body)
    with pytest.raises(InputError, match=r"candidate spoiled_module:f failed: (ValueError|SystemExit|SyntaxError)"):
        resolve("spoiled_module:f", make_setting())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "unknown candidate 'nothing': use one of autoregressive, exspec"),
        ("no_such_module:f", "candidate no_such_module:f failed: ModuleNotFoundError"),
        (":f", "need module:callable"),
        (".x:f", "need module:callable"),
        ("json:no_such_name", "json has no callable 'no_such_name'"),
        ("json:__doc__", "json has no callable"),
    ],
)
def test_names_that_lead_nowhere(name, message):
    with pytest.raises(InputError, match=message):
        resolve(name, make_setting())


def test_text_metrics():
    assert repetition([1, 2, 3, 4, 5]) == 0
    assert repetition([1, 2, 3] * 4) == pytest.approx(0.7)
    assert repetition([1, 2]) == 0
    assert special_rate([1, 2, 0, 0], {0, 9}) == 0.5
    assert special_rate([], {0}) == 0
    assert rouge_l([1, 2, 3, 4], [1, 3, 4, 5]) == 0.75
    assert rouge_l([], []) == 1
