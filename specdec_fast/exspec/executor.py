"""Runs scheduler plans over a pool of slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.utils.rnn import pad_sequence

from ..decoding.base import Decoder
from ..decoding.rounds import Rounds
from ..drafters import Drafts
from ..layouts.padded.gathered import GatheredPool
from ..layouts.ragged import RaggedPool, Segment
from ..scheduler import Outcome, Plan
from ..scheduler.policy import Limits
from .request import RequestRow

POOLS: dict[str, type[RaggedPool]] = {kind.layout: kind for kind in (RaggedPool, GatheredPool)}

# slots are made narrower again once they are wider than the rows need by this factor
SHRINK = 4


@dataclass
class Outcomes:
    """Outcomes of a round by request: ``rows`` that took part, errors of ``failed``."""

    rows: dict[int, Outcome] = field(default_factory=dict)
    failed: dict[int, Exception] = field(default_factory=dict)


class Executor:
    """Rows in the slots of a pool that is never wider than its rows need, nor larger than the budget.

    Args:
        decoder: whose models run.
        limits: the scheduler's.
        longest: tokens that no row will outgrow.
        stop_ids: token ids that end a row.

    Attributes:
        rounds: the steps of a round over the rows at hand.
        slots: of the rows in the pool.
    """

    def __init__(self, decoder: Decoder, limits: Limits, longest: int, stop_ids: Sequence[int]):
        self.window = limits.window
        self.pool = POOLS[decoder.layout](0, stop_ids, decoder.target.device, max_columns=limits.budget_columns)
        self.rounds = Rounds(decoder, self.pool, longest, stop_ids)
        self.slots: dict[int, int] = {}
        # most tokens of each row in a slot
        self._columns: dict[int, int] = {}
        # of the current round
        self._seated: list[int] = []

    def run(self, plan: Plan, rows: Mapping[int, RequestRow]) -> Outcomes:
        """Carry out ``plan`` over ``rows``, and let go of those that finish or fail."""
        self._lease([chunk.row for chunk in plan.chunks if chunk.row not in self.slots], rows)
        newcomers = [chunk.row for chunk in plan.chunks if chunk.is_last]
        self._seated = [seat.row for seat in plan.verify]
        limits = [seat.limit for seat in plan.verify]
        self.pool.select([self.slots[id] for id in self._seated + newcomers])
        self.pool.open_rows(limits + [0] * len(newcomers))
        self._isolate(range(len(limits)))
        drafts, errors = self._draft([rows[id] for id in self._seated], limits)
        outcomes = Outcomes(failed={self._seated[place]: error for place, error in errors.items()})
        for id in outcomes.failed:
            self.release(id)
        verified = [id for id in self._seated if id in self.slots]
        riders = [Segment(self.slots[c.row], c.start, c.stop - c.start) for c in plan.chunks if not c.is_last]
        running = verified + newcomers
        if not running and not riders:
            return outcomes
        self.pool.select([self.slots[id] for id in running], riders)
        judged, _ = self.rounds.verify([rows[id] for id in running], drafts.extended(len(newcomers)))
        self.rounds.count([rows[id] for id in verified], drafts.counts, judged[: len(verified)])
        outcomes.rows = dict(zip(running, judged, strict=True))
        for id, outcome in outcomes.rows.items():
            if outcome.finished:
                self._forget(id)
        return outcomes

    def release(self, id: int) -> None:
        """Let a row go, at any point of its life; one that was never run is not known."""
        if id in self.slots:
            self.pool.release(self.slots[id])
            self._forget(id)

    @classmethod
    def column_bytes(cls, decoder: Decoder, longest: int) -> int:
        """KV bytes that a token takes in all models."""
        pool = POOLS[decoder.layout](1, [], decoder.target.device, chunk=1)
        rounds = Rounds(decoder, pool, longest, [])
        pool.select([pool.lease(pool.tokens.new_zeros(1), 2)])
        for model in pool.models:
            model.verify(*rounds.no_drafts(1))
        return pool.kv_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes that KV caches take now."""
        return self.pool.kv_bytes

    def _draft(self, rows: Sequence[RequestRow], limits: list[int]) -> tuple[Drafts, dict[int, Exception]]:
        """Drafts of the rows that drafting works for, and the errors of the others by place.

        A drafter that raises is asked again for each row alone, to find the rows it fails on.
        """
        if not rows:
            return self.rounds.no_drafts(0), {}
        try:
            return self.rounds.draft(rows, limits), {}
        except Exception:
            drafts, errors = [], {}
            for place, (row, limit) in enumerate(zip(rows, limits, strict=True)):
                self._isolate([place])
                try:
                    drafts.append(self.rounds.draft([row], [limit]))
                except Exception as error:
                    errors[place] = error
            self._isolate([place for place in range(len(rows)) if place not in errors])
            if not drafts:
                return self.rounds.no_drafts(0), errors
            ids = pad_sequence([alone.ids[0] for alone in drafts], batch_first=True)
            return Drafts(ids, [alone.counts[0] for alone in drafts]), errors

    def _isolate(self, places: Sequence[int]) -> None:
        """Reduce the current round to its rows at ``places``, as if nothing had been drafted."""
        self.pool.select([self.slots[self._seated[place]] for place in places])
        self.pool.rewind()

    def _lease(self, ids: Sequence[int], rows: Mapping[int, RequestRow]) -> None:
        """Give each of ``ids`` a slot."""
        if not ids:
            return
        self._columns |= {id: len(rows[id].text) + rows[id].remaining for id in ids}
        self._fit()
        for id in ids:
            row = rows[id]
            self.slots[id] = self.pool.lease(torch.tensor(row.text, device=self.pool.device), self._columns[id])

    def _fit(self) -> None:
        """Bring the pool into a shape in which all of its rows can grow to their ends, in any case."""
        pool, count, widest = self.pool, len(self._columns), max(self._columns.values())
        budget = pool.max_columns
        slots = self.window if budget is None else min(self.window, budget // widest)
        fits = count <= pool.num_slots <= slots
        if not fits or pool.capacity > SHRINK * -(-widest // pool.chunk) * pool.chunk:
            used = max(pool.lengths, default=0)
            went_to = pool.resize(max(slots, count), max(used, 1))
            self.slots = {id: went_to[slot] for id, slot in self.slots.items()}

    def _forget(self, id: int) -> None:
        del self.slots[id], self._columns[id]
        self.rounds.drafting.forget(id)
