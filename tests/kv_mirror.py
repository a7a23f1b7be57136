"""Carries out a plan on symbolic KV and checks that every row finds its own entries, and no other row's."""

from __future__ import annotations

from specdec_fast.scheduler.stage import Stage


class KvMirror:
    """Lanes and pool slots whose columns hold ``(row, position)``, for the padded layout."""

    def __init__(self, limits):
        self.drafts = limits.num_draft_tokens
        self.width = Stage(limits.max_columns, self.drafts).width
        self.lanes = [{} for _ in range(limits.batch_size)]
        self.pool = {}

    def run(self, plan, lengths):
        """Moves, prompts, verify; ``lengths`` are the content lengths of the rows before the plan."""
        for move in plan.moves:
            held = self.pool[move.row] if move.source is None else self.lanes[move.source]
            first = next(column for column, entry in held.items() if entry == (move.row, 0))
            # nothing else is left in the lane, so whoever relies on it is seen
            self.lanes[move.lane] = {first + i + move.shift: held[first + i] for i in range(move.columns)}
            assert list(self.lanes[move.lane].values()) == [(move.row, i) for i in range(lengths[move.row] - 1)]
        for chunk in plan.chunks:
            if chunk.lane is None:
                continue
            first = plan.edge - 1 - chunk.stop
            self.lanes[chunk.lane] = {first + i: (chunk.row, i) for i in range(chunk.stop)}
            self.pool[chunk.row] = {i: (chunk.row, i) for i in range(chunk.stop)}
            assert first >= 0
        assert [seat.lane for seat in plan.verify] == list(range(len(plan.verify)))
        for seat in plan.verify:
            self._verify(plan, seat, lengths[seat.row])

    def _verify(self, plan, seat, length):
        end, lane = plan.edge + seat.lead, self.lanes[seat.lane]
        start = end - length
        assert start >= 0
        # the bonus token needs a column, too
        assert plan.edge + self.drafts + 1 <= self.width
        assert end + seat.limit <= plan.edge + self.drafts
        assert [lane.get(start + i) for i in range(length - 1)] == [(seat.row, i) for i in range(length - 1)]
        for column in range(plan.edge - 1, plan.edge + self.drafts):
            lane[column] = (seat.row, column - start)
            self.pool[seat.row][column - start] = (seat.row, column - start)
