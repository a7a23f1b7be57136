"""EQSPEC equals the target's own greedy decoding, row by row, in float64."""

import itertools
from collections import Counter

import pytest
import torch
from decoding import Comparison, NoisyOracleDrafter, decode
from observers import observe
from tiny_models import DRAFT_NOISE, FAMILIES, greedy_oracle, left_pad, make_draft, make_model, make_prompts

from specdec_fast import EQSpec, ModelDrafter, NgramDrafter, SelfDrafter
from specdec_fast.decoding import eqspec
from specdec_fast.errors import InputError, UnsupportedModelError
from specdec_fast.layouts import LAYOUTS

LENGTHS = [1, 9, 4, 15, 2, 30, 3, 7, 12]


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return request.param


def drafter_of(kind, model, seed=11):
    if kind == "model":
        family = model.config.model_type.removesuffix("_text")
        return ModelDrafter(make_draft(model, DRAFT_NOISE[family], seed))
    return NgramDrafter() if kind == "ngram" else SelfDrafter(model, [0, 2])


@pytest.mark.parametrize("kind", ["model", "ngram", "self"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_greedy_at_batch_one(family, kind, layout):
    model = make_model(family, seed=1)
    drafter = drafter_of(kind, model)
    seen = Comparison()
    for k, batch_size in [(1, 9), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (7, 7), (8, 8), (16, 5), (4, 1)]:
        prompts = make_prompts((LENGTHS[k:] + LENGTHS[:k])[:batch_size], seed=k)
        decode(model, drafter, prompts, k=k, into=seen, layout=layout)
    assert seen.wrong == 0
    assert seen.ragged_rounds > 0
    assert seen.distinct_tokens > 8


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "ngram", "self"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_greedy_for_every_batch_size_and_draft_length(family, kind, layout):
    seen = Comparison()
    for seed in range(3):
        model = make_model(family, seed)
        drafter = drafter_of(kind, model, seed + 11)
        for batch_size, k in itertools.product(range(1, 10), (*range(1, 9), 16)):
            decode(model, drafter, make_prompts(LENGTHS[:batch_size], seed), k=k, into=seen, layout=layout)
    assert seen.wrong == 0 and seen.ragged_rounds > 0 and seen.distinct_tokens > 8


@pytest.mark.parametrize("family", FAMILIES)
def test_every_acceptance_pattern(family, layout):
    """Drafts from the oracle, spoiled at random: rows accept 0..K and draft 0..K in the same round."""
    model = make_model(family, seed=2)
    seen = Comparison()
    for seed in range(6):
        prompts = make_prompts(LENGTHS[: 3 + seed], seed)
        drafter = NoisyOracleDrafter(model, prompts, 40, seed)
        decode(model, drafter, prompts, k=6, max_new_tokens=40, into=seen, layout=layout)
    assert seen.wrong == 0
    assert seen.accepted == set(range(7))
    assert seen.ragged_rounds > 50


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations(attention, layout):
    model = make_model("llama", seed=3, dtype=torch.float32)
    model.set_attn_implementation(attention)
    seen = decode(model, drafter_of("model", model), make_prompts(LENGTHS, 3), k=4, layout=layout)
    assert seen.wrong == 0 and seen.ragged_rounds > 0


def common_token(model, prompts, max_new_tokens):
    """A token that ends as many rows as possible, at different places."""
    texts = [greedy_oracle(model, prompt, max_new_tokens) for prompt in prompts]
    return Counter(token for text in texts for token in set(text[2:])).most_common(1)[0][0]


@pytest.mark.parametrize("family", FAMILIES)
def test_eos_inside_a_block_ends_the_row_there(family, layout):
    model = make_model(family, seed=4)
    prompts = make_prompts(LENGTHS, 4)
    eos = common_token(model, prompts, 30)
    drafter = NoisyOracleDrafter(model, prompts, 30, seed=0, wrong=0.2)
    input_ids, mask = left_pad(prompts, 0)
    result = EQSpec(model, drafter, num_draft_tokens=5, layout=layout).generate(
        input_ids, mask, max_new_tokens=30, eos_token_id=[eos, 96], pad_token_id=eos
    )
    for prompt, row in zip(prompts, result.rows, strict=True):
        assert row.token_ids == greedy_oracle(model, prompt, 30, [eos, 96])
        assert row.finish_reason == ("eos" if row.token_ids[-1] in (eos, 96) else "length")
    assert len(set(map(len, (row.token_ids for row in result.rows)))) > 2
    assert "eos" in result.finish_reasons


def test_eos_in_the_prompt_does_not_finish_a_row(layout):
    model = make_model("llama", seed=5)
    prompts = [[7, 2, 9, 2], [2], [2, 2, 2, 11, 12, 2]]
    seen = decode(model, drafter_of("model", model), prompts, k=4, eos=2, layout=layout)
    assert seen.wrong == 0
    assert min(map(len, seen.texts)) > 1


def test_finished_rows_leave_the_batch():
    model = make_model("llama", seed=4)
    prompts = make_prompts(LENGTHS, 4)
    eos = common_token(model, prompts, 30)
    forwards = []
    observe(model, lambda _, kwargs: forwards.append(kwargs["input_ids"].shape))
    input_ids, mask = left_pad(prompts, 0)
    decoder = EQSpec(model, NgramDrafter(), layout="padded")
    decoder.generate(input_ids, mask, max_new_tokens=1, eos_token_id=[])
    forwards.clear()
    result = decoder.generate(input_ids, mask, max_new_tokens=30, eos_token_id=eos)
    batch_sizes = [shape[0] for shape in forwards]
    assert len(forwards) == result.stats.rounds + 1
    assert sum(batch_sizes[1:]) == sum(row.rounds for row in result.rows) < 9 * result.stats.rounds


def test_sequences_are_shaped_as_transformers_returns_them(layout):
    model = make_model("llama", seed=6)
    prompts = make_prompts([5, 2, 8], 6)
    eos = common_token(model, prompts, 20)
    input_ids, mask = left_pad(prompts, 0)
    result = EQSpec(model, NgramDrafter(), layout=layout).generate(
        input_ids, mask, max_new_tokens=20, eos_token_id=eos, pad_token_id=eos
    )
    width = max(len(row.token_ids) for row in result.rows)
    assert result.sequences.shape == (3, 8 + width)
    assert torch.equal(result.sequences[:, :8], input_ids)
    for row, sequence, length, prompt in zip(
        result.rows, result.sequences.tolist(), result.lengths, prompts, strict=True
    ):
        assert sequence[8 : 8 + len(row.token_ids)] == row.token_ids
        assert set(sequence[8 + len(row.token_ids) :]) <= {eos}
        assert length == len(prompt) + len(row.token_ids)


def test_more_drafts_than_new_tokens_cost_no_memory(layout):
    model = make_model("llama", seed=6)
    result = EQSpec(model, NgramDrafter(), num_draft_tokens=10**9, layout=layout).generate(
        torch.tensor([[5, 6, 5, 6]]), max_new_tokens=8, eos_token_id={7, 8}
    )
    assert result.rows[0].token_ids == greedy_oracle(model, [5, 6, 5, 6], 8, [7, 8])


def test_one_new_token_needs_no_round(layout):
    model = make_model("llama", seed=6)
    prompts = make_prompts([5, 2], 6)
    input_ids, mask = left_pad(prompts, 0)
    result = EQSpec(model, NgramDrafter(), layout=layout).generate(input_ids, mask, max_new_tokens=1, eos_token_id=[])
    assert result.stats.rounds == 0
    assert [row.token_ids for row in result.rows] == [greedy_oracle(model, p, 1) for p in prompts]


def test_drafts_shrink_per_row_near_the_limit(layout):
    model = make_model("llama", seed=7)
    prompts = make_prompts(LENGTHS[:5], 7)
    drafter = NoisyOracleDrafter(model, prompts, 13, seed=1, wrong=0.2)
    drafter_limits = []
    inner = drafter.draft
    drafter.draft = lambda texts, limits: drafter_limits.append(limits) or inner(texts, limits)
    seen = decode(model, drafter, prompts, k=5, max_new_tokens=13, layout=layout)
    assert seen.wrong == 0
    assert all(0 <= limit <= 5 for limits in drafter_limits for limit in limits)
    assert any(len(set(limits)) > 1 for limits in drafter_limits)


def test_callbacks_report_rows_and_rounds_as_they_happen(layout):
    model = make_model("llama", seed=4)
    prompts = make_prompts(LENGTHS, 4)
    eos = common_token(model, prompts, 30)
    input_ids, mask = left_pad(prompts, 0)
    finished, rounds = [], []
    result = EQSpec(model, NgramDrafter(), layout=layout).generate(
        input_ids, mask, max_new_tokens=30, eos_token_id=eos,
        on_finish=lambda row: finished.append((row.index, list(row.token_ids), row.rounds, row.accepted)),
        on_round=lambda stats: rounds.append((stats.rounds, len(finished))),
    )  # fmt: skip
    assert sorted(finished) == [(row.index, row.token_ids, row.rounds, row.accepted) for row in result.rows]
    assert [r for r, _ in rounds] == list(range(1, result.stats.rounds + 1))
    assert rounds[0][1] < rounds[-1][1] == 9


def test_stats_add_up(layout):
    model = make_model("llama", seed=8)
    drafter = drafter_of("model", model)
    prompts = make_prompts(LENGTHS, 8)
    input_ids, mask = left_pad(prompts, 0)
    decoder = EQSpec(model, drafter, layout=layout)
    stats = (result := decoder.generate(input_ids, mask, max_new_tokens=24, eos_token_id=[])).stats
    assert stats.tokens == sum(len(row.token_ids) for row in result.rows) == 9 * 24
    assert stats.accepted == sum(row.accepted for row in result.rows)
    assert stats.drafted == sum(row.drafted for row in result.rows)
    # every token but the prefill's is an accepted draft or the bonus of a round
    assert all(len(row.token_ids) == 1 + row.accepted + row.rounds for row in result.rows)
    assert (stats.bytes_moved > 0) == (layout == "padded") and stats.seconds > 0
    assert all(s > 0 for s in stats.stage_seconds.values())
    assert stats.host_syncs_per_round == 1


def test_uniform_acceptance_and_single_rows_move_nothing():
    model = make_model("llama", seed=8)
    input_ids, mask = left_pad(make_prompts([6], 8) * 4, 0)
    decoder = EQSpec(model, drafter_of("model", model), layout="padded")
    result = decoder.generate(input_ids, mask, max_new_tokens=24, eos_token_id=[])
    assert result.stats.bytes_moved == 0
    result = decoder.generate(input_ids[:1], max_new_tokens=24, eos_token_id=[])
    assert result.stats.bytes_moved == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"input_ids": torch.zeros(2, 3)}, "float32"),
        ({"input_ids": torch.zeros(3, dtype=torch.int64)}, r"\[3\]"),
        ({"input_ids": torch.zeros(0, 3, dtype=torch.int64)}, r"\[0, 3\]"),
        ({"attention_mask": torch.ones(2, 4)}, "attention_mask is"),
        ({"attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])}, "row 1 .* empty prompt"),
        ({"attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}, "row 1 .* left-padded"),
        ({"attention_mask": torch.tensor([[1, 0, 1], [1, 1, 1]])}, "row 0 .* left-padded"),
        ({"input_ids": torch.tensor([[5, 6, 7], [5, 97, 7]])}, "row 1 .* vocabulary of 97"),
        ({"max_new_tokens": 510}, "context of 512"),
        *(({"eos_token_id": eos}, "eos_token_id=") for eos in (1.5, "5", True, [1.7], [None], -1, 10**30)),
    ],
)
def test_bad_input_is_named(change, message):
    model = make_model("llama", seed=0)
    arguments = {"input_ids": torch.tensor([[5, 6, 7], [5, 6, 7]]), "attention_mask": None, "max_new_tokens": 4}
    with pytest.raises(InputError, match=message):
        EQSpec(model, NgramDrafter()).generate(**arguments | change)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"num_draft_tokens": 0}, "num_draft_tokens=0"), ({"layout": "square"}, "layout='square'")],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(InputError, match=message):
        EQSpec(make_model("llama", seed=0), NgramDrafter(), **options)


