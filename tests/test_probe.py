"""The probe: every correct decoder is clean, and a planted violation is named with its exact place."""

import importlib.util
from pathlib import Path

import pytest
import torch
from tiny_models import DRAFT_NOISE, FAMILIES, greedy_oracle, left_pad, make_draft, make_model, make_prompts
from transformers import DynamicCache

from specdec_fast import EQSpec, EXSpec, ModelDrafter, selfcheck
from specdec_fast.audit.probe import Probe
from specdec_fast.audit.strategies import CORRECT, FAULTS
from specdec_fast.audit.strategies.holes import HoleBatch
from specdec_fast.decoding import autoregressive
from specdec_fast.errors import InputError
from specdec_fast.integrations.compat import cache_argument
from specdec_fast.layouts.padded.batch import PaddedBatch
from specdec_fast.layouts.padded.cache import PaddedCache

PROMPTS = make_prompts([3, 9, 4, 15], 1)
NEW_TOKENS = 20
EXAMPLES = Path(__file__).parents[1] / "examples"


def make_pair(family="llama"):
    target = make_model(family, 1)
    return target, make_draft(target, DRAFT_NOISE[family], 11)


def probed(decoder, eos=(), **options):
    """The probes of the target and the draft after one ``generate``."""
    target, draft = decoder.target, decoder.drafter.model
    with Probe(target, eos_token_id=list(eos), **options) as probe, Probe(draft, follow=probe) as follower:
        probe.begin(PROMPTS)
        decoder.generate(*left_pad(PROMPTS, 0), max_new_tokens=NEW_TOKENS, eos_token_id=list(eos))
    return probe, follower


@pytest.mark.parametrize("name", CORRECT)
@pytest.mark.parametrize("family", FAMILIES)
def test_correct_strategy_is_clean(family, name):
    target, draft = make_pair(family)
    eos = sorted({greedy_oracle(target, prompt, NEW_TOKENS)[i] for i, prompt in enumerate(PROMPTS, 5)})
    for stop_ids in ([], eos):
        decoder = CORRECT[name](target, ModelDrafter(draft), num_draft_tokens=4)
        probe, follower = probed(decoder, stop_ids)
        assert probe.violations == [] and follower.violations == []
        assert probe.forwards > 2 and follower.forwards > 2


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_layout_is_clean(family, announced):
    target, draft = make_pair(family)
    decoder = EQSpec(target, ModelDrafter(draft), num_draft_tokens=4, layout="ragged")
    with Probe(target, eos_token_id=[]) as probe, Probe(draft, follow=probe) as follower:
        if announced:
            probe.begin(PROMPTS)
        decoder.generate(*left_pad(PROMPTS, 0), max_new_tokens=NEW_TOKENS, eos_token_id=[])
    assert probe.violations == [] and follower.violations == []
    assert probe.forwards > 2 and follower.forwards > 2


@pytest.mark.parametrize("announced", [True, False])
def test_exspec_is_clean(announced):
    """Rows join and leave, and pieces of prompts ride along."""
    target, draft = make_pair()
    decoder = EXSpec(target, ModelDrafter(draft), num_draft_tokens=4, batch_size=2, prefill_tokens=6)
    with Probe(target, eos_token_id=[], max_new_tokens=NEW_TOKENS) as probe, Probe(draft, follow=probe) as follower:
        if announced:
            probe.begin(PROMPTS)
        rows = decoder.generate_all(PROMPTS, max_new_tokens=NEW_TOKENS, eos_token_id=[])
    assert [row.token_ids for row in rows] == [greedy_oracle(target, prompt, NEW_TOKENS) for prompt in PROMPTS]
    assert probe.violations == [] and follower.violations == []
    assert probe.forwards > 4 and follower.forwards > 4


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_generate_is_clean(family, announced):
    target = make_model(family, 1)
    eos = greedy_oracle(target, PROMPTS[0], NEW_TOKENS)[5]
    ids, mask = left_pad(PROMPTS, 0)
    with Probe(target, eos_token_id=eos) as probe:
        if announced:
            probe.begin(PROMPTS)
        autoregressive.generate(target, ids, mask, max_new_tokens=NEW_TOKENS, eos_token_id=[eos], pad_token_id=eos)
    assert probe.violations == [] and probe.forwards == NEW_TOKENS


