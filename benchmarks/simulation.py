"""Drives the scheduler with synthetic acceptance and a cost model: grouping rates and latencies without a model."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from specdec_fast.scheduler import Outcome, Plan, Record, Request, Scheduler
from specdec_fast.scheduler.padded import ByLength
from specdec_fast.scheduler.policy import Policy
from specdec_fast.scheduler.ragged import ByAge
from specdec_fast.scheduler.rows import Row


@dataclass(frozen=True)
class Job:
    """A sequence whose future is known.

    Whether the draft is right at a given token depends on ``seed`` and the token's place alone, so every policy sees
    the same sequence.

    Attributes:
        prompt_length: tokens of the prompt.
        new_tokens: tokens until its end.
        max_new_tokens: tokens it asks for.
        rate: probability that the draft is right at a token, so accepted counts are geometric.
        seed: of the row's luck.
        arrival: time of submission.
        turns: turns of its conversation that follow this one.
    """

    prompt_length: int
    new_tokens: int
    max_new_tokens: int
    rate: float
    seed: int
    arrival: float = 0.0
    turns: int = 0


@dataclass(frozen=True)
class Traffic:
    """Random jobs.

    Attributes:
        prompt_lengths: shortest and longest prompt; equal for identical lengths.
        max_new_tokens: most new tokens.
        mean_new_tokens: mean of the geometric length at which a row would end by itself; ``inf`` for never.
        rate: mean acceptance rate; per-row rates are Beta(6 rate, 6 (1 - rate)).
        turns: turns of each conversation.
        think_time: mean pause between the turns, exponential.
        added_tokens: tokens a user adds in each later turn.
    """

    prompt_lengths: tuple[int, int] = (16, 256)
    max_new_tokens: int = 128
    mean_new_tokens: float = 96.0
    rate: float = 0.65
    turns: int = 1
    think_time: float = 50.0
    added_tokens: int = 16

    @property
    def max_columns(self) -> int:
        """Longest content of a row, all turns of it."""
        return self.prompt_lengths[1] + self.turns * self.max_new_tokens + (self.turns - 1) * self.added_tokens

    def jobs(self, count: int, seed: int = 0, arrival_rate: float = math.inf) -> Iterator[Job]:
        """``count`` conversations that begin as a Poisson process, or all at time 0."""
        generator = random.Random(seed)
        time = 0.0
        for number in range(count):
            prompt = generator.randint(*self.prompt_lengths)
            rate = generator.betavariate(6 * self.rate, 6 * (1 - self.rate))
            yield Job(
                prompt, self._new_tokens(generator), self.max_new_tokens, rate, number, time, turns=self.turns - 1
            )
            time += generator.expovariate(arrival_rate) if arrival_rate < math.inf else 0.0

    def next_turn(self, job: Job, now: float) -> Job:
        """The turn after ``job``, which ended at ``now``: its text plus a few tokens."""
        generator = random.Random(f"{job.seed} {job.turns}")
        return replace(
            job,
            prompt_length=job.prompt_length + job.new_tokens + self.added_tokens,
            new_tokens=self._new_tokens(generator),
            seed=generator.getrandbits(32),
            arrival=now + generator.expovariate(1 / self.think_time),
            turns=job.turns - 1,
        )

    def _new_tokens(self, generator: random.Random) -> int:
        if self.mean_new_tokens == math.inf:
            return self.max_new_tokens
        own = 1 + int(math.log(1 - generator.random()) / math.log(1 - 1 / self.mean_new_tokens))
        return min(self.max_new_tokens, own)


@dataclass(frozen=True)
class CostModel:
    """Time of a round; the unit is a target forward of one token.

    Attributes:
        draft_step: one forward of the draft.
        token: each token that goes through the target.
        column: each KV column moved.
    """

    draft_step: float = 0.05
    token: float = 0.002
    column: float = 0.0002

    def seconds(self, plan: Plan, is_packed: bool, columns_moved: int = 0) -> float:
        """A padded round prefills in a forward of its own."""
        drafts = max((seat.limit for seat in plan.verify), default=0)
        verified = sum(seat.limit + 1 for seat in plan.verify) if is_packed else (drafts + 1) * len(plan.verify)
        prompt = sum(chunk.stop - chunk.start for chunk in plan.chunks)
        forwards = 1 if is_packed else bool(plan.verify) + bool(plan.chunks)
        return forwards + drafts * self.draft_step + (verified + prompt) * self.token + columns_moved * self.column


@dataclass
class Trace:
    """Simulation results.

    Attributes:
        records: of all rows, in the order of their end.
        latencies: per record, time from arrival to end.
        time: when the last row ended.
        tokens: new tokens.
        rounds: plans.
        verify_calls: plans with a verify.
        grouped: verify calls that move no KV, or are a group of the published choice.
        seats: rows summed over verify calls.
        columns_moved: KV columns gathered; those of EQSPEC's realign are not simulated.
    """

    records: list[Record] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    time: float = 0.0
    tokens: int = 0
    rounds: int = 0
    verify_calls: int = 0
    grouped: int = 0
    seats: int = 0
    columns_moved: int = 0

    @property
    def grouping_rate(self) -> float:
        """Share of verify calls that are a group (paper, Figure 5)."""
        return self.grouped / self.verify_calls

    @property
    def mean_batch(self) -> float:
        return self.seats / self.verify_calls

    @property
    def rounds_of_rows(self) -> list[int]:
        """Per record, rounds from its first to its last, both included."""
        return [r.ended - r.started + 1 for r in self.records if r.started is not None and r.ended is not None]


def percentile(values: Iterable[float], percent: float) -> float:
    """The least value that at least ``percent`` % of ``values`` do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def simulate(
    scheduler: Scheduler, jobs: Iterable[Job], traffic: Traffic = Traffic(), cost: CostModel = CostModel()
) -> Trace:
    """Decode ``jobs``, which come in order of arrival, and the turns that follow them."""
    return _Simulation(scheduler, jobs, traffic, cost).run()


