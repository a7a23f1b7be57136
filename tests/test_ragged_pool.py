"""Any rows of the pool, in any order and at any stage, compute what a single row computes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FAMILIES, make_model

from specdec_fast.errors import InputError
from specdec_fast.integrations import compat
from specdec_fast.layouts.ragged import RaggedPool, Segment
from specdec_fast.operators import commits

TEXT = 40
CPU = torch.device("cpu")


class Rows:
    """Sequences whose text is known in advance, run through a pool; every logit is compared with the model's own."""

    def __init__(self, model, num_slots, **options):
        self.model = model
        self.pool = RaggedPool(num_slots, [], CPU, **options)
        self.follower = self.pool.follow(model)
        self.text, self.logits = {}, {}
        self.generator = torch.Generator().manual_seed(0)

    def lease(self, prompt_length):
        text = torch.randint(3, 97, (TEXT,), generator=self.generator)
        slot = self.pool.lease(text[:prompt_length], TEXT)
        self.text[slot], self.logits[slot] = text, compat.one_shot_logits(self.model, text, TEXT)
        return slot

    def release(self, slot):
        self.pool.release(slot)
        del self.text[slot]

    def step(self, plan):
        """``plan``: slot -> tokens of its prompt, or ``(drafts, right ones)`` once the prompt is done."""
        pool = self.pool
        verify = {slot: work for slot, work in plan.items() if isinstance(work, tuple)}
        segments = []
        pool.select(verify)
        width = max((n for n, _ in verify.values()), default=0)
        drafts = torch.zeros(len(verify), width, dtype=torch.int64)
        if verify:
            pool.open_round(width)
        for b, (slot, (n, right)) in enumerate(verify.items()):
            ahead = self.text[slot][pool.lengths[slot] :]
            drafts[b, :n] = ahead[:n]
            drafts[b, right:n] = (drafts[b, right:n] + 1) % 97
        pool.write_drafts(drafts)
        for slot, work in plan.items():
            if slot in verify:
                segments.append(self.follower.missing(slot, work[0]))
            else:
                segments.append(Segment(slot, self.follower.cache.filled[slot], work))
        logits = self.follower.forward(segments, [s.size for s in segments])
        for segment, rows in zip(segments, logits.split([s.size for s in segments])):
            slot = segment.slot
            good = segment.size - verify[slot][0] + verify[slot][1] if slot in verify else segment.size
            want = self.logits[slot][segment.start : segment.start + good]
            torch.testing.assert_close(rows[:good], want, rtol=1e-9, atol=1e-11)
        if verify:
            accepted = torch.tensor([right for _, right in verify.values()])
            target = torch.stack([self.text[s][pool.lengths[s] :][: width + 1] for s in verify])
            committed = commits.read(pool.commit(drafts, target, accepted, accepted))
            assert [row.accepted for row in committed] == accepted.tolist()
            stay = pool.advance(committed)
            for slot in [slot for b, slot in enumerate(verify) if b not in stay]:
                del self.text[slot]
        for slot in self.text:
            assert pool.tokens[slot, : pool.lengths[slot]].tolist() == self.text[slot][: pool.lengths[slot]].tolist()
            assert pool.length[slot] == pool.lengths[slot]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_rows_at_any_stage(data):
    family = data.draw(st.sampled_from(FAMILIES))
    chunk = data.draw(st.integers(1, 5))
    with torch.no_grad():
        rows = Rows(model_of(family), 4, chunk=chunk)
        cache = rows.follower.cache
        for _ in range(data.draw(st.integers(1, 12))):
            while len(rows.text) < 4 and data.draw(st.booleans()):
                rows.lease(data.draw(st.integers(1, 12)))
            for slot in list(rows.text):
                if data.draw(st.integers(0, 9)) == 0:
                    rows.release(slot)
            plan = {}
            for slot in data.draw(st.permutations(list(rows.text))):
                length = rows.pool.lengths[slot]
                missing = length - cache.filled[slot]
                if data.draw(st.integers(0, 3)) == 0:
                    continue
                if missing > 1 and data.draw(st.booleans()):
                    plan[slot] = data.draw(st.integers(1, missing - 1))
                else:
                    n = data.draw(st.integers(0, max(0, min(4, TEXT - length - 1 - 4))))
                    plan[slot] = (n, data.draw(st.integers(0, n)))
            if any(rows.pool.lengths[slot] > TEXT - 10 for slot in plan):
                break
            if plan:
                rows.step(plan)


_models = {}


def model_of(family):
    return _models.setdefault(family, make_model(family, seed=1))