def test_a_decoder_with_a_cache_of_its_own_is_clean():
    spec = importlib.util.spec_from_file_location("own_decoder", EXAMPLES / "own_decoder.py")
    own_decoder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own_decoder)
    target, draft = make_pair()
    with Probe(target, eos_token_id=[]) as probe:
        own_decoder.decode(
            target,
            *left_pad(PROMPTS, 0),
            lambda texts: torch.tensor([greedy_oracle(draft, text, 3) for text in texts]),
            rounds=5,
        )
    assert probe.violations == [] and probe.forwards == 6


def test_a_stale_draft_cache_shows_in_the_draft_alone():
    target, draft = make_pair()
    decoder = FAULTS["stale-draft"](target, ModelDrafter(draft), num_draft_tokens=4)
    probe, follower = probed(decoder)
    assert probe.violations == []
    assert follower.violation.kind == "visible_padding" and "all zeros" in follower.violation.detail


def entry(batch, layer=None):
    """Keys and values of one layer of the target, or of all."""
    tensors = batch._caches[0].tensors()
    return tensors if layer is None else tensors[2 * layer : 2 * layer + 2]


def end_of_row(batch, slot):
    return int(batch.start[slot]) + batch.lengths[slot] - 1


def overwrite(batch, slot, column, source, layer=None):
    for x in entry(batch, layer):
        x[slot, :, column] = x[source if isinstance(source, tuple) else (slot, slice(None), source)]


# each plants a fault into row 1 after round 3 and says (kind, layer, column); columns count from the cache's left edge
def token_twice(batch, slot):
    column = int(batch.start[slot]) + 4
    overwrite(batch, slot, column, column - 1)
    return "duplicated_token", 0, column


def token_twice_in_one_layer(batch, slot):
    column = int(batch.start[slot]) + 4
    overwrite(batch, slot, column, column - 1, layer=2)
    return "wrong_kv", 2, column


def token_lost(batch, slot):
    column = int(batch.start[slot]) + 4
    for x in entry(batch):
        x[slot, :, column : batch.end - 2] = x[slot, :, column + 1 : batch.end - 1].clone()
    return "lost_token", 0, column


def entry_of_a_neighbour(batch, slot):
    column = end_of_row(batch, slot) - 2
    for x in entry(batch):
        x[slot, :, column] = x[0 if slot else 1, :, column]
    return "other_row", 0, column


def values_scaled_in_one_layer(batch, slot):
    column = int(batch.start[slot]) + 7
    entry(batch, 1)[1][slot, :, column] *= 1.01
    return "wrong_kv", 1, column


def keys_of_one_head_zeroed(batch, slot):
    column = int(batch.start[slot]) + 2
    entry(batch, 2)[0][slot, 1, column] = 0
    return "wrong_kv", 2, column


def entry_not_finite(batch, slot):
    column = int(batch.start[slot]) + 5
    entry(batch, 1)[0][slot, :, column, 3] = float("nan")
    return "wrong_kv", 1, column


def entry_zeroed(batch, slot):
    column = int(batch.start[slot])
    for x in entry(batch):
        x[slot, :, column] = 0
    return "visible_padding", 0, column


def key_of_another_position(batch, slot):
    column = int(batch.start[slot]) + 6
    keys = entry(batch, 0)[0]
    # rotating halves by pi turns both: the key of a position that no query had
    keys[slot, :, column] = -keys[slot, :, column]
    return "wrong_position", 0, column


def position_of_every_query(batch, slot):
    batch._positions[slot] += 1
    return "wrong_position", None, batch.end - 1


def position_of_the_second_query(batch, slot):
    # the first of the prepared queries is for drafts only
    batch._positions[slot, 2] += 2
    return "wrong_position", None, batch.end


def future_seen(batch, slot):
    for mask in batch._masks.values():
        mask[slot, 0, 1, batch.end] = 0
    return "wrong_mask", None, batch.end


def own_draft_hidden(batch, slot):
    for mask in batch._masks.values():
        mask[slot, 0, 2, batch.end - 1] = torch.finfo(mask.dtype).min
    return "wrong_mask", None, batch.end - 1


