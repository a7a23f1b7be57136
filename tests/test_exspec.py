"""EXSPEC equals the target's own greedy decoding, whoever comes and goes, and one request's trouble is its own."""

import functools
import gc
import itertools
import os
from collections import Counter

import pytest
import torch
from decoding import NoisyOracleDrafter, plant_in_attention
from observers import observe
from test_planted_bugs import PLANTS
from tiny_models import DRAFT_NOISE, FAMILIES, greedy_oracle, make_draft, make_model, make_prompts

from specdec_fast import EXSpec, ModelDrafter, NgramDrafter, SelfDrafter
from specdec_fast.decoding.rounds import Rounds
from specdec_fast.drafters import Drafter, DraftRun, Drafts
from specdec_fast.errors import InputError
from specdec_fast.exspec import executor
from specdec_fast.layouts import LAYOUTS
from specdec_fast.layouts.padded import gathered
from specdec_fast.layouts.ragged import RaggedPool

NEW_TOKENS = 24
LENGTHS = [1, 9, 4, 15, 2, 30, 3, 7, 12, 5, 1, 6, 40, 8]


@functools.cache
def model_of(family):
    """Shared, so that what it decodes by itself is decoded once."""
    return make_model(family, seed=1)


@functools.cache
def drafter_of(model, kind="model"):
    if kind == "model":
        return ModelDrafter(make_draft(model, DRAFT_NOISE[model.config.model_type.removesuffix("_text")], 11))
    return NgramDrafter() if kind == "ngram" else SelfDrafter(model, [0, 2])


@pytest.fixture
def accepted_by_round(monkeypatch):
    """Accepted drafts by round and row."""
    rounds, verify = [], Rounds.verify

    def logged(self, rows, drafts):
        outcomes, stay = verify(self, rows, drafts)
        rounds.append([x.accepted for x, drafted in zip(outcomes, drafts.counts, strict=True) if drafted])
        return outcomes, stay

    monkeypatch.setattr(Rounds, "verify", logged)
    return rounds


def wrong_rows(model, prompts, rows, eos=None):
    assert [row.index for row in rows] == list(range(len(prompts)))
    wrong = []
    for row, prompt in zip(rows, prompts, strict=True):
        ids, new = (prompt["input_ids"], prompt["max_new_tokens"]) if isinstance(prompt, dict) else (prompt, NEW_TOKENS)
        if row.error or row.token_ids != greedy_oracle(model, ids, new, eos):
            wrong.append(row)
    return wrong


def goes_wrong(decoder, prompts):
    """True if a row differs, or the run fails by itself."""
    try:
        rows = decoder.generate_all(prompts, max_new_tokens=NEW_TOKENS, eos_token_id=[])
    except InputError:
        return True
    return bool(wrong_rows(decoder.target, prompts, rows))


def mixed_prompts(seed):
    """Prompts of many lengths, one of them with many new tokens and some that end at once."""
    prompts = make_prompts(LENGTHS, seed)
    prompts[3] = {"input_ids": prompts[3], "max_new_tokens": 90}
    prompts[6] = {"input_ids": prompts[6], "max_new_tokens": 1}
    prompts[10] = {"input_ids": prompts[10], "max_new_tokens": 2}
    return prompts