def test_eos_ids_may_be_a_tensor():
    model = make_model("llama", seed=6)
    for eos in (torch.tensor(7), torch.tensor([7, 8])):
        result = EQSpec(model, NgramDrafter()).generate(
            torch.tensor([[5, 6, 5, 6]]), max_new_tokens=8, eos_token_id=eos
        )
        assert result.rows[0].token_ids == greedy_oracle(model, [5, 6, 5, 6], 8, eos.flatten().tolist())


def test_a_default_layout_that_fails_its_self_check_gives_way(monkeypatch):
    model = make_model("llama", seed=6)
    decoder = EQSpec(model, NgramDrafter())
    check = eqspec.self_check

    def fails_ragged(model, layout, longest):
        if layout == "ragged":
            raise UnsupportedModelError("not this one")
        check(model, layout, longest)

    monkeypatch.setattr(eqspec, "self_check", fails_ragged)
    assert decoder.layout == "ragged"
    result = decoder.generate(torch.tensor([[5, 6, 5, 6]]), max_new_tokens=8, eos_token_id=[])
    assert decoder.layout == "padded"
    assert result.rows[0].token_ids == greedy_oracle(model, [5, 6, 5, 6], 8)
    with pytest.raises(UnsupportedModelError, match="not this one"):
        EQSpec(model, NgramDrafter(), layout="ragged").generate(torch.tensor([[5]]), max_new_tokens=8)
