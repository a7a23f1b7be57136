"""realign_cache: a plain decoder of somebody else's becomes exact by one call, and misuse is refused."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from tiny_models import greedy_oracle, left_pad, make_draft, make_model, make_prompts
from transformers import DynamicCache, StaticCache

from specdec_fast.errors import InputError, UnsupportedModelError
from specdec_fast.integrations.compat import cache_argument
from specdec_fast.integrations.realign_cache import realign_cache

DRAFTED, NEW = 4, 40


def foreign_decoder(target, draft, input_ids, mask, rounds, cache, realign):
    """Somebody's batch speculative decoder; all that is not theirs is ``realign``."""
    name, accepted = cache_argument(target), []
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    out = target(input_ids, attention_mask=mask, position_ids=positions, **{name: cache})
    texts = [row[keep.bool()].tolist() for row, keep in zip(input_ids, mask, strict=True)]
    bonus = out.logits[:, -1].argmax(-1, keepdim=True)
    mask, positions = torch.nn.functional.pad(mask, (0, 1 + DRAFTED), value=1), mask.sum(1, keepdim=True)
    positions = positions + torch.arange(1 + DRAFTED)
    for _ in range(rounds):
        texts = [text + new for text, new in zip(texts, bonus.tolist(), strict=True)]
        drafts = torch.stack([propose(draft, text) for text in texts])
        out = target(torch.cat([bonus, drafts], 1), attention_mask=mask, position_ids=positions, **{name: cache})
        choice = out.logits.argmax(-1)
        n_accepted = (choice[:, :-1] == drafts).long().cumprod(1).sum(1)
        texts = [text + d[:n].tolist() for text, d, n in zip(texts, drafts, n_accepted, strict=True)]
        bonus = choice.gather(1, n_accepted[:, None])
        mask, positions = realign(cache, mask, n_accepted, DRAFTED, 1 + DRAFTED)
        accepted.append(n_accepted)
    return texts, torch.stack(accepted)


