"""The padded layout: EXSPEC as published, the baseline."""

from __future__ import annotations

from collections.abc import Sequence

from . import ageing
from .plan import Chunk, Plan
from .policy import Policy
from .rows import Request, Row


class ByLength(Policy):
    """The first B rows of the window with one content length and cache state, else the oldest (paper, section 4.2)."""

    def wants(self, rows: Sequence[Row], request: Request) -> bool:
        return len(rows) < self.limits.window and self.fits(rows, request)

    def plan(self, rows: Sequence[Row], now: int) -> Plan:
        shape = (now, self.limits.batch_size, self.limits.max_wait_rounds)
        group = None if ageing.due(rows, *shape) else self._group(rows)
        return self.batch(group or ageing.due_first(rows, *shape), now)

    def batch(self, rows: Sequence[Row], now: int) -> Plan:
        """The round that runs ``rows``: of newcomers the prompts, of the others drafts."""
        chunks = [Chunk(row.id, 0, row.request.prompt_length, True) for row in rows if not row.is_ready]
        return Plan(now, self.seats(row for row in rows if row.is_ready), tuple(chunks))

    def _group(self, rows: Sequence[Row]) -> list[Row] | None:
        groups: dict[tuple[int, bool], list[Row]] = {}
        for row in rows:
            group = groups.setdefault((row.length, row.is_ready), [])
            group.append(row)
            if len(group) == self.limits.batch_size:
                return group
        return None
