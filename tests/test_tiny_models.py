"""The tiny models must be able to expose errors, or the tests that use them prove nothing."""

import pytest
import torch
from tiny_models import DRAFT_NOISE, FAMILIES, greedy_oracle, left_pad, make_draft, make_model, make_prompts

NEW_TOKENS = 100


@torch.no_grad()
def decode(model, prompt, shift_from):
    """Greedy tokens with position IDs off by one from content position ``shift_from`` on."""
    text = list(prompt)
    for _ in range(NEW_TOKENS):
        positions = torch.arange(len(text))
        positions += positions >= shift_from
        logits = model(input_ids=torch.tensor([text]), position_ids=positions[None], use_cache=False).logits
        text.append(int(logits[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_varied_and_a_position_error_changes_most_of_it(family):
    model = make_model(family, seed=0)
    prompt = make_prompts([7], seed=1)[0]
    tokens = greedy_oracle(model, prompt, NEW_TOKENS)
    assert tokens == decode(model, prompt, shift_from=1000)
    assert len(set(tokens)) > 25
    shifted = decode(model, prompt, shift_from=len(prompt) + 5)
    assert sum(a != b for a, b in zip(tokens, shifted, strict=True)) > NEW_TOKENS // 2


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_agree_with_most_tokens(family):
    model = make_model(family, seed=0)
    draft = make_draft(model, DRAFT_NOISE[family], seed=1)
    agreed = []
    for prompt in make_prompts([1, 5, 17], seed=2):
        tokens = greedy_oracle(model, prompt, NEW_TOKENS)
        with torch.no_grad():
            logits = draft(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        agreed.append((logits.argmax(-1) == torch.tensor(tokens)).double().mean())
    assert 0.55 < torch.stack(agreed).mean() < 0.9


def test_oracle_stops_at_eos_only_when_asked():
    model = make_model("llama", seed=0, eos_token_id=2)
    prompt = make_prompts([3], seed=0)[0]
    tokens = greedy_oracle(model, prompt, 20)
    stop = tokens.index(tokens[9]) + 1
    assert len(tokens) == 20
    assert greedy_oracle(model, prompt, 20, tokens[9]) == tokens[:stop]


def test_left_pad():
    input_ids, attention_mask = left_pad([[5], [6, 7, 8]], pad_id=2)
    assert input_ids.tolist() == [[2, 2, 5], [6, 7, 8]]
    assert attention_mask.tolist() == [[0, 0, 1], [1, 1, 1]]
