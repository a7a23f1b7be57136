"""Suspects, judged from outputs alone (arXiv 2510.22876, sections 2 and 4.2, appendix A).

An output shows where a row left the oracle, not why. Each suspect therefore comes with its evidence, the number of
wrong rows that it would explain, and an experiment that would refute it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from .equivalence import first_divergence, partial_match
from .replay import Block

Invariant = Literal["position_ids", "kv_cache", "padding", "acceptance", "stopping", "row_order"]

CANNOT_SHOW = (
    "A constant offset of a row's position IDs: rotary embeddings are relative, so no token changes.",
    "A draft whose own cache is stale or misaligned: drafts are only rejected more often.",
    "A fault that no row of these prompts reached; outputs show faults, never their absence.",
)

_REFUTATIONS: dict[Invariant, str] = {
    "row_order": "every answer is decoded from its own prompt when its batch holds one row",
    "stopping": "the rows still end at another place with no EOS among the stop ids",
    "acceptance": "rows go on differing when the bonus token is taken from the target's logits",
    "padding": "rows still differ when all prompts of the batch have the same length",
    "kv_cache": "a probe finds every visible entry to be what the model computes for its token and position",
    "position_ids": "a probe finds every position ID equal to the number of visible tokens before it",
}


@dataclass(frozen=True)
class Suspect:
    """A cause that would explain the divergences.

    Attributes:
        name: the invariant that is broken.
        explained: wrong rows that it would explain; another suspect may explain the same ones.
        evidence: what was seen.
        refuted_by: what would speak against it.
    """

    name: Invariant
    explained: int
    evidence: list[str]
    refuted_by: str


_Scored = tuple[float, Suspect]


@dataclass(frozen=True)
class Observation:
    """One row of a run, and what else is known of it.

    Attributes:
        oracle, candidate: new tokens.
        near_tie: a divergence that rounding explains, so no evidence.
        padding: columns of left padding in its batch.
        others: the oracles of the other rows of its batch.
        blocks: the rounds of a correct decoder with the same draft; empty if unknown.
        alone: the candidate's new tokens when the row is decoded alone, None if that was not tried.
        regrouped: its new tokens among other neighbours, None if that was not tried.
    """

    oracle: list[int]
    candidate: list[int]
    near_tie: bool = False
    padding: int = 0
    others: Sequence[list[int]] = ()
    blocks: Sequence[Block] = ()
    alone: list[int] | None = None
    regrouped: list[int] | None = None

    @property
    def divergence(self) -> int | None:
        return first_divergence(self.oracle, self.candidate)

    @property
    def wrong(self) -> bool:
        return self.divergence is not None and not self.near_tie


def diagnose(rows: Sequence[Observation]) -> list[Suspect]:
    """Suspects for the rows that differ by more than a near-tie, most likely first; empty if there are none."""
    wrong = [row for row in rows if row.wrong]
    if not wrong:
        return []
    found = [suspect(rows, wrong) for suspect in (_row_order, _stopping, _acceptance, _padding, _kv_cache, _positions)]
    return [suspect for _, suspect in sorted(filter(None, found), key=lambda scored: -scored[0])]


def _share(rows: Sequence[Observation], holds: Callable[[Observation], bool]) -> float:
    return sum(map(holds, rows)) / len(rows) if rows else 0.0


def _suspect(name: Invariant, score: float, explained: Sequence[Observation], *evidence: str) -> _Scored | None:
    """``score``, 0..1, orders the suspects: the share explained, lowered where another cause would do as well."""
    if score <= 0:
        return None
    return score, Suspect(name, len(explained), list(evidence), _REFUTATIONS[name])


def _row_order(rows: Sequence[Observation], wrong: Sequence[Observation]) -> _Scored | None:
    found = list(filter(_follows_another, wrong))
    share = len(found) / len(wrong)
    return _suspect(
        "row_order", share, found, f"{share:.0%} of the wrong rows follow the oracle of another row of their batch"
    )


def _follows_another(row: Observation) -> bool:
    """Half of another row's oracle, more than of its own, and not alone, where there is no other row."""
    own = _matched(row.oracle, row.candidate)
    better = [other for other in row.others if _matched(other, row.candidate) > own]
    return row.alone != row.candidate and any(partial_match(other, row.candidate) >= 0.5 for other in better)


