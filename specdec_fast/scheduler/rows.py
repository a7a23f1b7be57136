"""The scheduler's view of a sequence: numbers only; tokens and tensors stay with the decoder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

End = Literal["finished", "cancelled", "failed"]


@dataclass
class Record:
    """The life of a sequence, in rounds of the scheduler; ``None`` where it did not get that far.

    Attributes:
        end: how it ended.
        queued: round before which it was submitted, or read from the source.
        started: round that began its prompt.
        first_token: round that gave its first token.
        ended: last round it was part of the scheduler.
        rounds: rounds it took part in, those of its prompt included.
        longest_wait: most rounds in a row that it sat out while it was in the window.
    """

    end: End | None = None
    queued: int | None = None
    started: int | None = None
    first_token: int | None = None
    ended: int | None = None
    rounds: int = 0
    longest_wait: int = 0


@dataclass(frozen=True)
class Request:
    """A sequence to decode.

    Attributes:
        id: the caller's name for it, unique among the sequences that have not ended.
        prompt_length: tokens of the prompt, at least 1.
        max_new_tokens: tokens it may gain, at least 1.
        record: kept up by the scheduler.
    """

    id: int
    prompt_length: int
    max_new_tokens: int
    record: Record = field(default_factory=Record, compare=False)

    @property
    def columns(self) -> int:
        """KV columns the sequence may come to need."""
        return self.prompt_length + self.max_new_tokens


@dataclass(frozen=True)
class Outcome:
    """A round's result for a row.

    Attributes:
        accepted: drafts accepted, 0 to the seat's ``limit``; 0 for a row that was only prefilled. The bonus token is
            not counted, nor is a newcomer's first token.
        finished: the row has ended.
    """

    accepted: int
    finished: bool


@dataclass(eq=False, slots=True)
class Row:
    """A sequence in the window.

    Attributes:
        last_round: round it last took part in; the one before its admission if none.
        prefilled: prompt tokens that have their KV.
        produced: tokens gained.
    """

    request: Request
    last_round: int
    prefilled: int = 0
    produced: int = 0

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def is_ready(self) -> bool:
        """It has its first token, so drafts can follow."""
        return self.produced > 0

    @property
    def length(self) -> int:
        """Content length: real tokens, prompt included."""
        return self.request.prompt_length + self.produced

    @property
    def remaining(self) -> int:
        """Tokens it may still gain."""
        return self.request.max_new_tokens - self.produced

    def serve(self, now: int) -> None:
        """Take part in round ``now``."""
        record = self.request.record
        record.longest_wait = max(record.longest_wait, now - self.last_round - 1)
        record.rounds += 1
        record.started = now if record.started is None else record.started
        self.last_round = now

    def gain(self, tokens: int) -> None:
        record = self.request.record
        record.first_token = self.last_round if record.first_token is None else record.first_token
        self.prefilled = self.request.prompt_length
        self.produced += tokens