@pytest.mark.parametrize(
    ("family", "kind"), [*((family, "model") for family in FAMILIES), ("llama", "self"), ("gemma3", "ngram")]
)
def test_equals_greedy_at_batch_one(family, kind, accepted_by_round):
    model = model_of(family)
    prompts = mixed_prompts(1)
    drafter = drafter_of(model, kind)
    for batch_size, window, k, prefill in [(1, 1, 3, 512), (3, 3, 5, 9), (4, 16, 2, 20), (20, None, 4, 512)]:
        decoder = EXSpec(
            model, drafter, batch_size=batch_size, window=window, num_draft_tokens=k, prefill_tokens=prefill
        )
        rows = decoder.generate_all(prompts, max_new_tokens=NEW_TOKENS, eos_token_id=[])
        assert not wrong_rows(model, prompts, rows)
    assert sum(len(set(accepted)) > 1 for accepted in accepted_by_round) > 5
    assert sum(len(set(row.token_ids)) for row in rows) / len(rows) > 8


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_rows_equal_greedy_at_batch_one(family, accepted_by_round):
    model = model_of(family)
    prompts = mixed_prompts(1)
    for batch_size, window, k in [(4, 8, 5), (3, 7, 5), (5, 5, 4)]:
        decoder = EXSpec(
            model, drafter_of(model), batch_size=batch_size, window=window, num_draft_tokens=k, layout="padded"
        )
        stream = decoder.generate(prompts, max_new_tokens=NEW_TOKENS, eos_token_id=[])
        rows = sorted(stream, key=lambda row: row.index)
        assert not wrong_rows(model, prompts, rows)
        assert len({row.record.started for row in rows}) > 2
        assert stream.stats.bytes_moved > 0 and not stream._engine.executor.slots
    assert sum(len(set(accepted)) > 1 for accepted in accepted_by_round) > 5


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_greedy_for_every_window(family, layout):
    for seed, batch_size, times in itertools.product(range(3), (1, 2, 3, 5, 8), (1, 2, 4)):
        model, prompts = make_model(family, seed), mixed_prompts(seed)
        decoder = EXSpec(
            model,
            drafter_of(model),
            batch_size=batch_size,
            window=times * batch_size,
            prefill_tokens=16,
            layout=layout,
        )
        rows = decoder.generate_all(prompts, max_new_tokens=NEW_TOKENS, eos_token_id=[])
        assert not wrong_rows(model, prompts, rows)


@pytest.mark.parametrize(("family", "layout"), [*((family, "ragged") for family in FAMILIES), ("llama", "padded")])
def test_early_ends_let_others_in(family, layout):
    model = make_model(family, seed=4)
    prompts = make_prompts(LENGTHS, 4)
    texts = [greedy_oracle(model, prompt, NEW_TOKENS) for prompt in prompts]
    eos = Counter(token for text in texts for token in set(text[2:])).most_common(1)[0][0]
    drafter = NoisyOracleDrafter(model, prompts, NEW_TOKENS, seed=0, wrong=0.2)
    decoder = EXSpec(model, drafter, batch_size=3, layout=layout)
    rows = decoder.generate_all(prompts, max_new_tokens=NEW_TOKENS, eos_token_id=eos)
    assert not wrong_rows(model, prompts, rows, eos)
    for row in rows:
        assert row.finish_reason == ("eos" if row.token_ids[-1] == eos else "length")
        assert len(row.token_ids) == 1 + row.accepted + row.rounds or row.finish_reason == "eos"
    assert {row.finish_reason for row in rows} == {"eos", "length"}
    assert len({row.record.started for row in rows}) > 4


def test_prompts_are_read_as_there_is_room_and_rows_come_as_they_end():
    model = model_of("llama")
    read = []

    def source():
        for index, prompt in enumerate(mixed_prompts(1)):
            read.append(index)
            yield prompt

    decoder = EXSpec(model, drafter_of(model), batch_size=2, window=4)
    order = []
    for row in decoder.generate(source(), max_new_tokens=NEW_TOKENS, eos_token_id=[]):
        order.append(row.index)
        # the rows of the window, and one that waits
        assert len(read) <= len(order) + 4
    assert sorted(order) == read and order != read
    assert order.index(3) > 5


@pytest.mark.parametrize("plant", PLANTS["ragged"])
def test_planted_bug_is_seen(plant, monkeypatch):
    monkeypatch.setattr("specdec_fast.exspec.engine.self_check", lambda *_: None)
    monkeypatch.setattr("specdec_fast.drafters.model.self_check", lambda *_: None)
    plant(monkeypatch)
    model, prompts = model_of("llama"), mixed_prompts(1)
    decoder = EXSpec(model, drafter_of(model), batch_size=4, prefill_tokens=8)
    assert goes_wrong(decoder, prompts)


