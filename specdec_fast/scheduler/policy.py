"""Base of the policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from .plan import Plan
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
        slack: widest lead of a row over the right edge of its batch, ``same-end`` only.
    """

    batch_size: int
    window: int
    num_draft_tokens: int
    max_wait_rounds: int
    prefill_tokens: int
    max_columns: int | None
    budget_columns: int | None
    slack: int


class Policy(ABC):
    """Chooses the rows of each round; rows are given in order of age.

    Attributes:
        uses_pool: rows wait outside of the lanes of the padded layout.
    """

    uses_pool: ClassVar[bool] = False

    def __init__(self, limits: Limits):
        self.limits = limits

    @classmethod
    def within_budget(cls, limits: Limits) -> Limits:
        """``limits`` with the rows that the policy uses and the budget allows for sure; ``InputError`` if none."""
        return limits

    @abstractmethod
    def wants(self, rows: Sequence[Row], request: Request) -> bool:
        """True if ``request`` should join ``rows`` in the window now."""

    @abstractmethod
    def plan(self, rows: Sequence[Row], now: int) -> Plan:
        """The round ``now`` over ``rows``, at least one of which takes part."""

    def release(self, row: Row) -> None:
        """``row`` has left the window."""
