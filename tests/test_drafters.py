"""Drafters: what they propose, what they share, what they refuse."""

import pytest
import torch
from decoding import decode
from observers import observe
from tiny_models import DRAFT_NOISE, FAMILIES, greedy_oracle, left_pad, make_draft, make_model, make_prompts
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec_fast import EQSpec, ModelDrafter, NgramDrafter, SelfDrafter
from specdec_fast.drafters import Drafter, DraftRun, Drafts
from specdec_fast.drafters.self_draft import layer_subset, parse_layers
from specdec_fast.errors import InputError
from specdec_fast.integrations import compat
from specdec_fast.layouts import LAYOUTS
from specdec_fast.layouts.padded.batch import PaddedBatch


def lookup(text, limit, **options):
    batch = PaddedBatch(torch.tensor([text]), [len(text)], 10, 5, [], 511)
    drafts = NgramDrafter(**options).begin(batch, 20).draft([(0, text)], [limit])
    assert drafts.counts == [drafts.ids.shape[1]]
    return drafts.ids[0].tolist()


def test_ngram_continues_the_latest_longest_match():
    assert lookup([1, 2, 3, 4, 9, 1, 2, 3], 2) == [4, 9]
    assert lookup([7, 3, 5, 8, 3, 6, 3], 1) == [6], "the latest of two matches of length one"
    assert lookup([1, 2, 3, 8, 3, 5, 2, 3], 1) == [8], "a longer match beats a later one"
    assert lookup([1, 2, 3], 4) == []
    assert lookup([5], 4) == []


