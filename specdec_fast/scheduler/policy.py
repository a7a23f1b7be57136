"""Base of the policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .plan import Plan, Seat
from .rows import Request, Row


@dataclass(frozen=True)
class Limits:
    """Numbers every policy works within.

    Attributes:
        batch_size: most rows of a verify (B).
        window: most rows in the window (W).
        num_draft_tokens: most drafts per row and round (K).
        max_wait_rounds: a row in the window takes part at least once in so many rounds.
        prefill_tokens: prompt tokens per round, ragged layout.
        max_columns: longest content of a row, or ``None`` for any.
        budget_columns: KV columns that all rows together may take, or ``None`` for any.
    """

    batch_size: int
    window: int
    num_draft_tokens: int
    max_wait_rounds: int
    prefill_tokens: int
    max_columns: int | None
    budget_columns: int | None


class Policy(ABC):
    """Chooses the rows of each round; rows are given in order of age."""

    def __init__(self, limits: Limits):
        self.limits = limits

    @classmethod
    def within_budget(cls, limits: Limits) -> Limits:
        """``limits`` with the rows that the policy uses and the budget allows for sure; ``InputError`` if none."""
        return limits

    @abstractmethod
    def wants(self, rows: Sequence[Row], request: Request) -> bool:
        """True if ``request`` should join ``rows`` in the window now."""

    def fits(self, rows: Sequence[Row], request: Request) -> bool:
        """True if a pool of slots as wide as the longest row keeps the budget."""
        budget = self.limits.budget_columns
        widest = max([request.columns, *(row.request.columns for row in rows)])
        return budget is None or (len(rows) + 1) * widest <= budget

    def seats(self, rows: Iterable[Row]) -> tuple[Seat, ...]:
        """Seats of rows that draft as much as they can use."""
        return tuple(Seat(row.id, min(self.limits.num_draft_tokens, row.remaining - 1)) for row in rows)

    @abstractmethod
    def plan(self, rows: Sequence[Row], now: int) -> Plan:
        """The round ``now`` over ``rows``, at least one of which takes part."""
