"""Plans on the padded layout: lanes that share a right edge, moved as the policy says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..decoder import Decoder
from ..drafters import Drafts
from ..lanes import LaneMove, LaneRow, Lanes
from ..rounds import Rounds
from ..scheduler import Outcome, Plan
from ..scheduler.policy import Limits
from ..scheduler.stage import Stage
from .request import RequestRow
from .runner import Outcomes, Runner


class PaddedRunner(Runner):
    """Rows in lanes, and in a pool where the policy takes rows out of their lanes.

    Args:
        decoder: whose models run.
        limits: the scheduler's.
        uses_pool: whether rows wait outside of the lanes.
        stop_ids: token ids that end a row.
    """

    def __init__(self, decoder: Decoder, limits: Limits, uses_pool: bool, stop_ids: Sequence[int]):
        assert limits.max_columns is not None
        width = Stage(limits.max_columns, limits.num_draft_tokens).width
        slots = limits.window if uses_pool else 0
        self.lanes = Lanes(limits.batch_size, width, slots, limits.max_columns, stop_ids, decoder.target.device)
        self.rounds = Rounds(decoder, self.lanes, limits.max_columns, stop_ids)
        self.rows: dict[int, LaneRow] = {}
        self._free_slots = list(range(slots))
        # of the current round
        self._edge = 0
        self._seated: list[int] = []
        self._ends: dict[int, int] = {}

    def run(self, plan: Plan, rows: Mapping[int, RequestRow]) -> Outcomes:
        assert plan.edge is not None
        self._edge = plan.edge
        outcomes = Outcomes()
        self._take_lanes(plan, rows)
        self._prefill(plan, rows, outcomes)
        seats = [seat for seat in plan.verify if seat.row in self.rows]
        self._seated = [seat.row for seat in seats]
        self._ends = {seat.row: plan.edge + seat.lead for seat in seats}
        limits = [seat.limit for seat in seats]
        self.isolate(range(len(seats)))
        drafts, errors = self.draft([rows[id] for id in self._seated], limits)
        for place, error in errors.items():
            id = self._seated[place]
            outcomes.failed[id] = error
            outcomes.rows.pop(id, None)
            self.release(id)
        running = [id for id in self._seated if id in self.rows]
        if not running:
            return outcomes
        self._verify(running, rows, drafts, outcomes)
        self.rounds.count([rows[id] for id in running], drafts.counts, [outcomes.rows[id].accepted for id in running])
        return outcomes

    def release(self, id: int) -> None:
        row = self.rows.pop(id, None)
        if row is None:
            return
        if row.slot is not None:
            self._free_slots.append(row.slot)
        self.lanes.release(row)
        self.rounds.drafting.forget(id)

    @property
    def kv_bytes(self) -> int:
        return self.lanes.kv_bytes

    def isolate(self, places: Sequence[int]) -> None:
        self._select([self._seated[place] for place in places])
        self.lanes.rewind()

    @classmethod
    def column_bytes(cls, decoder: Decoder, longest: int) -> int:
        lanes = Lanes(1, 1, 0, 0, [], decoder.target.device)
        rounds = Rounds(decoder, lanes, longest, [])
        lanes.select([LaneRow([0], 2, lane=0)], [1])
        for model in lanes.models:
            model.verify(*rounds.no_drafts(1))
        return lanes.kv_bytes

    def _take_lanes(self, plan: Plan, rows: Mapping[int, RequestRow]) -> None:
        """Assign lanes, and move rows that are elsewhere."""
        for chunk in plan.chunks:
            row = rows[chunk.row]
            self.rows[chunk.row] = LaneRow(row.text, len(row.text) + row.remaining)
            if self._free_slots and chunk.lane is not None:
                self.rows[chunk.row].slot = self._free_slots.pop()
        for seat in plan.verify:
            self.rows[seat.row].lane = seat.lane
        moves = []
        for move in plan.moves:
            moved = self.rows[move.row]
            start = self._edge - len(moved.text) - move.shift
            moves.append(LaneMove(moved, move.source, start, move.columns, move.shift))
        self.lanes.move(moves)

    def _prefill(self, plan: Plan, rows: Mapping[int, RequestRow], outcomes: Outcomes) -> None:
        """Run the prompts of newcomers; some end with their first token."""
        newcomers = [chunk.row for chunk in plan.chunks]
        if not newcomers:
            return
        # rows that gain a single token take lanes beyond the verify's
        spare = iter(range(len(plan.verify), self.lanes.num_lanes))
        for chunk in plan.chunks:
            if chunk.lane is None:
                self.rows[chunk.row].lane = next(spare)
        # the first token lands at the edge
        self._ends = dict.fromkeys(newcomers, self._edge - 1)
        self._verify(newcomers, rows, self.rounds.no_drafts(len(newcomers)), outcomes)

    def _select(self, ids: Sequence[int]) -> None:
        self.lanes.select([self.rows[id] for id in ids], [self._ends[id] for id in ids])

    def _verify(self, ids: Sequence[int], rows: Mapping[int, RequestRow], drafts: Drafts, outcomes: Outcomes) -> None:
        self._select(ids)
        verdict = self.rounds.verify([rows[id] for id in ids], drafts)
        for id, accepted, finished in zip(ids, verdict.accepted, verdict.finished, strict=True):
            outcomes.rows[id] = Outcome(accepted, finished)
            if finished:
                self.release(id)
