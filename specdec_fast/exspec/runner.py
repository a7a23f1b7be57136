"""What carries out the scheduler's plans."""

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
    """What a round did, by request: ``rows`` that took part, and why others failed."""

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
        """Make the rows at ``places`` of the round under way the whole of it, as if nothing had been drafted."""

    def draft(self, rows: Sequence[RequestRow], limits: list[int]) -> tuple[Drafts, dict[int, Exception]]:
        """Drafts of the rows that drafting works for, and by place why it does not for others.

        A drafter that raises is asked again for each row by itself, which shows whose fault it is.
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