def padding_seen(batch, slot):
    column = int(batch.start[slot]) - 1
    assert column >= batch.first_column, "row 1 must be padded"
    for mask in batch._masks.values():
        mask[slot, 0, :, column] = 0
    return "visible_padding", 0, column


def bonus_changed(batch, slot):
    batch.tokens[slot, batch.end - 1] = (batch.tokens[slot, batch.end - 1] + 1) % 97
    return "wrong_token", None, batch.end - 1


PLANTED = [
    *(token_twice, token_twice_in_one_layer, token_lost, entry_of_a_neighbour, values_scaled_in_one_layer),
    *(keys_of_one_head_zeroed, entry_not_finite, entry_zeroed, key_of_another_position, position_of_every_query),
    *(position_of_the_second_query, future_seen, own_draft_hidden, padding_seen, bonus_changed),
]


@pytest.mark.parametrize("plant", PLANTED)
@pytest.mark.parametrize("family", ["llama", "glm4"])
def test_a_planted_violation_is_found_where_it_is(family, plant, monkeypatch):
    rounds, expected = 0, {}
    advance, forward = PaddedBatch.advance, PaddedCache.write_at

    def planting(self, summary):
        nonlocal rounds
        order = advance(self, summary)
        rounds += not selfcheck.running.get()
        if rounds == 4:
            kind, layer, column = plant(self, 1)
            expected.update(kind=kind, layer=layer, physical=column)
        return order

    def noting(self, column, first_column):
        if expected and "column" not in expected:
            expected["column"] = expected["physical"] - first_column
        forward(self, column, first_column)

    target, draft = make_pair(family)
    decoder = EQSpec(target, ModelDrafter(draft), num_draft_tokens=4, layout="padded")
    monkeypatch.setattr(PaddedBatch, "advance", planting)
    monkeypatch.setattr(PaddedCache, "write_at", noting)
    probe, _ = probed(decoder)
    found = probe.violation
    assert (found.kind, found.round, found.row) == (expected["kind"], 4, 1)
    assert (found.layer, found.column) == (expected["layer"], expected["column"])
    assert probe.violations[0] is found and str(expected["column"]) in str(found)


@pytest.mark.parametrize(("shown", "kind"), [(1, "kept_rejected_token"), (-1, "lost_token")])
def test_one_entry_too_many_or_too_few_is_found_where_it_is(shown, kind):
    """In the masked-holes layout, a row shows one more or one fewer of the drafts of one round."""
    planted = {}

    class Batch(HoleBatch):
        rounds = 0

        def commit(self, draft_ids, target_ids, limit, n_accepted):
            first = self.end
            summary = super().commit(draft_ids, target_ids, limit, n_accepted)
            self.rounds += 1
            for row, n in enumerate(summary[:, 0].tolist() if len(summary) == len(PROMPTS) else ()):
                if not planted and 0 < n < draft_ids.shape[1]:
                    self.visible[row, first + n if shown > 0 else first + n - 1] = shown > 0
                    column = first + n if shown > 0 else first + draft_ids.shape[1]
                    planted.update(round=self.rounds, row=row, column=column - self.first_column)
            return summary

    class Decoder(EQSpec):
        batch_type = Batch

    target, draft = make_pair()
    probe, _ = probed(Decoder(target, ModelDrafter(draft), num_draft_tokens=4))
    found = probe.violation
    assert found.kind == kind
    assert {"round": found.round, "row": found.row, "column": found.column} == planted
    assert found.layer == (0 if shown > 0 else None)


