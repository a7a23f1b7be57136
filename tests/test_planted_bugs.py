"""The bugs of published decoders, planted one by one: the equality check must see each of them."""

import pytest
import torch
from decoding import Comparison, decode
from tiny_models import DRAFT_NOISE, make_draft, make_model, make_prompts

from specdec_fast import ModelDrafter, ops, padded, reference
from specdec_fast.acceptance import GreedyAcceptance


def wrong_rows() -> int:
    seen = Comparison()
    for family in ("llama", "qwen3", "glm4"):
        model = make_model(family, seed=1)
        drafter = ModelDrafter(make_draft(model, DRAFT_NOISE[family], 11))
        decode(model, drafter, make_prompts([1, 9, 4, 15, 2], 1), k=4, into=seen)
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
    monkeypatch.setattr(padded.PaddedBatch, "advance", lambda self, _: advance(self, self.kept.tolist()))


def bonus_from_the_draft(monkeypatch):
    """The draft's own token replaces the target's where it was rejected."""
    accept = GreedyAcceptance.__call__

    def taking(self, draft_ids, limit, logits):
        target_ids, _ = accept(self, draft_ids, limit, logits)
        n_accepted, _ = reference.accept_greedy(draft_ids, target_ids, limit)
        return torch.cat([draft_ids, target_ids[:, -1:]], 1), n_accepted

    monkeypatch.setattr(GreedyAcceptance, "__call__", taking)


def test_nothing_planted_nothing_found():
    assert wrong_rows() == 0


@pytest.mark.parametrize("plant", [position_off_by_one, rejected_entry_kept, bonus_from_the_draft])
def test_planted_bug_is_seen(plant, monkeypatch):
    # the self-check would refuse the broken layout before any row is decoded
    monkeypatch.setattr("specdec_fast.eqspec.self_check", lambda *_: None)
    monkeypatch.setattr("specdec_fast.drafters.model.self_check", lambda *_: None)
    plant(monkeypatch)
    assert wrong_rows() > 0
