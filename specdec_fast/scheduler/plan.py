"""A plan: the work of one round."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chunk:
    """Prompt tokens ``[start, stop)`` of a row to run; after the last chunk the row gains its first token.

    In the padded layout a prompt runs whole, before the round's verify, into columns ``[edge - 1 - stop, edge - 1)`` of
    ``lane``; its first token is at ``edge - 1``. A row without a lane ends with that token, and its KV can be dropped.
    """

    row: int
    start: int
    stop: int
    is_last: bool
    lane: int | None = None


@dataclass(frozen=True)
class Move:
    """KV columns to bring to the right edge before anything runs; gather and shift are one move.

    Attributes:
        row: of the request.
        source: lane that holds the row, or ``None`` for its slot in the pool, where content begins at column 0.
        lane: where it is to be. Moves with ``source == lane`` are in place; the others go to lanes that are free.
        columns: valid KV columns of the row, all of which move.
        shift: columns by which they move to the right; negative is to the left.
    """

    row: int
    source: int | None
    lane: int
    columns: int
    shift: int


@dataclass(frozen=True)
class Seat:
    """A row of the verify.

    Attributes:
        row: of the request.
        limit: most drafts that it can use.
        lane: row of the padded batch; lanes of a batch are 0, 1, 2, ...
        lead: columns by which its right edge lies beyond the batch's. A row with a lead feeds its last ``1 + lead``
            tokens (writing KV anew that is there already) and then its drafts, so all rows fill the same columns.
    """

    row: int
    limit: int
    lane: int | None = None
    lead: int = 0


@dataclass(frozen=True)
class Plan:
    """A round: ``moves``, then ``chunks`` and ``verify``. False when there is nothing to do.

    Attributes:
        round: its number, from 0.
        verify: rows to draft for and verify, at most ``batch_size``.
        chunks: prompts to run; in the ragged layout in the same forward as the verify.
        moves: KV to move, padded layout only.
        edge: shared right edge, padded layout only; the row in seat ``s`` has its last token at ``edge + s.lead - 1``.
        grouped: the batch is one that its policy looks for: B rows of one content length and cache state for ``paper``,
            nothing to move for the others. What is not grouped is a realign.
        refused: ``(id, reason)`` of requests from the source that cannot be decoded; they never become rows.
    """

    round: int
    verify: tuple[Seat, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    moves: tuple[Move, ...] = ()
    edge: int | None = None
    grouped: bool = True
    refused: tuple[tuple[int, str], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.verify or self.chunks)

    @property
    def limits(self) -> dict[int, int]:
        """Most drafts that each row can report as accepted; rows in the middle of their prompt report nothing."""
        return {chunk.row: 0 for chunk in self.chunks if chunk.is_last} | {seat.row: seat.limit for seat in self.verify}

    @property
    def rows(self) -> list[int]:
        """Rows that take part."""
        return list(dict.fromkeys([chunk.row for chunk in self.chunks] + [seat.row for seat in self.verify]))

    @property
    def columns_moved(self) -> int:
        return sum(move.columns for move in self.moves)