def chunks_out_of_place(monkeypatch):
    """A piece of a prompt starts one token late."""
    segment = executor.Segment
    monkeypatch.setattr(executor, "Segment", lambda slot, start, size: segment(slot, start + 1, max(1, size - 1)))


def slots_not_followed(monkeypatch):
    """Rows are mixed up when the pool takes another shape."""
    resize = RaggedPool.resize

    def unfollowed(self, num_slots, columns):
        went_to = resize(self, num_slots, columns)
        return dict(zip(went_to, reversed(went_to.values()), strict=True))

    monkeypatch.setattr(RaggedPool, "resize", unfollowed)


def chunks_see_the_future(monkeypatch):
    """The last query of a piece that rides along sees one more column than there is."""
    plant_in_attention(monkeypatch, lambda segments: [s._replace(start=s.start + (s.size > 6)) for s in segments])


def gathered_a_column_off(monkeypatch):
    """Rows shorter than the longest land one column too far."""
    right = gathered.GatheredLayer._gathered

    def skewed(self, pool):
        out = right(self, pool)
        for b, s in enumerate(self.cache.segments):
            if s.end < out.shape[2]:
                out[b] = out[b].roll(1, 1)
        return out

    monkeypatch.setattr(gathered.GatheredLayer, "_gathered", skewed)


def padding_is_seen(monkeypatch):
    """Columns that no row has written are attended to."""
    right = gathered.reference.attention_mask
    monkeypatch.setattr(gathered.reference, "attention_mask", lambda start, *rest: right(start * 0, *rest))


def text_for_positions(monkeypatch):
    """Position IDs count the padding in."""
    forward = gathered.compat.call

    def skewed(model, traits, cache, ids, positions, masks, keep):
        first = positions[:, -1:] - positions.shape[1] + 1
        return forward(model, traits, cache, ids, (positions - first.clamp(min=0) % 3), masks, keep)

    monkeypatch.setattr(gathered.compat, "call", skewed)


@pytest.mark.parametrize("plant", [None, gathered_a_column_off, padding_is_seen, text_for_positions])
def test_bug_in_gathered_batches_is_seen(plant, monkeypatch):
    monkeypatch.setattr("specdec_fast.exspec.engine.self_check", lambda *_: None)
    monkeypatch.setattr("specdec_fast.drafters.model.self_check", lambda *_: None)
    model = model_of("llama")
    prompts = mixed_prompts(1)
    decoder = EXSpec(model, drafter_of(model), batch_size=3, num_draft_tokens=4, layout="padded")
    if plant:
        plant(monkeypatch)
    assert goes_wrong(decoder, prompts) == bool(plant)


@pytest.mark.parametrize("plant", [None, chunks_out_of_place, slots_not_followed, chunks_see_the_future])
def test_bug_in_what_is_new_is_seen(plant, monkeypatch):
    model = model_of("llama")
    prompts = mixed_prompts(1)
    decoder = EXSpec(model, drafter_of(model), batch_size=3, prefill_tokens=8, kv_budget_bytes=budget_for(300))
    if plant:
        plant(monkeypatch)
    assert goes_wrong(decoder, prompts) == bool(plant)