@torch.no_grad()
def test_commit_moves_nothing_and_growth_is_geometric():
    rows = Rows(model_of("llama"), 2, chunk=1)
    slots = [rows.lease(3), rows.lease(1)]
    pool, capacities = rows.pool, []
    while max(pool.lengths) < TEXT - 6:
        moved = pool.bytes_moved
        pool.select(slots)
        pool.open_round(2)
        grown = pool.bytes_moved - moved
        rows.step({slots[0]: (2, 2), slots[1]: (2, 0)})
        assert pool.bytes_moved == moved + grown, "a commit moved KV"
        capacities.append(pool.capacity)
    assert len(set(capacities)) < 8
    assert all(x.shape[2] == pool.capacity for x in rows.follower.cache.tensors())


@torch.no_grad()
def test_a_budget_bounds_the_cache():
    rows = Rows(model_of("llama"), 2, chunk=8, max_columns=2 * 13 + 1)
    slot = rows.lease(4)
    rows.step({slot: (0, 0)})
    column = rows.follower.cache.bytes_per_column
    assert column == 3 * 2 * 2 * 16 * 8
    rows.pool.reserve(9)
    assert rows.pool.capacity == 13
    assert rows.pool.kv_bytes == 2 * 13 * column
    with pytest.raises(InputError, match=r"needs 14 columns, max_columns=27 allows 13 in each of 2 slots"):
        rows.pool.reserve(14)
    rows.step({slot: (2, 1)})


@torch.no_grad()
def test_another_shape_keeps_every_row():
    rows = Rows(model_of("gemma3"), 4, chunk=1)
    slots = [rows.lease(n) for n in (9, 3, 12)]
    rows.step({slots[0]: 9, slots[1]: (2, 1), slots[2]: 5})
    rows.release(slots[0])
    for num_slots, columns in ((2, 20), (5, 12)):
        moved, filled = rows.pool.bytes_moved, sum(rows.follower.cache.filled)
        went_to = rows.pool.resize(num_slots, columns)
        assert rows.pool.bytes_moved == moved + filled * rows.follower.cache.bytes_per_column
        assert [x.shape[::2] for x in rows.follower.cache.tensors()] == [(num_slots, columns)] * 8
        rows.text, rows.logits = ({went_to[s]: x[s] for s in went_to} for x in (rows.text, rows.logits))
        slots = [went_to.get(slot) for slot in slots]
        rows.step({slots[2]: 1, slots[1]: (3, 1)})
    for _ in range(3):
        slots.append(rows.lease(2))
    rows.step(dict.fromkeys(rows.text, (2, 1)))
    with pytest.raises(InputError, match="all 5 slots are leased"):
        rows.lease(2)


@torch.no_grad()
def test_riders_and_rewound_drafts():
    rows = Rows(model_of("llama"), 3)
    verified, riding = rows.lease(4), rows.lease(7)
    pool, follower = rows.pool, rows.follower
    pool.select([verified], [Segment(riding, 0, 5)])
    pool.open_rows([2])
    follower.draft([2], lambda logits: logits.argmax(-1))
    assert follower.cache.filled[verified] == 5
    pool.rewind()
    assert follower.cache.filled[verified] == 3
    drafts = rows.text[verified][None, 4:6]
    logits = follower.verify(drafts, [2])
    torch.testing.assert_close(logits[0], rows.logits[verified][3:6], rtol=1e-9, atol=1e-11)
    pool.rewind()
    rows.step({verified: (2, 2), riding: (3, 1)})


def test_slots_are_leased_and_released():
    pool = RaggedPool(2, [], CPU)
    prompt = torch.tensor([5, 6])
    first, second = pool.lease(prompt, 9), pool.lease(prompt, 9)
    assert {first, second} == {0, 1}
    with pytest.raises(InputError, match="all 2 slots are leased"):
        pool.lease(prompt, 9)
    pool.select([second, first])
    pool.release(second)
    assert pool.rows == [first] and pool.slots.tolist() == [first] and len(pool) == 1
    with pytest.raises(InputError, match=f"slot {second} is not leased"):
        pool.release(second)
    assert pool.lease(prompt, 9) == second


def test_a_slot_has_one_segment():
    pool = RaggedPool(2, [], CPU)
    follower = pool.follow(model_of("llama"))
    slot = pool.lease(torch.tensor([5, 6, 7]), 9)
    for segments in ([Segment(slot, 0, 1), Segment(slot, 1, 2)], [Segment(slot, 0, 0)]):
        with pytest.raises(InputError, match="at least one token each, and one segment for a slot"):
            follower.forward(segments, [1] * len(segments))


@torch.no_grad()
def test_a_new_tenant_never_sees_the_old_one():
    rows = Rows(model_of("gemma3"), 1)
    slot = rows.lease(12)
    rows.step({slot: (4, 2)})
    for x in rows.follower.cache.tensors():
        x.fill_(float("nan"))
    rows.release(slot)
    slot = rows.lease(3)
    rows.step({slot: 2})
    rows.step({slot: (3, 1)})
