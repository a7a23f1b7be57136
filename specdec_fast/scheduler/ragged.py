"""The ragged layout: any rows form a batch, so age decides, and prompts ride along."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .ageing import due_first
from .plan import Chunk, Plan
from .policy import Limits, Policy
from .rows import Request, Row

# rows prefilled ahead: with more of them rows wait longer, with fewer seats stay empty while prompts run
SEATS_PER_SPARE = 8


class ByAge(Policy):
    """The oldest rows run; a few younger ones are prefilled ahead, so that a seat is taken as soon as it is free.

    More rows than that would hold KV, and wait, for nothing: the window is a limit here, not a goal.
    """

    @classmethod
    def within_budget(cls, limits: Limits) -> Limits:
        ahead = (limits.batch_size + SEATS_PER_SPARE // 2) // SEATS_PER_SPARE
        return replace(limits, window=min(limits.window, limits.batch_size + ahead))

    def wants(self, rows: Sequence[Row], request: Request) -> bool:
        limits = self.limits
        if len(rows) >= limits.window:
            return False
        # so that at most one prompt is left unfinished by a round, and every row in the window takes part in it
        unread = sum(row.request.prompt_length - row.prefilled for row in rows if not row.is_ready)
        return unread < limits.prefill_tokens and self.fits(rows, request)

    def plan(self, rows: Sequence[Row], now: int) -> Plan:
        limits = self.limits
        ready = [row for row in rows if row.is_ready]
        batch = due_first(ready, now, limits.batch_size, limits.max_wait_rounds)
        return Plan(now, self.seats(batch), tuple(self._chunks(rows)))

    def _chunks(self, rows: Sequence[Row]) -> list[Chunk]:
        chunks, left = [], self.limits.prefill_tokens
        for row in rows:
            size = min(left, row.request.prompt_length - row.prefilled)
            if size and not row.is_ready:
                stop = row.prefilled + size
                chunks.append(Chunk(row.id, row.prefilled, stop, stop == row.request.prompt_length))
                left -= size
        return chunks
