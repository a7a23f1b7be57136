"""The oracle decodes the target alone, and remembers on disk what it decoded."""

import json

import pytest
import torch
from tiny_models import greedy_oracle, make_model, make_prompts

from specdec_fast.audit.oracle import Oracle
from specdec_fast.errors import InputError

NEW_TOKENS = 10
PROMPT = make_prompts([6], seed=2)[0]


def oracle(model, cache_dir=None, **changes):
    settings = {"eos_token_id": None, "pad_token_id": 0, "max_new_tokens": NEW_TOKENS} | changes
    return Oracle(model, **settings, cache_dir=cache_dir)


@pytest.fixture
def decodes(monkeypatch):
    """Prompts that were really decoded."""
    seen, decode = [], Oracle._decode
    monkeypatch.setattr(Oracle, "_decode", lambda self, ids: seen.append(ids) or decode(self, ids))
    return seen


def test_row_is_the_targets_own(decodes):
    model = make_model("llama", seed=0, dtype=torch.float32)
    decoder = oracle(model)
    row = decoder.decode(PROMPT)
    assert row.token_ids == greedy_oracle(model, PROMPT, NEW_TOKENS)
    assert decoder.decode(PROMPT) is row and decodes == [PROMPT]
    logits = model(input_ids=torch.tensor([PROMPT + row.token_ids[:-1]])).logits[0, -NEW_TOKENS:]
    first, second = logits.topk(2).values.unbind(1)
    assert row.gaps == pytest.approx((first - second).tolist(), abs=1e-4)
    assert 0 < row.noise < 1e-2


def test_a_second_audit_finds_the_rows_of_the_first(tmp_path, decodes):
    row = oracle(make_model("llama", seed=0), tmp_path).decode(PROMPT)
    assert oracle(make_model("llama", seed=0), tmp_path).decode(PROMPT) == row
    assert decodes == [PROMPT]
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("change", ["weights", "dtype", "settings", "config", "prompt"])
def test_whatever_changes_the_text_changes_the_key(tmp_path, decodes, change):
    oracle(make_model("llama", seed=0), tmp_path).decode(PROMPT)
    model = make_model("llama", seed=0, dtype=torch.float32 if change == "dtype" else torch.float64)
    if change == "weights":
        model.model.layers[1].mlp.up_proj.weight.data[3, 5] += 1e-3
    if change == "config":
        model.config.rope_parameters["rope_theta"] = 500.0
    settings = {"eos_token_id": 5} if change == "settings" else {}
    prompt = [*PROMPT, 3] if change == "prompt" else PROMPT
    oracle(model, tmp_path, **settings).decode(prompt)
    assert decodes == [PROMPT, prompt]


def test_weights_that_change_places_change_the_key(tmp_path, decodes):
    model = make_model("llama", seed=0, dtype=torch.float32)
    oracle(model, tmp_path).decode(PROMPT)
    row = model.model.layers[1].mlp.up_proj.weight.data[3]
    row[5:7] = row[5:7].flip(0)
    oracle(model, tmp_path).decode(PROMPT)
    assert decodes == [PROMPT, PROMPT]


WRONG_TYPES = [
    {"token_ids": ["1"] * NEW_TOKENS},
    {"token_ids": "1" * NEW_TOKENS},
    {"gaps": [None] * NEW_TOKENS},
    {"rivals": []},
    {"leads": [["1"]] * NEW_TOKENS},
    {"noise": None},
    {"noise": "0"},
]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"prompt_ids": [], "row": {}}', "cut", *WRONG_TYPES])
def test_a_damaged_file_is_decoded_anew(tmp_path, decodes, damage):
    model = make_model("llama", seed=0)
    row = oracle(model, tmp_path).decode(PROMPT)
    (path,) = tmp_path.rglob("*.json")
    record = json.loads(path.read_text())
    if damage == "cut":
        record["row"]["gaps"].pop()
    elif isinstance(damage, dict):
        record["row"] |= damage
    path.write_text(damage if isinstance(damage, str) and damage != "cut" else json.dumps(record))
    assert oracle(model, tmp_path).decode(PROMPT) == row
    assert decodes == [PROMPT, PROMPT]


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot keep the oracle"):
        oracle(make_model("llama", seed=0), tmp_path / "file")
