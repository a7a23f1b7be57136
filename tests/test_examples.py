"""What the README shows runs and is right."""

import importlib.util
from pathlib import Path

import torch
from tiny_models import DRAFT_NOISE, greedy_oracle, left_pad, make_draft, make_model, make_prompts

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_own_decoder_equals_the_target():
    spec = importlib.util.spec_from_file_location("own_decoder", EXAMPLES / "own_decoder.py")
    own_decoder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own_decoder)
    target = make_model("llama", seed=1)
    draft = make_draft(target, DRAFT_NOISE["llama"], seed=2)
    prompts = make_prompts([9, 4, 13, 1], seed=3)

    def draft_tokens(texts):
        return torch.tensor([greedy_oracle(draft, text, 3) for text in texts])

    texts = own_decoder.decode(target, *left_pad(prompts, 0), draft_tokens, rounds=8)
    lengths = {len(text) - len(prompt) for text, prompt in zip(texts, prompts, strict=True)}
    assert len(lengths) > 1, "acceptance must be ragged"
    for text, prompt in zip(texts, prompts, strict=True):
        assert text == prompt + greedy_oracle(target, prompt, len(text) - len(prompt))
