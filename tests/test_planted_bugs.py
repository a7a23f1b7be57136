"""The bugs of published decoders, planted one by one: the equality check must see each of them."""

import pytest
import torch
from decoding import Comparison, decode, plant_in_attention
from tiny_models import DRAFT_NOISE, make_draft, make_model, make_prompts

from specdec_fast import ModelDrafter, ops, reference
from specdec_fast.decoding.acceptance import GreedyAcceptance
from specdec_fast.layouts import LAYOUTS
from specdec_fast.layouts.padded import batch as padded
from specdec_fast.layouts.ragged import Segment, model
from specdec_fast.operators import commits


def wrong_rows(layout: str) -> int:
    seen = Comparison()
    for family in ("llama", "qwen3", "glm4"):
        target = make_model(family, seed=1)
        drafter = ModelDrafter(make_draft(target, DRAFT_NOISE[family], 11))
        decode(target, drafter, make_prompts([1, 9, 4, 15, 2], 1), k=4, into=seen, layout=layout)
    assert seen.ragged_rounds > 0
    return seen.wrong


def position_off_by_one(monkeypatch):
    """Rows moved by the newest realign get positions one too high."""
    step = ops.realign_step_

    def skewed(*args):
        step(*args)
        start, new_start, positions = args[8], args[10], args[12]
        positions += (new_start != start).long()[:, None]

    monkeypatch.setattr(ops, "realign_step_", skewed)


def rejected_entry_kept(monkeypatch):
    """The first rejected draft stays in the cache of its row; the answer itself leaves it out."""
    commit, advance = padded.PaddedBatch.commit, padded.PaddedBatch.advance

    def keeping(self, draft_ids, target_ids, limit, _):
        accepted, bonus = reference.accept_greedy(draft_ids, target_ids, limit)
        kept = (accepted + 1).clamp(max=draft_ids.shape[1])
        self.max_length = self.max_length + kept - accepted
        self.kept = commit(self, draft_ids, target_ids.scatter(1, kept[:, None], bonus[:, None]), limit, kept)
        shown = self.kept.clone()
        shown[:, 0], shown[:, 3:] = accepted, reference.committed_tokens(draft_ids, accepted, bonus)
        return shown

    monkeypatch.setattr(padded.PaddedBatch, "commit", keeping)
    monkeypatch.setattr(padded.PaddedBatch, "advance", lambda self, _: advance(self, commits.read(self.kept)))


def bonus_from_the_draft(monkeypatch):
    """The draft's own token replaces the target's where it was rejected."""
    accept = GreedyAcceptance.__call__

    def taking(self, draft_ids, limit, logits):
        target_ids, _ = accept(self, draft_ids, limit, logits)
        n_accepted, _ = reference.accept_greedy(draft_ids, target_ids, limit)
        return torch.cat([draft_ids, target_ids[:, -1:]], 1), n_accepted

    monkeypatch.setattr(GreedyAcceptance, "__call__", taking)


def position_off_by_one_in_some_rounds(monkeypatch):
    """Rows that resume at an odd position get position IDs one too high."""
    call = model.compat.call

    def skewed(model, traits, cache, ids, positions, *rest):
        skew = torch.tensor([s.start % 2 for s in cache.packing.segments for _ in range(s.size)])
        return call(model, traits, cache, ids, positions + skew, *rest)

    monkeypatch.setattr(model.compat, "call", skewed)


def rejected_entry_not_overwritten(monkeypatch):
    """A rejected draft's KV stays where the bonus took its place."""
    append = ops.append_kv_

    def keeping(k_pool, v_pool, k, v, row_of, position_of):
        empty = (k_pool[row_of, 0, position_of] == 0).all(-1)
        first = torch.cat([torch.ones(1).bool(), row_of[1:] != row_of[:-1]])
        write = empty | ~first
        append(k_pool, v_pool, k[:, :, write], v[:, :, write], row_of[write], position_of[write])

    monkeypatch.setattr(ops, "append_kv_", keeping)


def drafts_see_each_other(monkeypatch):
    """Every query of a row sees the whole segment."""
    plant_in_attention(
        monkeypatch, lambda segments: [Segment(s.slot, s.end - 1, 1) for s in segments for _ in range(s.size)]
    )


def rows_swap_slots(monkeypatch):
    """Attention of each row reads its neighbour's KV."""
    plant_in_attention(
        monkeypatch,
        lambda segments: [s._replace(slot=t.slot) for s, t in zip(segments, segments[1:] + segments[:1])],
    )


PLANTS = {
    "padded": [position_off_by_one, rejected_entry_kept, bonus_from_the_draft],
    "ragged": [
        position_off_by_one_in_some_rounds,
        rejected_entry_not_overwritten,
        drafts_see_each_other,
        rows_swap_slots,
        bonus_from_the_draft,
    ],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_planted_nothing_found(layout):
    assert wrong_rows(layout) == 0


@pytest.mark.parametrize(("layout", "plant"), [(layout, plant) for layout in PLANTS for plant in PLANTS[layout]])
def test_planted_bug_is_seen(layout, plant, monkeypatch):
    # the self-check would refuse the broken layout before any row is decoded
    monkeypatch.setattr("specdec_fast.decoding.eqspec.self_check", lambda *_: None)
    monkeypatch.setattr("specdec_fast.drafters.model.self_check", lambda *_: None)
    plant(monkeypatch)
    assert wrong_rows(layout) > 0