class PerBatch(ByLength):
    """EQSPEC, batch after batch: no row joins before the slowest has ended. The baseline."""

    def wants(self, rows: Sequence[Row], request: Request) -> bool:
        return len(rows) < self.limits.batch_size and all(row.request.record.started is None for row in rows)

    def plan(self, rows: Sequence[Row], now: int) -> Plan:
        return self.batch(rows, now)


POLICIES: dict[str, type[Policy]] = {"age": ByAge, "paper": ByLength, "per-batch": PerBatch}


class _Decoding:
    """A job in the making: which of its tokens the draft will get right, and how many it has."""

    def __init__(self, job: Job):
        self.job = job
        generator = random.Random(job.seed)
        self.is_right = [generator.random() < job.rate for _ in range(job.new_tokens)]
        self.produced = 0

    @property
    def length(self) -> int:
        return self.job.prompt_length + self.produced

    def advance(self, limit: int, has_first: bool, has_verify: bool) -> Outcome:
        self.produced += has_first
        accepted = 0
        if has_verify:
            for is_right in self.is_right[self.produced : self.produced + limit]:
                if not is_right:
                    break
                accepted += 1
            self.produced += accepted + 1
        return Outcome(accepted, self.produced >= self.job.new_tokens)


class _Simulation:
    def __init__(self, scheduler: Scheduler, jobs: Iterable[Job], traffic: Traffic, cost: CostModel):
        self.scheduler, self.traffic, self.cost = scheduler, traffic, cost
        self.jobs = iter(jobs)
        self.trace = Trace()
        self.running: dict[int, _Decoding] = {}
        self.coming: list[tuple[float, int, Job]] = []
        self.ids = 0
        self.is_packed = scheduler.layout == "ragged"

    def run(self) -> Trace:
        trace = self.trace
        self._expect(next(self.jobs, None))
        while True:
            self._submit_arrived()
            plan = self.scheduler.next_batch()
            if plan:
                moved = self._count(plan)
                trace.time += self.cost.seconds(plan, self.is_packed, moved)
                self._report(plan)
            elif self.coming:
                trace.time = self.coming[0][0]
            else:
                return trace

    def _expect(self, job: Job | None) -> None:
        if job:
            heapq.heappush(self.coming, (job.arrival, self.ids, job))
            self.ids += 1

    def _submit_arrived(self) -> None:
        while self.coming and self.coming[0][0] <= self.trace.time:
            _, id, job = heapq.heappop(self.coming)
            self.running[id] = _Decoding(job)
            self.scheduler.submit(Request(id, job.prompt_length, job.max_new_tokens))
            if job.turns == self.traffic.turns - 1:
                self._expect(next(self.jobs, None))

    def _count(self, plan: Plan) -> int:
        """Add ``plan`` to the trace; the KV columns that it gathers."""
        trace, lengths = self.trace, [self.running[seat.row].length for seat in plan.verify]
        gathers = self.scheduler.policy is ByLength
        moved = sum(length - 1 for length in lengths) if gathers else 0
        is_group = len(lengths) == self.scheduler.limits.batch_size and len(set(lengths)) == 1 and not plan.chunks
        trace.rounds += 1
        trace.verify_calls += bool(lengths)
        trace.grouped += bool(lengths) and (is_group or not gathers)
        trace.seats += len(lengths)
        trace.columns_moved += moved
        return moved

    def _report(self, plan: Plan) -> None:
        first = {chunk.row for chunk in plan.chunks if chunk.is_last}
        verified = {seat.row for seat in plan.verify}
        outcomes = {
            id: self.running[id].advance(limit, id in first, id in verified) for id, limit in plan.limits.items()
        }
        trace = self.trace
        for request in self.scheduler.report(outcomes):
            job = self.running.pop(request.id).job
            trace.records.append(request.record)
            trace.latencies.append(trace.time - job.arrival)
            trace.tokens += job.new_tokens
            if job.turns:
                self._expect(self.traffic.next_turn(job, trace.time))
