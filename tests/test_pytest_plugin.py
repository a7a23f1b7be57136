"""``assert_output_equivalent``: the function, the fixture, and what pytest loads to offer it."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_dirs import make_tokenizer
from tiny_models import DRAFT_NOISE, make_draft, make_model, make_prompts

import specdec_fast.audit
from specdec_fast import ModelDrafter
from specdec_fast.audit import assert_output_equivalent
from specdec_fast.errors import InputError

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[1]
PROMPTS = make_prompts([4, 11, 7, 2, 9], seed=5)


@pytest.fixture(scope="module")
def model():
    return make_model("llama", seed=1)


def greedy(input_ids, attention_mask, max_new_tokens, model):
    return model.generate(
        input_ids, attention_mask=attention_mask, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0
    )


def unmasked(input_ids, attention_mask, max_new_tokens, model):
    return greedy(input_ids, attention_mask.new_ones(attention_mask.shape), max_new_tokens, model)


def test_equivalent_decoders_pass(model):
    report = assert_output_equivalent(greedy, model, PROMPTS, max_new_tokens=6)
    assert [(run.candidate, run.batch_size, run.exact_match) for run in report.runs] == [
        ("greedy", b, 1.0) for b in (1, 4)
    ]
    drafter = ModelDrafter(make_draft(model, DRAFT_NOISE["llama"], seed=2))
    assert assert_output_equivalent("eqspec", model, PROMPTS, drafter=drafter, max_new_tokens=6).equivalent


def test_prompts_of_any_kind(model):
    expected = assert_output_equivalent(greedy, model, PROMPTS, batch_sizes=2, max_new_tokens=4)
    assert [run.batch_size for run in expected.runs] == [2]
    for prompts in (map(torch.tensor, PROMPTS), map(np.array, PROMPTS), (iter(ids) for ids in PROMPTS)):
        report = assert_output_equivalent(greedy, model, prompts, batch_sizes=iter([2]), max_new_tokens=4)
        assert report.prompts == expected.prompts
    assert len(assert_output_equivalent(greedy, model, torch.tensor([[3, 4], [5, 6]]), max_new_tokens=4).prompts) == 2


def test_a_candidate_that_spoils_the_target_does_not_spoil_the_oracle():
    def spoiling(input_ids, attention_mask, max_new_tokens, model):
        model.lm_head.weight.data.zero_()
        return greedy(input_ids, attention_mask, max_new_tokens, model)

    with pytest.raises(AssertionError, match="NOT equivalent"):
        assert_output_equivalent(spoiling, make_model("llama", seed=1), PROMPTS, max_new_tokens=4)


def test_a_failure_shows_the_table_and_the_first_divergences(model):
    with pytest.raises(AssertionError) as raised:
        assert_output_equivalent(unmasked, model, PROMPTS, max_new_tokens=6)
    shown = str(raised.value)
    assert shown.count("NOT equivalent") == 1 and " equivalent" in shown
    assert "unmasked, B=1" not in shown
    at, found, expected = map(int, re.search(r"B=4, prompt 0: token (\d+) is (\d+), not (\d+)", shown).groups())
    oracle = assert_output_equivalent(greedy, model, PROMPTS, max_new_tokens=6).prompts[0].oracle_ids
    assert oracle[at] == expected != found


def test_texts_need_their_tokenizer(model):
    tokenizer = make_tokenizer()
    texts = [tokenizer.decode(ids) for ids in PROMPTS]
    report = assert_output_equivalent(greedy, model, texts, tokenizer=tokenizer, max_new_tokens=4)
    assert [prompt.prompt for prompt in report.prompts] == texts
    with pytest.raises(InputError, match="texts and their tokenizer"):
        assert_output_equivalent(greedy, model, texts)


@pytest.mark.parametrize(
    ("prompts", "changes", "message"),
    [
        ([], {}, "need at least one"),
        ([[3, 4], []], {}, "none that is empty"),
        ([[3, 4], "text"], {"tokenizer": make_tokenizer()}, "need token ids, or texts"),
        (5, {}, "need several, not one int"),
        ("text", {"tokenizer": make_tokenizer()}, "need several, not one str"),
        ([[3, 4], [3, 97]], {}, "prompts: prompt 1 has token id 97, the target's vocabulary 97"),
        ([[-1]], {}, "prompts: prompt 0 has token id -1"),
        ([[0.5]], {}, "prompts: prompt 0 is neither a text nor a row of integers"),
        ([3, 4], {}, "prompts: prompt 0 is neither a text nor a row of integers"),
        ([[3, 4]], {"max_new_tokens": 0}, "max_new_tokens 0: need at least 1"),
        ([[3, 4]], {"batch_sizes": "1,4"}, "batch_sizes 1,4: need integers of at least 1"),
        ([[3, 4]], {"batch_sizes": 1.5}, "batch_sizes 1.5: need integers of at least 1"),
        ([[3, 4]], {"batch_sizes": 0}, "batch_sizes 0: need integers of at least 1"),
        ([[3, 4]], {"batch_sizes": ()}, "need integers of at least 1"),
        ([[3, 4]], {"batch_sizes": (2, 0)}, "need integers of at least 1"),
        ([[3, 4]], {"max_new_tokens": 600}, "is too long"),
    ],
)
def test_nothing_passes_unasked(model, prompts, changes, message):
    with pytest.raises(InputError, match=message):
        assert_output_equivalent(greedy, model, prompts, **changes)


def test_public_names():
    for name in specdec_fast.audit.__all__:
        assert getattr(specdec_fast.audit, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        specdec_fast.audit.nothing  # noqa: B018


def test_the_fixture_fails_a_test(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(
        """
        from test_pytest_plugin import PROMPTS, greedy, unmasked
        from tiny_models import make_model

        def test_right(assert_output_equivalent):
            assert_output_equivalent(greedy, make_model("llama", seed=1), PROMPTS, max_new_tokens=4)

        def test_wrong(assert_output_equivalent):
            assert_output_equivalent(unmasked, make_model("llama", seed=1), PROMPTS, max_new_tokens=4)
        """
    )
    result = pytester.runpytest_inprocess("-p", "specdec_fast.audit.pytest_plugin")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*assert_output_equivalent(unmasked, *", "E*unmasked*4*NOT equivalent*"])
    # the traceback ends in the user's test
    result.stdout.no_fnmatch_line("*assertion.py*")


def test_pytest_starts_with_the_plugin_and_without_torch(tmp_path):
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    installed = tmp_path / "somebody-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody\nVersion: 1\n")
    lines = [f"{name} = {module}\n" for name, module in entries.items()]
    (installed / "entry_points.txt").write_text("[pytest11]\n" + "".join(lines))
    (tmp_path / "test_it.py").write_text(
        "import sys\n"
        "def test_it():\n"
        "    assert 'specdec_fast.audit.pytest_plugin' in sys.modules\n"
        "    assert not {'torch', 'transformers'} & sys.modules.keys()\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
