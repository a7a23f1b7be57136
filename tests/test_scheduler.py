"""No row is lost or run twice, none waits longer than promised, and every plan finds each row's KV where it says."""

import subprocess
import sys

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from specdec_fast.errors import InputError
from specdec_fast.scheduler import POLICIES, Chunk, Outcome, Record, Request, Scheduler, Seat, ageing
from specdec_fast.scheduler.padded import ByLength
from specdec_fast.scheduler.policy import Policy
from specdec_fast.scheduler.rows import Row

LONGEST = 24
REQUESTS = st.tuples(st.integers(1, 12), st.integers(1, 12))


class Machine(RuleBasedStateMachine):
    """A decoder that accepts at random, and callers that submit and cancel whenever they like."""

    layouts = tuple(POLICIES)

    @initialize(data=st.data())
    def begin(self, data):
        self.layout = data.draw(st.sampled_from(self.layouts))
        batch_size = data.draw(st.integers(1, 6))
        window = batch_size + data.draw(st.integers(0, 8))
        num_drafts = data.draw(st.integers(1, 4))
        self.scheduler = Scheduler(
            batch_size=batch_size,
            window=window,
            layout=self.layout,
            num_draft_tokens=num_drafts,
            max_wait_rounds=-(-window // batch_size) + data.draw(st.integers(0, 3)),
            prefill_tokens=data.draw(st.integers(1, 20)),
            max_columns=LONGEST,
            budget_columns=data.draw(st.none() | st.integers(LONGEST, 8 * LONGEST)),
        )
        self.limits = self.scheduler.limits
        self.requests, self.lengths, self.prefilled, self.last_round = {}, {}, {}, {}
        self.unread, self.ended = [], {}
        self.plan = None

    @rule(shape=REQUESTS)
    def submit(self, shape):
        self.scheduler.submit(self.new_request(shape))

    @rule(shapes=st.lists(REQUESTS, max_size=6))
    def feed(self, shapes):
        requests = [self.new_request(shape) for shape in shapes]
        self.unread += [request.id for request in requests]
        self.scheduler.feed(self.reading(requests))

    def reading(self, requests):
        for request in requests:
            self.unread.remove(request.id)
            yield request

    def new_request(self, shape):
        request = Request(len(self.requests), *shape)
        self.requests[request.id] = request
        self.lengths[request.id] = request.prompt_length
        self.prefilled[request.id] = 0
        return request

    @precondition(lambda self: self.plan is None)
    @rule()
    def next_batch(self):
        plan = self.scheduler.next_batch()
        active = self.scheduler.active
        assert bool(plan) == bool(active)
        if not plan:
            assert not self.scheduler.queued and not self.unread
            return
        self.plan = plan
        rows = [seat.row for seat in plan.verify]
        assert len(set(rows)) == len(rows) <= self.limits.batch_size
        assert not {chunk.row for chunk in plan.chunks} & set(rows)
        assert set(plan.rows) <= set(active)
        for row in active:
            # admitted by this plan
            self.last_round.setdefault(row, plan.round - 1)
            assert plan.round - self.last_round[row] <= self.limits.max_wait_rounds
        for row in plan.rows:
            self.last_round[row] = plan.round
        self.check_chunks(plan)
        if self.layout == "ragged":
            assert sum(chunk.stop - chunk.start for chunk in plan.chunks) <= self.limits.prefill_tokens

    def check_chunks(self, plan):
        for chunk in plan.chunks:
            prompt = self.requests[chunk.row].prompt_length
            assert chunk.start == self.prefilled[chunk.row] < chunk.stop <= prompt
            assert chunk.is_last == (chunk.stop == prompt)
            self.prefilled[chunk.row] = chunk.stop
        for seat in plan.verify:
            assert self.prefilled[seat.row] == self.requests[seat.row].prompt_length

    @precondition(lambda self: self.plan is not None)
    @rule(data=st.data())
    def report(self, data):
        plan, self.plan = self.plan, None
        seats = {seat.row for seat in plan.verify}
        firsts = {chunk.row for chunk in plan.chunks if chunk.is_last}
        active = set(self.scheduler.active)
        outcomes = {}
        for row, limit in plan.limits.items():
            if row not in active:
                continue
            accepted = data.draw(st.integers(0, limit))
            self.lengths[row] += (row in firsts) + (accepted + 1 if row in seats else 0)
            request = self.requests[row]
            assert self.lengths[row] <= request.columns
            outcomes[row] = Outcome(accepted, self.lengths[row] == request.columns or data.draw(st.integers(0, 5)) == 0)
        records = self.scheduler.report(outcomes)
        assert {request.id for request in records} == {row for row, outcome in outcomes.items() if outcome.finished}
        for request in records:
            self.end(request, "finished")

    @rule(data=st.data(), end=st.sampled_from(["cancelled", "failed"]))
    def drop(self, data, end):
        if not self.requests:
            return
        row = data.draw(st.sampled_from(sorted(self.requests)))
        is_live = row in self.scheduler.active or row in self.scheduler.queued
        request = self.scheduler.cancel(row) if end == "cancelled" else self.scheduler.fail(row)
        assert (request is not None) == is_live
        if request:
            self.end(request, end)

    def end(self, request, end):
        assert request.id not in self.ended
        assert request.record.end == end
        assert request.record.longest_wait < self.limits.max_wait_rounds
        self.ended[request.id] = request

    @invariant()
    def every_row_is_in_one_place(self):
        if not hasattr(self, "scheduler"):
            return
        places = [*self.scheduler.active, *self.scheduler.queued, *self.unread, *self.ended]
        assert sorted(places) == sorted(self.requests)

    @invariant()
    def window_and_budget_are_kept(self):
        if not hasattr(self, "scheduler"):
            return
        active = [self.requests[row] for row in self.scheduler.active]
        assert len(active) <= self.limits.window
        if self.limits.budget_columns is not None:
            widest = max((request.columns for request in active), default=0)
            assert len(active) * widest <= self.limits.budget_columns

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        while True:
            if self.plan is None:
                self.next_batch()
            if self.plan is None:
                break
            plan, self.plan = self.plan, None
            outcomes = {row: Outcome(0, True) for row in plan.limits}
            for request in self.scheduler.report(outcomes):
                self.end(request, "finished")
        assert sorted(self.ended) == sorted(self.requests)


def test_decisions_need_no_torch():
    code = "import sys, specdec_fast.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def check(layout, examples, **options):
    run_state_machine_as_test(
        type("Chosen", (Machine,), {"layouts": [layout]}),
        settings=settings(
            max_examples=examples,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            **options,
        ),
    )


@pytest.mark.parametrize("layout", POLICIES)
def test_any_sequence_of_events(layout):
    check(layout, 120)


def never_due(rows, now, batch_size, max_wait_rounds):
    return []


@pytest.mark.parametrize(
    ("layout", "target", "name", "bug"),
    [
        ("padded", ageing, "due", never_due),
        ("ragged", Policy, "fits", lambda self, rows, request: True),
        ("padded", ByLength, "wants", lambda self, rows, request: True),
        ("padded", Policy, "seats", lambda self, rows: tuple(Seat(row.id, row.remaining) for row in rows)),
    ],
    ids=["ageing", "budget", "window", "limit"],
)
def test_planted_bugs_are_seen(layout, target, name, bug, monkeypatch):
    monkeypatch.setattr(target, name, bug)
    with pytest.raises((AssertionError, InputError)):
        check(layout, 200, phases=[Phase.generate], derandomize=True, database=None, report_multiple_bugs=False)


def played(scheduler, accepted=lambda row: 0, rounds=10**6):
    """The plans of a decoder in which ``accepted(row)`` drafts are right and rows run to their last token."""
    plans, left = [], {}
    while len(plans) < rounds and (plan := scheduler.next_batch()):
        plans.append(plan)
        seats = {seat.row: seat for seat in plan.verify}
        outcomes = {}
        for row, limit in plan.limits.items():
            taken = min(accepted(row), limit)
            left.setdefault(row, 8)
            left[row] -= any(chunk.row == row for chunk in plan.chunks) + (taken + 1 if row in seats else 0)
            outcomes[row] = Outcome(taken, left[row] <= 0)
        scheduler.report(outcomes)
    return plans


def requests(count, prompt_length=10):
    return (Request(i, prompt_length, 8) for i in range(count))


def test_prompts_ride_along_in_chunks():
    scheduler = Scheduler(batch_size=2, prefill_tokens=6)
    scheduler.feed(requests(3))
    first, second, third, fourth, *_ = played(scheduler)
    assert first.chunks == (Chunk(0, 0, 6, False),)
    assert first.verify == () and first.limits == {}
    # what the first prompt leaves of the second round goes to the next prompt
    assert second.chunks == (Chunk(0, 6, 10, True), Chunk(1, 0, 2, False))
    assert third.chunks == (Chunk(1, 2, 8, False),)
    assert third.verify == (Seat(0, 5),)
    assert fourth.chunks == (Chunk(1, 8, 10, True),)


def test_a_row_prefilled_ahead_runs_in_time():
    scheduler = Scheduler(batch_size=8, window=9, max_wait_rounds=3)
    scheduler.feed(Request(i, 4, 100) for i in range(9))
    waits = []
    for plan in (scheduler.next_batch() for _ in range(50)):
        ran = [row for row in scheduler.active if row in plan.rows]
        assert len(plan.verify) in (0, 8)
        waits.append(8 in ran)
        scheduler.report({row: Outcome(0, False) for row in plan.limits})
    # it takes a seat every third round and no more, since the others are older
    assert waits[1:] == [False, False, True] * 16 + [False]


@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_the_source_is_read_as_rows_are_needed(layout):
    read = []

    def source():
        for request in requests(10_000):
            read.append(request.id)
            yield request

    scheduler = Scheduler(batch_size=4, window=4, layout=layout)
    scheduler.feed(source())
    played(scheduler, rounds=40)
    ended = len(read) - len(scheduler.active) - len(scheduler.queued)
    assert ended > 10
    assert len(read) <= ended + 6


def test_a_source_that_breaks_loses_no_row():
    def source():
        yield from requests(3)
        yield Request(3, 0, 1)
        raise OSError("disk")

    scheduler = Scheduler(batch_size=8)
    scheduler.feed(source())
    with pytest.raises(OSError, match="disk"):
        scheduler.next_batch()
    plan = scheduler.next_batch()
    assert (len(plan.chunks), [id for id, _ in plan.refused]) == (3, [3])


def test_requests_that_do_not_fit_are_refused_and_the_rest_goes_on():
    scheduler = Scheduler(batch_size=2, max_columns=20)
    scheduler.feed([Request(0, 10, 8), Request(1, 30, 8), Request(2, 0, 8), Request(0, 1, 1), Request(3, 10, 8)])
    plan = scheduler.next_batch()
    assert plan.rows == [0, 3]
    assert [id for id, _ in plan.refused] == [1, 2, 0]
    reasons = [reason for _, reason in plan.refused]
    assert "request 1 may grow to 38 tokens (30 + 8); there is room for 20" in reasons
    assert any("prompt_length of request 2=0" in reason for reason in reasons)
    with pytest.raises(InputError, match="request 3 has not ended"):
        scheduler.submit(Request(3, 1, 1))


def test_paper_groups_by_length_and_cache_state():
    scheduler = Scheduler(batch_size=2, window=4, layout="padded")
    scheduler.feed(Request(i, length, 20) for i, length in enumerate([10, 12, 10, 12]))
    assert scheduler.next_batch().rows == [0, 2]
    # of length 11, and they have a cache and the others none
    scheduler.report({0: Outcome(0, False), 2: Outcome(0, False)})
    assert scheduler.next_batch().rows == [0, 2]
    scheduler.report({0: Outcome(0, False), 2: Outcome(1, False)})
    # of lengths 12 and 13
    assert scheduler.next_batch().rows == [1, 3]
    scheduler.report({1: Outcome(0, False), 3: Outcome(0, False)})
    # lengths 12, 13, 13, 13
    assert scheduler.next_batch().rows == [1, 2]


def test_the_window_shrinks_to_the_budget():
    scheduler = Scheduler(batch_size=8, budget_columns=100)
    scheduler.feed(requests(20))
    scheduler.next_batch()
    # 18 columns each
    assert len(scheduler.active) == 5
    scheduler = Scheduler(batch_size=8, layout="padded", budget_columns=100)
    scheduler.feed(requests(20))
    scheduler.next_batch()
    assert len(scheduler.active) == 5


def test_records():
    scheduler = Scheduler(batch_size=1, prefill_tokens=5)
    scheduler.submit(Request(7, 10, 8))
    scheduler.next_batch()
    scheduler.submit(Request(8, 10, 8))
    scheduler.report({})
    scheduler.next_batch()
    scheduler.report({7: Outcome(0, False)})
    scheduler.next_batch()
    assert scheduler.cancel(8).record == Record("cancelled", 1, None, None, 3, 0, 0)
    assert [r.record for r in scheduler.report({7: Outcome(4, True)})] == [Record("finished", 0, 0, 1, 2, 3, 0)]
    assert scheduler.cancel(7) is None
    assert not scheduler.next_batch()


def test_due_is_the_fewest_that_keep_everyone_in_time():
    rows = [Row(Request(i, 1, 1), last_round=last) for i, last in enumerate([5, 3, 4, 3, 5])]

    def ids(limit, batch_size=2):
        return [row.id for row in ageing.due(rows, 6, batch_size, limit)]

    assert ids(3) == [1, 3]
    # gaps 3, 3, 2, 1, 1 fit rounds of two from the next one on
    assert ids(5) == []
    assert ids(4) == []
    assert ids(3, batch_size=3) == [1, 3]


@pytest.mark.parametrize(
    ("outcomes", "message"),
    [
        ({}, "missing are \\[0, 1\\]"),
        ({0: Outcome(0, False), 1: Outcome(0, False), 5: Outcome(0, False)}, "not in its limits are \\[5\\]"),
        ({0: Outcome(6, False), 1: Outcome(0, False)}, "row 0 accepted 6 drafts; its limit is 5"),
        ({0: Outcome(-1, False), 1: Outcome(0, False)}, "row 0 accepted -1 drafts"),
        ({0: Outcome(0, False), 1: Outcome(2, False)}, "row 1 has reached its max_new_tokens"),
    ],
)
def test_impossible_outcomes_change_nothing(outcomes, message):
    scheduler = Scheduler(batch_size=2, layout="padded", max_columns=40)
    scheduler.feed([Request(0, 5, 20), Request(1, 5, 4)])
    with pytest.raises(InputError, match="no round to report"):
        scheduler.report({})
    scheduler.next_batch()
    scheduler.report({0: Outcome(0, False), 1: Outcome(0, False)})
    scheduler.next_batch()
    with pytest.raises(InputError, match=message):
        scheduler.report(outcomes)
    with pytest.raises(InputError, match="round 1 was not reported"):
        scheduler.next_batch()
    assert scheduler.report({0: Outcome(0, False), 1: Outcome(2, True)})[0].id == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0: need an integer of at least 1"),
        ({"window": 3}, "window=3: need an integer of at least 4"),
        ({"max_wait_rounds": 3}, "max_wait_rounds=3: need an integer of at least 4"),
        ({"layout": "square"}, "layout='square': supported are ragged, padded"),
        ({"max_columns": 1}, "max_columns=1: need an integer of at least 2"),
        ({"prefill_tokens": 0}, "prefill_tokens=0"),
        ({"num_draft_tokens": 1.5}, "num_draft_tokens=1.5"),
        ({"budget_columns": 1}, "budget_columns=1"),
    ],
)
def test_arguments_out_of_range(options, message):
    with pytest.raises(InputError, match=message):
        Scheduler(**{"batch_size": 4} | options)
