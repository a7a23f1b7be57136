"""What an audit found; the JSON file has the same fields."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Unit = Literal["token ids", "tokens", "characters"]


@dataclass(frozen=True)
class RowAudit:
    """One row of a run; the first six are those of :class:`~specdec_fast.audit.equivalence.RowReport`.

    Attributes:
        rouge_l: ROUGE-L F1 over tokens.
        repetition: share of repeated 3-grams from the divergence on, 0 without one.
        special_rate: share of special tokens from the divergence on, 0 without one.
        token_ids: the candidate's new tokens, in the report's unit.
        text: the same as text, special tokens shown.
    """

    index: int
    exact: bool
    partial: float
    first_divergence: int | None
    near_tie: bool | None
    gap: float | None
    rouge_l: float
    repetition: float
    special_rate: float
    token_ids: list[Any]
    text: str


@dataclass(frozen=True)
class RunAudit:
    """One candidate at one batch size.

    Attributes:
        exact_match: share of rows that equal the oracle.
        partial_match: mean share of the oracle's tokens before the first divergence.
        near_ties: divergences that rounding explains.
        mismatches: all others; the candidate is output-equivalent if there are none.
        noise: logit noise the near-ties were judged by, None if unknown.
        rouge_l: mean ROUGE-L.
        tokens_per_second: new tokens over the seconds of all batches.
        rows: one per prompt.
    """

    candidate: str
    batch_size: int
    exact_match: float
    partial_match: float
    near_ties: int
    mismatches: int
    noise: float | None
    rouge_l: float
    tokens_per_second: float
    rows: list[RowAudit]

    @property
    def equivalent(self) -> bool:
        return self.mismatches == 0

    @property
    def undecided(self) -> int:
        """Mismatches that may be near-ties: the oracle does not say how close its choice was."""
        return sum(row.near_tie is None for row in self.rows)


@dataclass(frozen=True)
class PromptAudit:
    """A prompt and what the target alone makes of it; a server may not tell the prompt's ``num_tokens``."""

    index: int
    prompt: str
    num_tokens: int | None
    oracle_ids: list[Any]
    oracle_text: str


@dataclass(frozen=True)
class AuditReport:
    """All runs of an audit.

    Attributes:
        settings: the command line, and the versions it ran with.
        prompts: in order.
        runs: in the order they were asked for.
        unit: what was compared; a server may return neither token ids nor tokens.
    """

    settings: dict[str, Any]
    prompts: list[PromptAudit]
    runs: list[RunAudit] = field(default_factory=list)
    unit: Unit = "token ids"

    @property
    def equivalent(self) -> bool:
        """Every candidate reproduced the oracle, near-ties aside."""
        return all(run.equivalent for run in self.runs)

    def write_json(self, path: Path) -> None:
        path.write_text(json.dumps({"equivalent": self.equivalent, **asdict(self)}, indent=1) + "\n")