def test_ngram_continues_a_repetition_periodically():
    assert lookup([1, 2, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert lookup([4, 4], 3) == [4, 4, 4]


def test_ngram_rows_without_a_match_draft_nothing():
    texts = [(0, [1, 2, 1, 2]), (5, [6, 7, 8, 9]), (2, [3, 3])]
    batch = PaddedBatch(torch.ones(3, 4, dtype=torch.int64), [4, 4, 2], 10, 5, [], 511)
    drafts = NgramDrafter().begin(batch, 20).draft(texts, [2, 5, 0])
    assert drafts.counts == [2, 0, 0]
    assert drafts.ids.tolist() == [[1, 2], [0, 0], [0, 0]]


def test_ngram_indexes_each_token_once_and_keeps_batches_apart():
    batch = PaddedBatch(torch.ones(1, 4, dtype=torch.int64), [4], 10, 5, [], 511)
    drafter = NgramDrafter()
    run = drafter.begin(batch, 20)
    text = [1, 2, 3, 1]
    assert run.draft([(0, text)], [1]).ids.tolist() == [[2]]
    text += [9, 2, 5, 1]
    assert run.draft([(0, text)], [1]).ids.tolist() == [[9]], "tokens added since were indexed"
    assert drafter.begin(batch, 20).draft([(0, [9, 9, 9, 1])], [1]).ids.shape == (1, 0)


class Scripted(Drafter, DraftRun):
    def __init__(self, drafts):
        self.drafts = drafts

    def begin(self, batch, longest):
        return self

    def draft(self, texts, limits):
        return self.drafts


@pytest.mark.parametrize(
    ("ids", "counts", "message"),
    [
        (torch.zeros(2, 9, dtype=torch.int64), [9, 9], r"drafted \[9, 9\] tokens; need 0 to \[3, 3\]"),
        (torch.zeros(2, 3, dtype=torch.int64), [1, -1], r"drafted \[1, -1\]"),
        (torch.zeros(2, 3, dtype=torch.int64), [1], r"drafted \[1\]"),
        (torch.zeros(2, 1, dtype=torch.int64), [1, 2], r"\[2, 1\]; need int64 \[2, 2\]"),
        (torch.zeros(1, 3, dtype=torch.int64), [1, 1], r"\[1, 3\]; need"),
        (torch.zeros(2, 3, dtype=torch.int32), [1, 1], "int32"),
    ],
)
def test_a_drafter_that_breaks_its_contract_is_named(ids, counts, message):
    decoder = EQSpec(make_model("llama", seed=1), Scripted(Drafts(ids, counts)), num_draft_tokens=3)
    with pytest.raises(InputError, match=f"Scripted {message}|Scripted drafted ids .*{message}"):
        decoder.generate(torch.tensor([[5, 6], [7, 8]]), max_new_tokens=20, eos_token_id=[])


@pytest.mark.parametrize("filler", [-1, 96, 10**9])
def test_filler_and_ids_outside_the_vocabulary_are_only_wrong_drafts(filler):
    model = make_model("llama", seed=1)
    prompts = [[5, 6], [7, 8]]
    drafter = Scripted(None)
    drafter.draft = lambda texts, limits: Drafts(torch.full((2, 5), filler), [0, min(1, limits[1])])
    result = EQSpec(model, drafter).generate(torch.tensor(prompts), max_new_tokens=4, eos_token_id=[])
    assert [row.token_ids for row in result.rows] == [greedy_oracle(model, prompt, 4) for prompt in prompts]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_a_decoder_can_be_used_inside_its_own_callback(kind, layout):
    model = make_model("llama", seed=1)
    drafter = ModelDrafter(make_draft(model, DRAFT_NOISE["llama"], 5)) if kind == "model" else NgramDrafter()
    decoder = EQSpec(model, drafter, num_draft_tokens=3, layout=layout)
    prompts, inner = make_prompts([3, 9, 5], 1), []

    def generate(**callbacks):
        result = decoder.generate(*left_pad(prompts, 0), max_new_tokens=12, eos_token_id=[], **callbacks)
        return [row.token_ids for row in result.rows]

    outer = generate(on_round=lambda _: inner.append(generate()))
    assert outer == inner[0] == [greedy_oracle(model, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize(("low", "high"), [(0, 3), (3, 2)])
def test_ngram_sizes_are_checked(low, high):
    with pytest.raises(InputError, match="min_ngram"):
        NgramDrafter(max_ngram=high, min_ngram=low)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_perfect_draft_is_always_accepted(family, layout):
    """Any disagreement between the draft's cache and the target's would show here."""
    model = make_model(family, seed=3)
    input_ids, mask = left_pad(make_prompts([1, 9, 4, 15], 3), 0)
    result = EQSpec(model, ModelDrafter(make_draft(model, 0.0, 0)), num_draft_tokens=4, layout=layout).generate(
        input_ids, mask, max_new_tokens=26, eos_token_id=[]
    )
    assert result.stats.accepted == result.stats.drafted == 4 * 20
    assert result.stats.rounds == 5


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_draft_acceptance_does_not_depend_on_the_batch(family, layout):
    """A stale draft cache leaves outputs equal and only lowers acceptance, so acceptance itself is compared."""
    model = make_model(family, seed=2)
    drafter = ModelDrafter(make_draft(model, DRAFT_NOISE[family], 5))
    prompts = make_prompts([1, 9, 4, 15, 2, 30], 4)
    decoder = EQSpec(model, drafter, num_draft_tokens=4, layout=layout)
    input_ids, mask = left_pad(prompts, 0)
    together = decoder.generate(input_ids, mask, max_new_tokens=30, eos_token_id=[])
    for row, prompt in zip(together.rows, prompts, strict=True):
        alone = decoder.generate(torch.tensor([prompt]), max_new_tokens=30, eos_token_id=[]).rows[0]
        assert (row.rounds, row.drafted, row.accepted) == (alone.rounds, alone.drafted, alone.accepted)


def test_draft_never_prefills_twice():
    model = make_model("llama", seed=2)
    draft = make_draft(model, DRAFT_NOISE["llama"], 5)
    widths = []
    drafter = ModelDrafter(draft)
    decode(model, drafter, make_prompts([4], 0), k=3)
    observe(draft, lambda _, kwargs: widths.append(kwargs["input_ids"].shape[1]))
    decode(model, drafter, make_prompts([1, 9, 4, 15], 3), k=3)
    assert widths[0] == 16 and set(widths[1:]) == {1, 2}


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_subset_shares_weights_and_equals_an_independent_model(family):
    model = make_model(family, seed=1)
    keep = [0, 2]
    subset = layer_subset(model, keep)
    own = {p.data_ptr() for p in model.parameters()}
    assert all(p.data_ptr() in own for p in subset.parameters())
    independent = make_model(family, seed=1)
    config = compat.text_config(independent)
    config.num_hidden_layers = 2
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in keep]
    independent.model.layers = torch.nn.ModuleList(independent.model.layers[i] for i in keep)
    for position, layer in enumerate(independent.model.layers):
        layer.self_attn.layer_idx = position
    ids = torch.tensor(make_prompts([20], 1))
    assert torch.equal(subset(input_ids=ids).logits, independent(input_ids=ids).logits)
    assert len(model.model.layers) == compat.text_config(model).num_hidden_layers > 2
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == list(range(len(model.model.layers)))


def test_layer_specs():
    assert parse_layers("0-2,4", 6) == [0, 1, 2, 4]
    assert parse_layers("~1,3-4", 6) == [0, 2, 5]
    assert parse_layers(" 0 - 1 , 5", 6) == [0, 1, 5]
    for bad in ("", "a", "1-", "-1", "~", "²", "0-²", "9" * 5000):
        with pytest.raises(InputError, match="neither an index nor a range"):
            parse_layers(bad, 6)
    for bad in ("6", "~6", "4-6", "0-999999999", "3-2"):
        with pytest.raises(InputError, match="not within the model's layers 0-5"):
            parse_layers(bad, 6)


@pytest.mark.parametrize("layers", [[], [3], [-1], [1, 0], [1, 1]])
def test_layers_a_model_does_not_have_are_refused(layers):
    with pytest.raises(InputError, match="layers"):
        SelfDrafter(make_model("llama", seed=0), layers)


def test_a_self_drafter_serves_its_own_target_only():
    with pytest.raises(InputError, match="another model"):
        EQSpec(make_model("llama", seed=0), SelfDrafter(make_model("llama", seed=0), [0]))


def tokenizer(words):
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=words[0])


def widened(model, vocab_size):
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    return model


def test_vocabularies_are_compared():
    target, draft = make_model("llama", seed=0), make_model("llama", seed=1)
    one, other = tokenizer(["<unk>", "a", "b"]), tokenizer(["<unk>", "b", "a"])
    with pytest.raises(InputError, match="2 of 3 entries differ, for example 'a'"):
        EQSpec(target, ModelDrafter(draft, tokenizer=one, target_tokenizer=other))
    EQSpec(target, ModelDrafter(draft, tokenizer=one, target_tokenizer=one))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("target_size", "draft_size"), [(97, 128), (128, 97)])
def test_sizes_that_differ_by_padding_are_fine_once_the_vocabularies_are_known(target_size, draft_size, layout):
    target = widened(make_model("llama", seed=1), target_size)
    draft = widened(make_draft(make_model("llama", seed=1), 0.02, 3), draft_size)
    with pytest.raises(InputError, match=f"draft vocab_size {draft_size} is not target vocab_size {target_size}"):
        EQSpec(target, ModelDrafter(draft))
    one = tokenizer(["<unk>", "a", "b"])
    drafter = ModelDrafter(draft, tokenizer=one, target_tokenizer=one)
    seen = decode(target, drafter, make_prompts([3, 7, 1], 2), k=3, layout=layout)
    assert seen.wrong == 0
