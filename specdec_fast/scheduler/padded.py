"""The padded layout: rows of a batch share a right edge, and rows off it must move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..errors import InputError
from . import ageing
from .plan import Chunk, Plan, Seat
from .policy import Limits, Policy
from .rows import Request, Row
from .stage import Stage


class Padded(Policy):
    """Base of the padded policies; newcomers are prefilled in place, at the right edge of the batch they join."""

    slack = 0

    def __init__(self, limits: Limits):
        super().__init__(limits)
        assert limits.max_columns is not None
        self.stage = Stage(limits.max_columns, limits.num_draft_tokens)

    @classmethod
    def within_budget(cls, limits: Limits) -> Limits:
        """A lane takes a stage's width, and a row of the window its longest content where the policy uses the pool."""
        assert limits.max_columns is not None
        lane = Stage(limits.max_columns, limits.num_draft_tokens).width
        slot = limits.max_columns if cls.uses_pool else 0
        budget = limits.budget_columns
        if budget is None:
            return limits
        batch_size = min(limits.batch_size, budget // (lane + slot))
        if not batch_size:
            raise InputError(
                f"budget_columns={budget}: one row of max_columns={limits.max_columns} takes {lane + slot} columns"
            )
        room = (budget - batch_size * lane) // slot if slot else batch_size
        # fewer seats serve fewer rows in time
        window = min(limits.window, room, batch_size * limits.max_wait_rounds)
        return replace(limits, batch_size=batch_size, window=window)

    def release(self, row: Row) -> None:
        self.stage.release(row)

    def batch(self, rows: Sequence[Row], grouped: bool | None, now: int) -> Plan:
        """The round that runs ``rows``; ``grouped`` is ``None`` for whether nothing moves."""
        # a newcomer that may gain one token has it from its prompt
        seated = [row for row in rows if row.is_ready or row.remaining > 1]
        edge, moves = self.stage.place(seated, self.slack)
        chunks = [Chunk(r.id, 0, r.request.prompt_length, True, r.lane) for r in rows if not r.is_ready]
        lanes = {row.lane: row for row in seated}
        seats = [self._seat(lanes[lane], lane, edge) for lane in range(len(lanes))]
        if grouped is None:
            grouped = not moves
        return Plan(now, tuple(seats), tuple(chunks), tuple(moves), edge, grouped)

    def _seat(self, row: Row, lane: int, edge: int) -> Seat:
        lead = row.end - edge
        remaining = row.remaining if row.is_ready else row.remaining - 1
        return Seat(row.id, min(self.limits.num_draft_tokens - lead, remaining - 1), lane, lead)


class Paper(Padded):
    """EXSPEC as published: the first B rows of the window with one content length and one cache state, else the oldest.

    Every batch is put together from the pool, as the published code does it, even one that ran in the round before.
    """

    keeps_lanes = False
    uses_pool = True

    def wants(self, rows: Sequence[Row], request: Request) -> bool:
        return len(rows) < self.limits.window

    def plan(self, rows: Sequence[Row], now: int) -> Plan:
        if not self.keeps_lanes:
            self.stage.clear()
        shape = (now, self.limits.batch_size, self.limits.max_wait_rounds)
        group = None if ageing.due(rows, *shape) else self._group(rows)
        batch = group or ageing.due_first(rows, *shape)
        # rows that are due may happen to be a group, too
        return self.batch(batch, self._group(batch) is not None, now)

    def _group(self, rows: Sequence[Row]) -> list[Row] | None:
        groups: dict[tuple[int, bool], list[Row]] = {}
        for row in rows:
            group = groups.setdefault(_kind(row), [])
            group.append(row)
            if len(group) == self.limits.batch_size:
                return group
        return None


class KeptPaper(Paper):
    """The published choice of rows, with rows left in their lanes from batch to batch: only what has to move does."""

    keeps_lanes = True


class SameEnd(Padded):
    """Rows whose right edges lie within ``slack`` columns are batched together and stay where they are.

    One batch holds its rows until they end, and newcomers are placed at its edge. Taking a row from outside the batch
    gathers all of its columns, the cost of shifting a row of that length inside: a choice among more rows moves no
    less, so no more rows than seats are started. Allowing more than one edge moves less: a row that leads by d columns
    drafts d tokens less, which lets the others catch up.
    """

    def __init__(self, limits: Limits):
        super().__init__(limits)
        self.slack = limits.slack

    def wants(self, rows: Sequence[Row], request: Request) -> bool:
        return len(rows) < self.limits.batch_size

    def plan(self, rows: Sequence[Row], now: int) -> Plan:
        return self.batch(rows, None, now)


class PerBatch(Padded):
    """EQSPEC, batch after batch: no row joins before the slowest has ended. The baseline."""

    def wants(self, rows: Sequence[Row], request: Request) -> bool:
        return len(rows) < self.limits.batch_size and all(row.started is None for row in rows)

    def plan(self, rows: Sequence[Row], now: int) -> Plan:
        return self.batch(rows, None, now)


def _kind(row: Row) -> tuple[int, bool]:
    """Key of a group's rows: content length and cache state."""
    return row.length, row.is_ready
