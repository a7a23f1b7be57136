"""A plan: the work of one round."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chunk:
    """Prompt tokens ``[start, stop)`` of a row to run; after the last chunk the row gains its first token.

    In the padded layout a prompt runs whole, before the round's verify.
    """

    row: int
    start: int
    stop: int
    is_last: bool


@dataclass(frozen=True)
class Seat:
    """A row of the verify.

    Attributes:
        row: of the request.
        limit: most drafts that it can use.
    """

    row: int
    limit: int


@dataclass(frozen=True)
class Plan:
    """A round: ``chunks`` and ``verify``. False when there is nothing to do.

    Attributes:
        round: its number, from 0.
        verify: rows to draft for and verify, at most ``batch_size``.
        chunks: prompts to run; in the ragged layout in the same forward as the verify.
        refused: ``(id, reason)`` of requests from the source that cannot be decoded; they never become rows.
    """

    round: int
    verify: tuple[Seat, ...] = ()
    chunks: tuple[Chunk, ...] = ()
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