@pytest.mark.parametrize("layout", ["padded", "ragged"])
@pytest.mark.parametrize("announced", [True, False])
def test_a_wrong_last_token_is_found_in_the_answer(announced, layout):
    target, draft = make_pair()
    decoder = EQSpec(target, ModelDrafter(draft), num_draft_tokens=4, layout=layout)
    for wrong in (None, "swapped", 0, 2):
        with Probe(target, eos_token_id=[], max_new_tokens=NEW_TOKENS) as probe:
            if announced:
                probe.begin(PROMPTS)
            result = decoder.generate(*left_pad(PROMPTS, 0), max_new_tokens=NEW_TOKENS, eos_token_id=[])
        answers = [row.token_ids for row in result.rows]
        if wrong in (None, "swapped"):
            # answers of other rows say nothing about what the rows were fed
            probe.check_answers(answers[::-1] if wrong else answers)
            assert probe.violations == []
            continue
        answers[wrong][-1] ^= 1
        probe.check_answers(answers)
        (found,) = probe.violations
        assert (found.kind, found.row, found.token) == ("wrong_token", wrong, answers[wrong][-1])
        assert found.position == len(PROMPTS[wrong]) + NEW_TOKENS - 1
        # the first forward runs the prompts
        assert found.round == result.rows[wrong].rounds


def step(model, cache, tokens, first, seen):
    """One forward of a single row; ``seen`` are the cached columns that it attends to. Returns the choices."""
    own = range(cache.get_seq_length(), cache.get_seq_length() + len(tokens))
    mask = torch.full((1, 1, len(tokens), own.stop), torch.finfo(torch.float64).min, dtype=torch.float64)
    for query, column in enumerate(own):
        mask[..., query, [*seen, *range(own.start, column + 1)]] = 0
    positions = torch.arange(first, first + len(tokens))[None]
    past = {cache_argument(model): cache, "use_cache": True}
    return (
        model(torch.tensor([tokens]), attention_mask=mask, position_ids=positions, **past).logits[0].argmax(-1).tolist()
    )


def test_an_entry_that_is_of_an_equal_rejected_draft_has_no_wrong_position():
    """Of two rejected drafts the second equals the bonus token, and its entry is left in the place of the bonus."""
    model, prompt = make_model("llama", 1), PROMPTS[1]
    n, cache = len(prompt), DynamicCache(config=model.config)
    bonus = greedy_oracle(model, prompt, 2)[1]
    with Probe(model, eos_token_id=[]) as probe, torch.no_grad():
        probe.begin([prompt])
        first = step(model, cache, prompt, 0, [])[-1]
        assert step(model, cache, [first, bonus ^ 1, bonus], n, range(n))[0] == bonus
        step(model, cache, [5], n + 2, [*range(n + 1), n + 2])
    assert (probe.violation.kind, probe.violation.column) == ("kept_rejected_token", n + 2)


def test_a_second_entry_of_a_token_that_was_written_anew_is_a_duplicate():
    """The newest token is fed twice, as drafters do, and its stale entry stands in the place of an equal one."""
    model = make_model("llama", 1)
    prompt, token = next(
        (prompt, text[0])
        for prompt in make_prompts([7] * 400, 5)
        if len({*(text := greedy_oracle(model, prompt, 2))}) == 1
    )
    n, cache = len(prompt), DynamicCache(config=model.config)
    with Probe(model, eos_token_id=[]) as probe, torch.no_grad():
        probe.begin([prompt])
        step(model, cache, prompt, 0, [])
        step(model, cache, [token], n, range(n))
        # so that the two entries differ by rounding
        cache.layers[0].values[0, :, n] *= 1 + 1e-15
        step(model, cache, [token], n, range(n))
        step(model, cache, [5], n + 2, range(n + 2))
    assert probe.violation.kind == "duplicated_token"


def test_a_repeated_draft_that_was_accepted_is_a_wrong_token_once_the_answer_is_known():
    """The target goes on after the wrong draft as it would have without it, so the entries alone do not tell."""
    model, prompt = make_model("llama", 1), PROMPTS[1]
    n = len(prompt)
    first, bonus = greedy_oracle(model, prompt, 2)
    wrong = next(t for t in range(97) if t != bonus and greedy_oracle(model, [*prompt, first, t], 1) == [bonus])
    for answer, kind in (([first, wrong, bonus], "wrong_token"), ([first, bonus, 3], "kept_rejected_token")):
        cache = DynamicCache(config=model.config)
        with Probe(model, eos_token_id=[]) as probe, torch.no_grad():
            probe.begin([prompt])
            step(model, cache, prompt, 0, [])
            assert step(model, cache, [first, wrong], n, range(n)) == [bonus, bonus]
            step(model, cache, [bonus], n + 2, range(n + 2))
        assert probe.violation.kind == "kept_rejected_token"
        probe.check_answers([answer])
        (found,) = probe.violations
        assert (found.kind, found.position, found.token) == (kind, n + 1, wrong)


