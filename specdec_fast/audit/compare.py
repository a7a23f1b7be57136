"""Answers of a candidate beside the oracle's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from .equivalence import EquivalenceCheck, GreedyOracle, RowReport
from .results import RowAudit, RunAudit
from .text import repetition, rouge_l, special_rate, token_span


@dataclass(frozen=True)
class Run:
    """One candidate at one batch size; consecutive prompts are decoded together."""

    candidate: str
    batch_size: int

    def __str__(self) -> str:
        return f"{self.candidate}, B={self.batch_size}"


@dataclass(frozen=True)
class CandidateRow:
    """A finished row.

    Attributes:
        token_ids: new tokens.
        seconds: from the start of its batch until it was finished.
        drafted, accepted: its drafts, if known.
        text: of the tokens, where these do not tell it.
    """

    token_ids: list[Any]
    seconds: float
    drafted: int = 0
    accepted: int = 0
    text: str | None = None


class Comparison:
    """Compares answers with the oracle's.

    Args:
        oracle: of the target.
        prompts: what the oracle decodes, such as the token ids of each prompt.
        special_ids: the tokenizer's special tokens.
        to_text: turns token ids into text; None where each answer brings its own.
    """

    def __init__(
        self,
        oracle: GreedyOracle,
        prompts: Sequence[Any],
        special_ids: Collection[int] = (),
        to_text: Callable[[list[Any]], str] | None = None,
    ):
        self.oracle, self.prompts = oracle, prompts
        self.special_ids, self.to_text = frozenset(special_ids), to_text

    def run(self, run: Run, answers: Sequence[CandidateRow]) -> RunAudit:
        """Verdict on the answers to all prompts."""
        check = EquivalenceCheck(self.oracle)
        for index, (prompt, answer) in enumerate(zip(self.prompts, answers, strict=True)):
            check.add(index, prompt, answer.token_ids)
        report = check.report()
        rows = [self._row(*row) for row in zip(report.rows, self.prompts, answers, strict=True)]
        return RunAudit(
            candidate=run.candidate,
            batch_size=run.batch_size,
            exact_match=report.exact_match,
            partial_match=report.partial_match,
            near_ties=report.near_ties,
            mismatches=report.mismatches,
            noise=report.noise,
            rouge_l=sum(row.rouge_l for row in rows) / len(rows),
            tokens_per_second=_rate(answers, run.batch_size),
            rows=rows,
            tied=report.tied,
        )

    def _row(self, row: RowReport, prompt: Any, answer: CandidateRow) -> RowAudit:
        oracle_ids, split = self.oracle.decode(prompt).token_ids, row.first_divergence
        tail = [] if split is None else answer.token_ids[split:]
        return RowAudit(
            **vars(row),
            rouge_l=rouge_l(oracle_ids, answer.token_ids),
            repetition=repetition(tail),
            special_rate=special_rate(tail, self.special_ids),
            token_ids=answer.token_ids,
            text=self.to_text(answer.token_ids) if self.to_text else answer.text or "",
            span=self._span(answer.token_ids, split),
            oracle_span=self._span(oracle_ids, split),
        )

    def _span(self, token_ids: list[Any], split: int | None) -> tuple[int, int] | None:
        return None if split is None or self.to_text is None else token_span(token_ids, split, self.to_text)


def _rate(answers: Sequence[CandidateRow], batch_size: int) -> float:
    batches = [answers[first : first + batch_size] for first in range(0, len(answers), batch_size)]
    seconds = sum(max(answer.seconds for answer in batch) for batch in batches)
    tokens = sum(len(answer.token_ids) for answer in answers)
    return tokens / seconds if seconds else 0.0
