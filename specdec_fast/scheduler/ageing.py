"""No row waits for ever."""

from __future__ import annotations

from collections.abc import Sequence

from .rows import Row


def due(rows: Sequence[Row], now: int, batch_size: int, max_wait_rounds: int) -> list[Row]:
    """The fewest rows that must run in round ``now`` so that all can run in time, the longest waiting first.

    Were only the longest waiting rows served from the next round on, the row of rank ``r`` would run
    ``r // batch_size`` rounds after it. Keeping that within every row's limit now keeps it so for good, with any other
    rows in the batch, as long as ``len(rows) <= batch_size * max_wait_rounds``.
    """
    waiting = sorted(rows, key=lambda row: row.last_round)
    count = 0
    for rank, row in enumerate(waiting):
        rounds_left = max_wait_rounds - (now - row.last_round)
        count = max(count, rank + 1 - rounds_left * batch_size)
    return waiting[:count]


def due_first(rows: Sequence[Row], now: int, batch_size: int, max_wait_rounds: int) -> list[Row]:
    """A batch of the rows that are due, then the oldest; ``rows`` are in order of age."""
    chosen = dict.fromkeys(due(rows, now, batch_size, max_wait_rounds))
    for row in rows:
        if len(chosen) == batch_size:
            break
        chosen.setdefault(row)
    return [row for row in rows if row in chosen]