def _matched(oracle: list[int], candidate: list[int]) -> int:
    divergence = first_divergence(oracle, candidate)
    return len(oracle) if divergence is None else divergence


def _stopping(rows: Sequence[Observation], wrong: Sequence[Observation]) -> _Scored | None:
    found = [row for row in wrong if row.divergence == min(len(row.oracle), len(row.candidate))]
    share = len(found) / len(wrong)
    evidence = f"{share:.0%} of the wrong rows have the right tokens and end at another place"
    return _suspect("stopping", share, found, evidence)


def _acceptance(rows: Sequence[Observation], wrong: Sequence[Observation]) -> _Scored | None:
    found = list(filter(_takes_the_rejected_draft, wrong))
    share = len(found) / len(wrong)
    return _suspect(
        "acceptance",
        share,
        found,
        f"{share:.0%} of the wrong rows first differ by the very draft that the target rejects there",
    )


def _takes_the_rejected_draft(row: Observation) -> bool:
    divergence = row.divergence
    if divergence is None or divergence >= len(row.candidate):
        return False
    return any(block.rejected_at(divergence) == row.candidate[divergence] for block in row.blocks)


def _padding(rows: Sequence[Observation], wrong: Sequence[Observation]) -> _Scored | None:
    padded = [row for row in wrong if row.padding > 0]
    early = len([row for row in padded if _before_any_rejection(row)]) / len(wrong)
    hit = _share([row for row in rows if row.padding > 0], lambda row: row.wrong)
    spared = _share([row for row in rows if row.padding == 0], lambda row: not row.wrong)
    # alone, a row has no padding
    cured = _share([row for row in wrong if row.alone is not None], lambda row: row.alone == row.oracle)
    return _suspect(
        "padding",
        max(early, 0.5 * hit * spared * cured),
        [row for row in padded if _before_any_rejection(row) or row.alone == row.oracle],
        f"{early:.0%} of the wrong rows are padded and wrong before any draft was rejected",
        f"{hit:.0%} of the padded rows are wrong, {1 - spared:.0%} of the others",
    )


def _before_any_rejection(row: Observation) -> bool:
    """Wrong before the first block of which a draft was rejected has ended: rejected entries cannot be the cause."""
    first = next((block.start + block.accepted for block in row.blocks if block.accepted < block.drafted), None)
    divergence = row.divergence
    return divergence is not None and (first is None or divergence <= first)


def _kv_cache(rows: Sequence[Observation], wrong: Sequence[Observation]) -> _Scored | None:
    found = [row for row in wrong if not _before_any_rejection(row) and not _takes_the_rejected_draft(row)]
    later = len(found) / len(wrong)
    tried = [row for row in wrong if row.alone is not None]
    alone = _share(tried, lambda row: row.alone != row.oracle)
    partial = sum(partial_match(row.oracle, row.candidate) for row in wrong) / len(wrong)
    return _suspect(
        "kv_cache",
        later * (0.5 + 0.5 * alone if tried else 0.6),
        found,
        f"{later:.0%} of the wrong rows differ only after a draft was rejected, with {partial:.0%} of their text right",
        f"{alone:.0%} of the wrong rows are wrong alone too, where nothing is ragged"
        if tried
        else "no row was tried alone",
    )


def _positions(rows: Sequence[Observation], wrong: Sequence[Observation]) -> _Scored | None:
    found = [row for row in wrong if not _takes_the_rejected_draft(row) and row.divergence != 0]
    later = len(found) / len(wrong)
    tried = [row for row in wrong if row.alone is not None]
    cured = _share(tried, lambda row: row.alone == row.oracle)
    regrouped = [row for row in wrong if row.regrouped is not None]
    moved = _share(regrouped, lambda row: row.regrouped != row.candidate)
    return _suspect(
        "position_ids",
        later * (0.1 + 0.85 * cured if tried else 0.5),
        found,
        f"{cured:.0%} of the wrong rows are right alone" if tried else "no row was tried alone",
        f"{moved:.0%} of them change with their neighbours" if regrouped else "no row was regrouped",
    )
