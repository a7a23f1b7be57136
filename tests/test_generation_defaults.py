"""Generation defaults of a model that greedy decoding does not apply are named, wherever they are ignored."""

from __future__ import annotations

import warnings

import pytest
import torch
from tiny_dirs import make_tokenizer, save_pair
from tiny_models import left_pad, make_model, make_prompts
from transformers import GenerationConfig

from specdec_fast import EQSpec, EXSpec, NgramDrafter, hf
from specdec_fast.audit.oracle import Oracle
from specdec_fast.cli import main
from specdec_fast.decoding import autoregressive
from specdec_fast.errors import UnappliedSettingsWarning

BATCH = left_pad(make_prompts([4, 2], seed=5), 0)
LIMITS = {"max_new_tokens": 3, "eos_token_id": [], "pad_token_id": 0}
SETTINGS = {
    "repetition_penalty": 1.3,
    "suppress_tokens": [5],
    "bad_words_ids": [[7]],
    "no_repeat_ngram_size": 2,
    "min_length": 9,
    "forced_eos_token_id": 2,
    "do_sample": True,
    "num_beams": 3,
    "guidance_scale": 1.5,
    "penalty_alpha": 0.6,
    "stop_strings": ["a"],
    "max_time": 9.0,
    "sequence_bias": [[[5], 2.0]],
    "exponential_decay_length_penalty": (2, 1.5),
}
USERS = {
    "EQSpec": lambda model: EQSpec(model, NgramDrafter()),
    "EXSpec": lambda model: EXSpec(model, NgramDrafter()),
    "autoregressive": lambda model: autoregressive.generate(model, *BATCH, **LIMITS),
    "Oracle": lambda model: Oracle(model, **LIMITS).decode([5, 6]),
}


def model_with(**settings):
    model = make_model("llama", seed=2, dtype=torch.float32, eos_token_id=2)
    model.generation_config.update(**settings)
    return model


@pytest.mark.parametrize(("name", "value"), SETTINGS.items(), ids=SETTINGS)
def test_a_setting_that_changes_greedy_text_is_named(name, value):
    with pytest.warns(UnappliedSettingsWarning) as caught:
        EQSpec(model_with(**{name: value}), NgramDrafter())
    assert len(caught) == 1 and f"{name}={value!r}" in str(caught[0].message)
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("name", "value"),
    [("guidance_scale", 1), ("min_new_tokens", 0), ("min_length", 0), ("suppress_tokens", []), ("num_beams", 1)],
)
def test_a_setting_that_changes_nothing_is_not_named(name, value, recwarn):
    EQSpec(model_with(**{name: value}), NgramDrafter())
    assert not recwarn.list


@pytest.mark.parametrize("user", USERS.values(), ids=USERS)
def test_whoever_ignores_them_says_so_at_once_and_by_name(user):
    with pytest.warns(UnappliedSettingsWarning, match=r"do_sample=True.*temperature=0\.6.*repetition_penalty=1\.05"):
        user(model_with(do_sample=True, temperature=0.6, repetition_penalty=1.05))


def test_a_setting_that_a_later_transformers_adds_is_named(monkeypatch):
    right = GenerationConfig.__init__

    def newer(self, **options):
        self.skip_vowels = options.pop("skip_vowels", None)
        right(self, **options)

    monkeypatch.setattr(GenerationConfig, "__init__", newer)
    model = make_model("llama", seed=2)
    model.generation_config.skip_vowels = 7
    with pytest.warns(UnappliedSettingsWarning, match="skip_vowels=7"):
        EQSpec(model, NgramDrafter())


HARMLESS = {
    "lengths and tokens": {"max_length": 99, "eos_token_id": [2, 3], "pad_token_id": 0, "bos_token_id": 1},
    "sampling that is off": {"do_sample": False, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.1},
    "defaults spelled out": {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_beams": 1, "top_k": 50},
    "beams that are off": {"length_penalty": 2.0, "early_stopping": True},
    "where KV is kept": {"use_cache": False, "cache_implementation": "static"},
    "an entry of the model's own": {"chat_format": "chatml"},
}


@pytest.mark.parametrize("settings", HARMLESS.values(), ids=HARMLESS)
def test_what_leaves_greedy_text_alone_is_not_mentioned(settings):
    model = model_with()
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for user in USERS.values():
            user(model)


def test_generate_itself_has_applied_them_before_the_hook_runs():
    model = model_with(do_sample=True, repetition_penalty=1.3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnappliedSettingsWarning)
        model.generate(
            BATCH[0],
            attention_mask=BATCH[1],
            max_new_tokens=3,
            do_sample=False,
            repetition_penalty=1.0,
            custom_generate=hf.eqspec(NgramDrafter()),
        )


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_pair(
        tmp_path_factory.mktemp("models") / "target", model_with(repetition_penalty=1.3, bad_words_ids=[[7]])
    )


COMMANDS = {
    "eqspec": ["generate", "--method=eqspec", "--check"],
    "exspec": ["generate", "--method=exspec"],
    "autoregressive": ["generate", "--method=autoregressive"],
    "audit": ["audit", "--candidate=eqspec", "--candidate=autoregressive", "--batch-sizes=1"],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_the_command_line_says_it_once_on_stderr(command, target, tmp_path, capfd):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(make_tokenizer().decode([5, 6, 7]) + "\n")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main([*command, f"--prompts={prompts}", f"--target={target}", "--max-new-tokens=3", "--device=cpu"]) == 0
    shown = capfd.readouterr()
    assert "repetition_penalty=1.3" not in shown.out
    assert shown.err.count("repetition_penalty=1.3, bad_words_ids=[[7]]") == 1, shown.err