def propose(draft, text: list[int]) -> torch.Tensor:
    ids = torch.tensor([text])
    for _ in range(DRAFTED):
        ids = torch.cat([ids, draft(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids[0, -DRAFTED:]


def crop_to_the_longest(cache, mask, n_accepted, drafted, following):
    """Keeps the columns of the row that accepted most, and the others' rejected KV with them, as such decoders do."""
    kept = mask.shape[1] - drafted + int(n_accepted.max())
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, :kept], layer.values[:, :, :kept]
    mask = torch.nn.functional.pad(mask[:, :kept], (0, following), value=1)
    return mask, (mask.cumsum(1) - 1).clamp(min=0)[:, kept:]


@pytest.fixture(scope="module")
def models():
    target = make_model("llama", seed=1)
    return target, make_draft(target, noise=0.025, seed=2)


CACHES = {"dynamic": lambda target: DynamicCache(), "static": lambda target: StaticCache(target.config, 256)}


@torch.no_grad()
def decode(models, make_cache, realign):
    target, draft = models
    prompts = make_prompts([9, 4, 13, 6], seed=3)
    texts, accepted = foreign_decoder(target, draft, *left_pad(prompts, 0), NEW // 2, make_cache(target), realign)
    expected = [prompt + greedy_oracle(target, prompt, NEW) for prompt in prompts]
    equal = [text[: len(e)] == e[: len(text)] for text, e in zip(texts, expected, strict=True)]
    assert all(len(text) > len(prompt) + NEW // 2 for text, prompt in zip(texts, prompts, strict=True))
    return equal, accepted


@pytest.mark.parametrize("kind", CACHES)
def test_a_foreign_decoder_becomes_exact(models, kind):
    equal, accepted = decode(models, CACHES[kind], realign_cache)
    assert (accepted != accepted[:, :1]).any(1).float().mean() > 0.5, "acceptance must be ragged"
    assert all(equal)


def test_without_it_the_same_decoder_is_wrong(models):
    equal, _ = decode(models, CACHES["dynamic"], crop_to_the_longest)
    assert not all(equal)


def filled(rows: int = 2, columns: int = 9, drafted: int = 3) -> dict:
    generator = torch.Generator().manual_seed(0)
    pairs = [tuple(torch.randn(rows, 2, columns, d, generator=generator) for d in (4, 6)) for _ in range(3)]
    mask = torch.ones(rows, columns, dtype=torch.int64)
    mask[1, :2] = 0
    return {
        "cache": pairs,
        "attention_mask": mask,
        "n_accepted": torch.tensor([3, 1]),
        "num_drafted": drafted,
        "num_next": 2,
    }


def test_a_list_of_pairs_moves_and_ends_with_the_valid_columns():
    arguments = filled()
    before = [tuple(x.clone() for x in pair) for pair in arguments["cache"]]
    mask, positions = realign_cache(**arguments)
    # row 0 stays with columns 0..8; row 1 held 2..6 and now ends with it
    assert mask.tolist() == [[1] * 11, [0] * 4 + [1] * 7]
    assert positions.tolist() == [[9, 10], [5, 6]]
    for now, old in zip(arguments["cache"], before, strict=True):
        for x, y in zip(now, old, strict=True):
            assert torch.equal(x[0], y[0]) and torch.equal(x[1, :, 4:], y[1, :, 2:7])


def test_it_reads_back_once():
    arguments = filled()
    reads = []
    original = torch.Tensor.tolist
    with mock.patch.object(torch.Tensor, "tolist", lambda x: reads.append("tolist") or original(x)):
        names = ("item", "numpy", "cpu", "__bool__", "__int__", "__index__")
        patches = [mock.patch.object(torch.Tensor, name, side_effect=AssertionError(name)) for name in names]
        for patch in patches:
            patch.start()
        try:
            realign_cache(**arguments)
        finally:
            for patch in patches:
                patch.stop()
    assert reads == ["tolist"]


HOLE = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1], [1] * 9])
EMPTY = torch.tensor([[1] * 9, [0] * 6 + [1] * 3])
MISUSE = {
    "a hole in the mask": ({"attention_mask": HOLE}, "row 0 of attention_mask is not zeros, then ones"),
    "an empty row": ({"attention_mask": EMPTY}, "row 1 of attention_mask is not zeros, then ones"),
    "the mask without the drafts": ({"attention_mask": filled(columns=10)["attention_mask"]}, "at least 10, dim"),
    "too many accepted": ({"n_accepted": torch.tensor([3, 4])}, r"n_accepted\[1\] is 4; need 0\.\.3"),
    "n_accepted dtype": ({"n_accepted": torch.tensor([3.0, 1.0])}, "n_accepted is torch.float32"),
    "num_drafted": ({"num_drafted": 9}, r"num_drafted=9; need 0\.\.8"),
    "num_next": ({"num_next": 0}, "num_next=0; need at least 1"),
    "no layers": ({"cache": []}, "cache is empty"),
    "another kind": ({"cache": 7}, "cache is a int; need a DynamicCache, a StaticCache or a list"),
    "a tuple": ({"cache": ()}, "cache is a tuple; need a DynamicCache, a StaticCache or a list"),
    "no pairs": ({"cache": [torch.zeros(2, 2, 9, 4)]}, r"layer 0 of the cache is a Tensor; need \(k, v\)"),
    "three of a kind": ({"cache": [(torch.zeros(2, 2, 9, 4),) * 3]}, r"layer 0 of the cache is a tuple of 3; need"),
    "lists of lists": ({"cache": [([1.0], [2.0])]}, r"layer 0 of the cache holds a list; need tensors"),
    "n_accepted as a list": ({"n_accepted": [3, 1]}, r"n_accepted is a list; need a tensor, int64 \[rows\]"),
    "a mask as a list": ({"attention_mask": [[1] * 9] * 2}, "attention_mask is a list; need a tensor"),
    "no mask": ({"attention_mask": None}, "attention_mask is a NoneType; need a tensor"),
    "num_drafted as a tensor": ({"num_drafted": torch.tensor(3)}, r"num_drafted=tensor\(3\); need an integer"),
    "num_drafted as a float": ({"num_drafted": 3.0}, r"num_drafted=3\.0; need an integer"),
    "num_next as a string": ({"num_next": "2"}, "num_next='2'; need an integer"),
}


@pytest.mark.parametrize(("change", "message"), MISUSE.values(), ids=MISUSE)
def test_misuse_is_refused(change, message):
    arguments = filled() | change
    before = [x.clone() for pair in filled()["cache"] for x in pair]
    with pytest.raises(InputError, match=message):
        realign_cache(**arguments)
    if "cache" not in change:
        after = [x for pair in arguments["cache"] for x in pair]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("make", [DynamicCache, lambda: StaticCache(make_model("llama", seed=1).config, 16)])
def test_a_cache_of_another_length_than_the_mask_is_refused(make):
    cache, arguments = make(), filled()
    for i, (k, v) in enumerate(filled(columns=10)["cache"]):
        cache.update(k, v, i)
    with pytest.raises(InputError, match="cache holds 10 columns, attention_mask 9; pass the verify's"):
        realign_cache(**arguments | {"cache": cache})


@pytest.mark.parametrize("name", ["DynamicSlidingWindowLayer", "LinearAttentionLayer"])
def test_layers_that_cannot_be_rolled_back_are_refused_by_name(name):
    from transformers import cache_utils

    layer = getattr(cache_utils, name)
    cache = DynamicCache()
    cache.layers = [layer(sliding_window=4) if "Sliding" in name else layer()]
    with pytest.raises(UnsupportedModelError, match=f"layer 0 of the cache is a {name}; only DynamicLayer and Static"):
        realign_cache(**filled() | {"cache": cache})