def budget_for(columns):
    """Bytes for so many columns of a tiny Llama and its draft, in float64."""
    return 2 * 3 * 2 * 2 * 16 * 8 * columns


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_keeps_the_budget_and_comes_back(layout):
    model = model_of("llama")
    prompts = make_prompts([5] * 20, 1)
    prompts[2] = {"input_ids": prompts[2], "max_new_tokens": 400}
    decoder = EXSpec(model, NgramDrafter(), batch_size=4, layout=layout, kv_budget_bytes=budget_for(500) // 2)
    stream = decoder.generate(prompts, max_new_tokens=10, eos_token_id=[])
    widths, held, alone = [], [], []
    stream._on_round = lambda _: (
        widths.append(stream._engine.executor.pool.capacity),
        held.append(stream.kv_bytes),
        alone.append(len(stream._engine.scheduler.active)),
    )
    rows = sorted(stream, key=lambda row: row.index)
    assert [row.token_ids for row in rows] == [
        greedy_oracle(model, p["input_ids"], 400) if isinstance(p, dict) else greedy_oracle(model, p, 10)
        for p in prompts
    ]
    assert max(held) <= budget_for(500) // 2
    assert max(widths) > 400 and widths[-1] < 200
    assert 1 in alone[3:-3] and max(alone) > 3
    assert not stream._engine.rows and not stream._engine.executor.slots


def test_a_budget_without_room_for_a_row_refuses_that_row():
    model = model_of("llama")
    decoder = EXSpec(model, NgramDrafter(), batch_size=2, kv_budget_bytes=budget_for(30) // 2)
    prompts = make_prompts([3, 20, 4], 1)
    rows = decoder.generate_all(prompts, max_new_tokens=12, eos_token_id=[])
    assert [bool(row.error) for row in rows] == [False, True, False]
    assert "may grow to 32 tokens (20 + 12); there is room for 30" in rows[1].error
    assert rows[2].token_ids == greedy_oracle(model, prompts[2], 12)


BAD_PROMPTS = [
    ([], "empty prompt"),
    ("text", "of type str"),
    (None, "of type NoneType"),
    ([5, 6.0], "a list of something else"),
    ([5, 97], "vocabulary of 97"),
    ([-1, 5], "vocabulary of 97"),
    ([5] * 500, "500 tokens; with max_new_tokens=24 it outgrows the most of 512"),
    ({"input_ids": [5], "max_new_tokens": 0}, "max_new_tokens=0"),
    ({"input_ids": [5], "temperature": 0}, "the key 'temperature'"),
    ({}, "of type NoneType"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prompt_that_cannot_be_decoded_ends_alone(layout):
    model = model_of("llama")
    good = make_prompts([5] * len(BAD_PROMPTS), 1)
    prompts = [prompt for pair in zip(good, (bad for bad, _ in BAD_PROMPTS), strict=True) for prompt in pair]
    decoder = EXSpec(model, NgramDrafter(), batch_size=3, layout=layout)
    rows = decoder.generate_all(prompts, max_new_tokens=NEW_TOKENS, eos_token_id=[])
    assert [row.index for row in rows] == list(range(len(prompts)))
    assert [row.token_ids for row in rows[::2]] == [greedy_oracle(model, prompt, NEW_TOKENS) for prompt in good]
    for row, (_, reason) in zip(rows[1::2], BAD_PROMPTS, strict=True):
        assert row.finish_reason == "error" and reason in row.error and row.token_ids == []
        assert row.record.ended_at is not None and row.record.started is None


class FailingDrafter(Drafter, DraftRun):
    """Raises, or drafts nonsense, whenever one of some rows is among those to draft for."""

    def __init__(self, inner, rows, how):
        self.inner, self.bad, self.how = inner, rows, how

    def check(self, target):
        self.inner.check(target)

    def begin(self, batch, longest):
        self.run = self.inner.begin(batch, longest)
        return self

    def draft(self, texts, limits):
        drafts = self.run.draft(texts, limits)
        if not self.bad & {row for row, _ in texts}:
            return drafts
        if self.how == "raise":
            raise RuntimeError("no luck")
        return Drafts(drafts.ids, [limit + 1 for limit in limits])

    def forget(self, row):
        self.run.forget(row)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "how"), [("model", "raise"), ("ngram", "too many")])
def test_a_draft_that_fails_ends_its_row_only(kind, how, layout):
    model = model_of("llama")
    prompts = make_prompts(LENGTHS, 1)
    bad = {1, 5, 6}
    drafter = FailingDrafter(drafter_of(model, kind), bad, how)
    decoder = EXSpec(model, drafter, batch_size=4, layout=layout)
    rows = decoder.generate_all(prompts, max_new_tokens=NEW_TOKENS, eos_token_id=[])
    for row, prompt in zip(rows, prompts, strict=True):
        want = greedy_oracle(model, prompt, NEW_TOKENS)
        if row.index in bad:
            assert row.finish_reason == "error" and row.token_ids == want[: len(row.token_ids)] != []
            assert ("no luck" if how == "raise" else "FailingDrafter drafted") in row.error
        else:
            assert (row.error, row.token_ids) == (None, want)


def test_when_every_draft_fails_the_run_still_ends():
    model = model_of("llama")
    drafter = FailingDrafter(NgramDrafter(), set(range(9)), "raise")
    rows = EXSpec(model, drafter, batch_size=4).generate_all(make_prompts([3] * 9, 1), max_new_tokens=5)
    assert [row.finish_reason for row in rows] == ["error"] * 9


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cancelled_rows_end_and_others_go_on(layout):
    model = model_of("llama")
    prompts = make_prompts(LENGTHS, 1)
    stream = EXSpec(model, drafter_of(model), batch_size=3, window=6, layout=layout).generate(
        prompts, max_new_tokens=NEW_TOKENS, eos_token_id=[]
    )
    rows = [next(stream)]
    under_way = stream._engine.scheduler.active
    assert all(stream.cancel(index) for index in under_way[:2])
    assert not stream.cancel(rows[0].index) and not stream.cancel(13) and not stream.cancel(under_way[0])
    rows += stream
    assert len(rows) == len(prompts)
    for row in rows:
        want = greedy_oracle(model, prompts[row.index], NEW_TOKENS)
        assert (row.finish_reason == "cancelled") == (row.index in under_way[:2])
        assert row.token_ids == (want if row.error is None else want[: len(row.token_ids)])


def test_an_error_of_the_target_is_raised_after_what_had_ended():
    model = make_model("llama", seed=1)
    stream = EXSpec(model, NgramDrafter(), batch_size=2).generate(
        mixed_prompts(1), max_new_tokens=NEW_TOKENS, eos_token_id=[]
    )
    first = next(stream)
    assert first.token_ids
    observe(model.model.layers[1], lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(stream)
    assert model.config._attn_implementation == "sdpa"


def test_records_and_counters_add_up():
    model = model_of("llama")
    prompts = mixed_prompts(1)
    stream = EXSpec(model, drafter_of(model), batch_size=3, prefill_tokens=16).generate(
        prompts, max_new_tokens=NEW_TOKENS, eos_token_id=[]
    )
    rows = list(stream)
    stats = stream.stats
    assert stats.tokens == sum(len(row.token_ids) for row in rows)
    assert stats.drafted == sum(row.drafted for row in rows) and stats.accepted == sum(row.accepted for row in rows)
    assert stats.row_rounds == sum(row.rounds for row in rows)
    assert stats.bytes_moved == 0 and stats.seconds > 0 and all(s > 0 for s in stats.stage_seconds.values())
    assert all(len(row.token_ids) == 1 + row.accepted + row.rounds for row in rows)
    for row in rows:
        record = row.record
        assert 0 <= record.queued <= record.started <= record.first_token <= record.ended
        assert 0 <= record.queued_at <= record.started_at <= record.first_token_at <= record.ended_at <= stats.seconds
        assert row.rounds < record.rounds <= record.ended - record.started + 1
    long_prompt = next(row for row in rows if row.index == 12)
    assert long_prompt.record.rounds - long_prompt.rounds >= 3, "40 tokens at 16 a round are 3 pieces"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 4, "window": 3}, "window=3"),
        ({"layout": "square"}, "layout='square'"),
        ({"max_wait_rounds": 0}, "max_wait_rounds=0"),
        ({"max_length": 1}, "max_length=1"),
        ({"max_length": 513}, "max_length=513"),
        ({"kv_budget_bytes": 0}, "kv_budget_bytes=0"),
        ({"prefill_tokens": 0}, "prefill_tokens=0"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(InputError, match=message):
        EXSpec(make_model("llama", seed=0), NgramDrafter(), **options)


def test_a_run_needs_a_limit_and_a_row_in_the_budget():
    model = make_model("llama", seed=0)
    with pytest.raises(InputError, match="max_new_tokens=0"):
        EXSpec(model, NgramDrafter()).generate([[5]], max_new_tokens=0)
    with pytest.raises(InputError, match="kv_budget_bytes=7"):
        EXSpec(model, NgramDrafter(), kv_budget_bytes=7).generate([[5]], max_new_tokens=1)


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("count", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_memory_stays_flat(count):
    model = make_model("llama", seed=1, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    shapes = torch.randint(1, 13, (count, 2), generator=generator).tolist()
    prompts = ({"input_ids": [5 + i % 90] * n, "max_new_tokens": new} for i, (n, new) in enumerate(shapes))
    stream = EXSpec(model, NgramDrafter(), batch_size=16).generate(prompts, max_new_tokens=1, eos_token_id=[7])
    seen = 0
    for row in stream:
        seen += 1
        assert row.error is None
        if seen == count // 4:
            gc.collect()
            resident, objects = resident_bytes(), len(gc.get_objects())
    gc.collect()
    assert seen == count
    assert resident_bytes() - resident < 8 << 20
    assert len(gc.get_objects()) - objects < 500
    engine = stream._engine
    pool = engine.executor.pool
    assert not engine.rows and not engine.executor.slots and not engine.executor.rounds.drafting.index_of
    assert sorted(pool._free) == list(range(pool.num_slots)) and pool.lengths == [0] * pool.num_slots


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_is_over_after_an_error(layout):
    model = make_model("llama", seed=1)
    stream = EXSpec(model, NgramDrafter(), layout=layout).generate([[5, 6]] * 3, max_new_tokens=NEW_TOKENS)
    handle = observe(model, lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(stream)
    handle.remove()
    assert list(stream) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stream_may_be_read_in_and_out_of_inference_mode(layout):
    model, prompts = make_model("llama", seed=1), make_prompts([4, 9, 2], 1)
    stream = EXSpec(model, model, layout=layout, batch_size=2).generate(
        prompts, max_new_tokens=NEW_TOKENS, eos_token_id=[]
    )
    with torch.inference_mode():
        rows = [next(stream)]
    rows += stream
    for row in rows:
        assert row.token_ids == greedy_oracle(model, prompts[row.index], NEW_TOKENS)


def test_the_layout_may_be_left_open_and_what_is_no_list_is_named():
    model = make_model("llama", seed=1)
    decoder = EXSpec(model, NgramDrafter(), layout=None)
    assert decoder.layout == "ragged"
    with pytest.raises(InputError, match="prompts is of type int; need an iterable"):
        decoder.generate(5, max_new_tokens=3)


def test_more_drafts_than_a_row_can_use_cost_no_memory():
    model = make_model("llama", seed=1)
    few, many = (
        EXSpec(model, NgramDrafter(), layout="padded", batch_size=2, num_draft_tokens=k).generate(
            [[5, 6, 5, 6]] * 3, max_new_tokens=8, eos_token_id=[]
        )
        for k in (8, 100_000)
    )
    assert [row.token_ids for row in many] == [greedy_oracle(model, [5, 6, 5, 6], 8)] * 3
    assert list(few) and many.kv_bytes < 4 * few.kv_bytes
