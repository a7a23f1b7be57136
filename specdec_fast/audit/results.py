"""Findings of an audit; the JSON file has the same fields."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from .diagnosis import CANNOT_SHOW, Suspect
from .equivalence import weakness
from .probe import Violation

Unit = Literal["token ids", "tokens", "characters"]
Verdict = Literal["equivalent", "NOT probed", "BROKEN invariant", "NOT equivalent"]
"""From best to worst; ``BROKEN invariant`` and ``NOT probed`` have the target's own text."""


@dataclass(frozen=True)
class RowAudit:
    """One row of a run; the first six are those of :class:`~specdec_fast.audit.equivalence.RowReport`.

    Attributes:
        rouge_l: ROUGE-L F1 over tokens.
        repetition: share of repeated 3-grams from the divergence on, 0 without one.
        special_rate: share of special tokens from the divergence on, 0 without one.
        token_ids: the candidate's new tokens, in the report's unit.
        text: the same as text, special tokens shown.
        span: the characters of ``text`` that are the first diverging token, as ``[start, end)``; None without one, or
            where that is unknown.
        oracle_span: the same of the oracle's text.
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
    span: tuple[int, int] | None = None
    oracle_span: tuple[int, int] | None = None


@dataclass(frozen=True)
class ProbeReport:
    """Findings of a probe in one run.

    Attributes:
        checked: forward passes of the target that were checked; 0 if the candidate never ran it.
        violation: the first of the target, None if there was none.
        draft_violation: the first of the draft model; it costs acceptance, never correctness.
        accepted: share of the drafts that were accepted, None if the candidate does not say.
        accepted_alone: the same for each row decoded alone; higher only if drafts were made from a wrong state.
    """

    checked: int
    violation: Violation | None = None
    draft_violation: Violation | None = None
    accepted: float | None = None
    accepted_alone: float | None = None


@dataclass(frozen=True)
class RunAudit:
    """One candidate at one batch size.

    Attributes:
        exact_match: share of rows that equal the oracle.
        partial_match: mean share of the oracle's tokens before the first divergence.
        near_ties: divergences that rounding explains.
        mismatches: all others; the candidate is output-equivalent if there are none.
        noise: logit noise the near-ties were judged by, None if unknown; twice of it is the band.
        rouge_l: mean ROUGE-L.
        tokens_per_second: new tokens over the seconds of all batches; None if a probe watched.
        rows: one per prompt.
        diagnosis: what outputs alone point to, most likely first; empty for an equivalent run.
        probe: what the probe saw, None without one.
        tied: share of the oracle's tokens that have another one within the band, None if unknown.
    """

    candidate: str
    batch_size: int
    exact_match: float
    partial_match: float
    near_ties: int
    mismatches: int
    noise: float | None
    rouge_l: float
    tokens_per_second: float | None
    rows: list[RowAudit]
    diagnosis: list[Suspect] = field(default_factory=list)
    probe: ProbeReport | None = None
    tied: float | None = None

    @property
    def equivalent(self) -> bool:
        """No divergence but near-ties."""
        return self.mismatches == 0

    @property
    def violation(self) -> Violation | None:
        """The probe's first finding, or None."""
        return self.probe.violation if self.probe else None

    @property
    def verdict(self) -> Verdict:
        """On the text, and where it is right and a probe was asked for, on what the probe saw."""
        if not self.equivalent:
            return "NOT equivalent"
        if self.violation:
            return "BROKEN invariant"
        return "NOT probed" if self.probe and not self.probe.checked else "equivalent"

    @property
    def passed(self) -> bool:
        """Equivalent, and where a probe was asked for, it saw the target run and no invariant broken."""
        return self.verdict == "equivalent"

    @property
    def weakness(self) -> str | None:
        """The reason that the verdict says little, or None."""
        return weakness(self.noise, self.tied)

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


def worst(runs: Iterable[RunAudit]) -> Verdict:
    """The worst verdict of several runs."""
    return max((run.verdict for run in runs), key=get_args(Verdict).index, default="equivalent")


@dataclass(frozen=True)
class Failure:
    """A run that has no verdict, since the candidate failed.

    Attributes:
        error: what happened, in one line that names the candidate.
        traceback: of the candidate.
    """

    candidate: str
    batch_size: int
    error: str
    traceback: str


@dataclass(frozen=True)
class AuditReport:
    """All runs of an audit.

    Attributes:
        settings: the command line, and the versions it ran with.
        prompts: in order.
        runs: in the order they were asked for, those that failed left out.
        failures: these.
        cannot_show: faults that outputs do not show.
        unit: what was compared; a server may return neither token ids nor tokens.
    """

    settings: dict[str, Any]
    prompts: list[PromptAudit]
    runs: list[RunAudit]
    cannot_show: Sequence[str] = CANNOT_SHOW
    unit: Unit = "token ids"
    failures: Sequence[Failure] = ()

    @property
    def equivalent(self) -> bool:
        """Every run is."""
        return all(run.equivalent for run in self.runs)

    @property
    def passed(self) -> bool:
        """Every run has, and none failed."""
        return not self.failures and all(run.passed for run in self.runs)

    @property
    def verdict(self) -> Verdict:
        """The worst of all runs."""
        return worst(self.runs)

    @property
    def weakness(self) -> str | None:
        """The reason that the verdicts say little, or None; noise is the oracle's, and the same in all runs."""
        return next((run.weakness for run in self.runs if run.weakness), None)

    def write_json(self, path: Path) -> None:
        found: dict[str, Any] = {"equivalent": self.equivalent, "passed": self.passed, **asdict(self)}
        found["runs"] = [
            record | {"verdict": run.verdict, "weakness": run.weakness}
            for run, record in zip(self.runs, found["runs"], strict=True)
        ]
        path.write_text(json.dumps(found, indent=1) + "\n")
