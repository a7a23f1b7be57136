"""The bugs of published decoders, planted one by one: the equality check must see each of them."""

import pytest
import torch
from decoding import Comparison, decode
from tiny_models import DRAFT_NOISE, make_draft, make_model, make_prompts

from specdec_fast import ModelDrafter, padded, reference
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
    plan, positions = reference.plan_realign, reference.position_ids
    skew = {}

    def planned(*args):
        end, shift = plan(*args)
        skew["rows"] = (shift != 0).long()
        return end, shift

    def skewed(start, *args):
        ids = positions(start, *args)
        rows = skew.get("rows")
        return ids + rows[:, None] if rows is not None and len(rows) == len(ids) else ids

    monkeypatch.setattr(reference, "plan_realign", planned)
    monkeypatch.setattr(reference, "position_ids", skewed)


def rejected_entry_kept(monkeypatch):
    """The first rejected draft stays in the cache of its row."""
    commit, advance = padded.PaddedBatch.commit, padded.PaddedBatch.advance

    def keeping(self, draft_ids, n_accepted, bonus):
        kept = (n_accepted + 1).clamp(max=draft_ids.shape[1])
        self.extra = (kept - n_accepted).tolist()
        right = reference.committed_tokens(draft_ids, n_accepted, bonus)
        return commit(self, draft_ids, kept, bonus)._replace(n_accepted=n_accepted, committed=right)

    def following(self, new_end, n_accepted, keep):
        return advance(self, new_end, [n + x for n, x in zip(n_accepted, self.extra, strict=True)], keep)

    monkeypatch.setattr(padded.PaddedBatch, "commit", keeping)
    monkeypatch.setattr(padded.PaddedBatch, "advance", following)


def bonus_from_the_draft(monkeypatch):
    """The draft's own token replaces the target's where it was rejected."""
    accept = GreedyAcceptance.__call__

    def taking(self, draft_ids, limit, logits):
        n_accepted, bonus = accept(self, draft_ids, limit, logits)
        drafts = torch.cat([draft_ids, bonus[:, None]], 1)
        return n_accepted, drafts.gather(1, n_accepted[:, None])[:, 0]

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