def test_either_of_two_equal_logits_may_be_chosen():
    model, prompt = make_model("llama", 1), PROMPTS[1]
    (first,) = greedy_oracle(model, prompt, 1)
    other = (first + 1) % 97
    model.lm_head.weight.data[other] = model.lm_head.weight.data[first]
    for chosen in (first, other):
        cache = DynamicCache(config=model.config)
        with Probe(model, eos_token_id=[]) as probe, torch.no_grad():
            probe.begin([prompt])
            step(model, cache, prompt, 0, [])
            next_token = step(model, cache, [chosen], len(prompt), range(len(prompt)))
            step(model, cache, next_token, len(prompt) + 1, range(len(prompt) + 1))
        assert probe.violations == []


def test_rate_compares_fewer_rows_but_always_reads_the_inputs():
    target, draft = make_pair()
    offset = FAULTS["position-off-by-one"](target, ModelDrafter(draft), num_draft_tokens=4)
    assert probed(offset, rate=0.0)[0].violation.kind == "wrong_position"
    probe, _ = probed(EQSpec(target, ModelDrafter(draft), num_draft_tokens=4), rate=0.0)
    assert probe.violations == [] and not any(row.alone.text for row in probe.rows)
    with pytest.raises(InputError, match=r"rate=1\.5"):
        Probe(target, rate=1.5)


@pytest.mark.parametrize("style", ["past_key_values", "own cache", "no cache"])
def test_a_decoder_may_pass_its_cache_by_either_name_or_not_at_all(style):
    target, _ = make_pair()
    ids, mask = left_pad(PROMPTS, 0)
    past = DynamicCache(config=target.config) if style == "past_key_values" else None
    new = ids
    with Probe(target, eos_token_id=[]) as probe, torch.no_grad():
        probe.begin(PROMPTS)
        for _ in range(6):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
            options = {"use_cache": False} if style == "no cache" else {"use_cache": True, "past_key_values": past}
            output = target(new, attention_mask=mask, position_ids=positions, **options)
            past = output.past_key_values if style == "own cache" else past
            token = output.logits[:, -1:].argmax(-1)
            ids, mask = torch.cat([ids, token], 1), torch.cat([mask, torch.ones_like(token)], 1)
            new = ids if style == "no cache" else token
    assert probe.violations == [] and probe.forwards == 6
    assert [row.text[len(prompt) :][:6] for row, prompt in zip(probe.rows, PROMPTS)] == ids[:, -6:].tolist()


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [4]])
def test_prefill_in_chunks_by_rows_and_filler_after_the_end(sizes, announced):
    """Left-padded chunks, of which the first hold only padding for a row; rows fed with filler after their limit."""
    target, _ = make_pair()
    with Probe(target, eos_token_id=[], max_new_tokens=4) as probe, torch.no_grad():
        if announced:
            probe.begin(PROMPTS)
        first = 0
        for size in sizes:
            ids, mask = left_pad(PROMPTS[first : first + size], 0)
            first, cache = first + size, DynamicCache(config=target.config)
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            for start in range(0, ids.shape[1], 5):
                part = slice(start, start + 5)
                past = {cache_argument(target): cache}
                output = target(
                    ids[:, part], attention_mask=mask[:, : start + 5], position_ids=positions[:, part], **past
                )
            for step in range(7):
                # from the fifth token on, filler
                token = output.logits[:, -1:].argmax(-1) if step < 4 else torch.zeros_like(ids[:, :1])
                mask = torch.cat([mask, torch.ones_like(token)], 1)
                output = target(token, position_ids=mask.sum(1)[:, None] - 1, **past | {"attention_mask": mask})
    assert probe.violations == [] and probe.forwards > 8


def test_the_model_is_left_as_it_was():
    target, _ = make_pair()
    with pytest.raises(ValueError, match="input_ids"), Probe(target):
        target(unknown=1)
    assert "forward" not in vars(target)
