"""Runs scheduler plans on one KV layout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch.nn.utils.rnn import pad_sequence

from ..decoder import Decoder
from ..drafters import Drafts
from ..rounds import Rounds
from ..scheduler import Outcome, Plan
from .request import RequestRow


@dataclass
class Outcomes:
    """Outcomes of a round by request: ``rows`` that took part, errors of ``failed``."""

    rows: dict[int, Outcome] = field(default_factory=dict)
    failed: dict[int, Exception] = field(default_factory=dict)


class Runner(ABC):
    """Runs plans on a KV layout.

    Attributes:
        rounds: the steps of a round over the rows at hand.
    """

    rounds: Rounds

    @abstractmethod
    def run(self, plan: Plan, rows: Mapping[int, RequestRow]) -> Outcomes:
        """Carry out ``plan`` over ``rows``, and let go of those that finish or fail."""

    @abstractmethod
    def release(self, id: int) -> None:
        """Let a row go, wherever it is; one that was never run is not known."""

    @classmethod
    @abstractmethod
    def column_bytes(cls, decoder: Decoder, longest: int) -> int:
        """KV bytes that a token takes in all models."""

    @property
    @abstractmethod
    def kv_bytes(self) -> int:
        """Bytes that KV caches take now."""

    @abstractmethod
    def isolate(self, places: Sequence[int]) -> None:
        """Reduce the current round to its rows at ``places``, as if nothing had been drafted."""

    def draft(self, rows: Sequence[RequestRow], limits: list[int]) -> tuple[Drafts, dict[int, Exception]]:
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
                self.isolate([place])
                try:
                    drafts.append(self.rounds.draft([row], [limit]))
                except Exception as error:
                    errors[place] = error
            self.isolate([place for place in range(len(rows)) if place not in errors])
            if not drafts:
                return self.rounds.no_drafts(0), errors
            ids = pad_sequence([alone.ids[0] for alone in drafts], batch_first=True)
            return Drafts(ids, [alone.counts[0] for alone in drafts]), errors
