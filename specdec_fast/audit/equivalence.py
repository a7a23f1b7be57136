"""Does a decoder's output equal the target's own greedy output? One definition for every report.

Exact match
    the candidate has the oracle's tokens and no others.
Partial match
    share of the oracle's tokens before the first divergence.
Near-tie
    a divergence where the oracle's logit leads that of the candidate's token by less than twice the
    noise, the band. Noise is the largest absolute logit difference, over all rows of the run, between
    the target's incremental and one-shot batch-1 forwards of the same text. For a target in half
    precision a float32 copy of it says what leads by how much, and twice the noise is the largest
    difference that half precision makes to a lead. Where the gap or the noise is unknown, so is this.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .oracle import OracleRow

# of the oracle's tokens within the band; from here on a wrong token may well be one of them
_WEAK = 0.01


class GreedyOracle(Protocol):
    """A source of the target's own greedy text."""

    def decode(self, prompt: Any, /) -> OracleRow:
        """The text that continues ``prompt``."""


def first_divergence(oracle: Sequence[Hashable], candidate: Sequence[Hashable]) -> int | None:
    """Index of the first token that differs, or of the first that only one side has; None if equal."""
    shared = min(len(oracle), len(candidate))
    for i in range(shared):
        if oracle[i] != candidate[i]:
            return i
    return None if len(oracle) == len(candidate) else shared


def exact_match(oracle: Sequence[Hashable], candidate: Sequence[Hashable]) -> bool:
    """True if both sides have the same tokens."""
    return first_divergence(oracle, candidate) is None


def partial_match(oracle: Sequence[Hashable], candidate: Sequence[Hashable]) -> float:
    """Share of the oracle's tokens before the first divergence.

    A candidate that goes on after the whole oracle has 1.0 and is still no exact match. An empty
    oracle is matched only by an empty candidate.
    """
    divergence = first_divergence(oracle, candidate)
    if divergence is None:
        return 1.0
    return divergence / len(oracle) if oracle else 0.0


def is_near_tie(gap: float | None, noise: float) -> bool:
    """True if rounding of size ``noise`` could have swapped two logits that are ``gap`` apart."""
    return gap is not None and gap < 2 * noise


def weakness(noise: float | None, tied: float | None) -> str | None:
    """The reason that a verdict with this ``noise`` says little, or None.

    Args:
        noise: what rounding does to a logit.
        tied: share of the oracle's tokens that have another one within the band.
    """
    if noise is None or tied is None or tied < _WEAK:
        return None
    return (
        f"weak verdict: tokens less than {2 * noise:.2g} logits apart pass as near-ties, and {tied:.0%} of the "
        "target's own tokens have another one so close; audit in float32"
    )


@dataclass(frozen=True)
class RowReport:
    """One row against the oracle.

    Attributes:
        index: the caller's number for the row.
        exact: the row equals the oracle.
        partial: share of the oracle's tokens before the first divergence.
        first_divergence: token index, None if there is none.
        near_tie: the divergence is explained by rounding; None if the oracle does not know.
        gap: by how much the oracle's logit leads that of the token chosen instead. None if it is unknown, without a
            divergence, and where one side has no token: rounding swaps tokens, it never stops a row early or late.
    """

    index: int
    exact: bool
    partial: float
    first_divergence: int | None
    near_tie: bool | None
    gap: float | None


@dataclass(frozen=True)
class Report:
    """All rows of a run.

    Attributes:
        exact_match: share of rows that equal the oracle.
        partial_match: mean partial match.
        near_ties: divergences explained by rounding.
        mismatches: all other divergences, those included that may or may not be near-ties.
        noise: logit noise of the run, None if the oracle does not know.
        rows: one report per row, in the order added.
        tied: share of the oracle's tokens that have another one within the band, None if the oracle does not know.
    """

    exact_match: float
    partial_match: float
    near_ties: int
    mismatches: int
    noise: float | None
    rows: list[RowReport]
    tied: float | None = None

    @property
    def weakness(self) -> str | None:
        """The reason that the verdict says little, or None."""
        return weakness(self.noise, self.tied)


@dataclass(frozen=True)
class _Comparison:
    index: int
    partial: float
    divergence: int | None
    swapped: bool
    gap: float | None


class EquivalenceCheck:
    """Compares rows with the target's own greedy decoding at batch size 1.

    The noise is that of every row added, so it does not depend on which rows diverged.

    Args:
        oracle: decodes the target; a row's ``token_ids`` must have been decoded with its settings.

    Example:
        >>> check = EquivalenceCheck(Oracle(model, eos_token_id=2, pad_token_id=2, max_new_tokens=64))
        >>> check.add(0, prompt_ids, token_ids)
        >>> check.report().mismatches
        0
    """

    def __init__(self, oracle: GreedyOracle) -> None:
        self._oracle = oracle
        self._noise: float | None = None
        self._gaps: list[float] = []
        self._rows: list[_Comparison] = []

    def add(self, index: int, prompt: Any, token_ids: Sequence[Hashable]) -> None:
        """Compare ``token_ids``, the candidate's new tokens including the EOS that ended them, with the oracle's."""
        oracle = self._oracle.decode(prompt)
        if oracle.noise is not None:
            self._noise = max(self._noise or 0.0, oracle.noise)
        self._gaps += [gap for gap in oracle.gaps if gap is not None]
        divergence = first_divergence(oracle.token_ids, token_ids)
        gap, swapped = None, False
        # rounding swaps tokens, it never stops a row early or late
        if divergence is not None and divergence < min(len(oracle.token_ids), len(token_ids)):
            gap, swapped = oracle.gap(divergence, token_ids[divergence]), True
        self._rows.append(_Comparison(index, partial_match(oracle.token_ids, token_ids), divergence, swapped, gap))

    def report(self) -> Report:
        """Verdict over the rows added so far; near-ties are judged by the noise of all of them."""
        rows = [
            RowReport(
                index=row.index,
                exact=row.divergence is None,
                partial=row.partial,
                first_divergence=row.divergence,
                near_tie=self._is_near_tie(row),
                gap=row.gap,
            )
            for row in self._rows
        ]
        near_ties = sum(row.near_tie is True for row in rows)
        exact = sum(row.exact for row in rows)
        return Report(
            exact_match=exact / len(rows) if rows else 1.0,
            partial_match=sum(row.partial for row in rows) / len(rows) if rows else 1.0,
            near_ties=near_ties,
            mismatches=len(rows) - exact - near_ties,
            noise=self._noise,
            rows=rows,
            tied=self._tied(),
        )

    def _tied(self) -> float | None:
        if self._noise is None or not self._gaps:
            return None
        return sum(is_near_tie(gap, self._noise) for gap in self._gaps) / len(self._gaps)

    def _is_near_tie(self, row: _Comparison) -> bool | None:
        if not row.swapped:
            return False
        if row.gap is None or self._noise is None:
            return None
        return is_near_tie(row.gap, self._noise)
