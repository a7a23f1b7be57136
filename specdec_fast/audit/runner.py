"""Decode the prompts with a candidate, and judge its answers by the oracle."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ..prompts import pad_left
from ..result import RowResult
from .candidates import Candidate, Setting
from .equivalence import EquivalenceCheck, GreedyOracle
from .results import RowAudit, RunAudit
from .text import repetition, rouge_l, special_rate


@dataclass(frozen=True)
class Run:
    """One candidate at one batch size; consecutive prompts are decoded together."""

    candidate: str
    batch_size: int

    def __str__(self) -> str:
        return f"{self.candidate}, B={self.batch_size}"


@dataclass(frozen=True)
class Answer:
    """New tokens of a row, the seconds from the start of its batch until it was finished, and its text."""

    token_ids: list[Any]
    seconds: float
    text: str = ""


Finish = Callable[[int, Any], None]
AnswerBatch = Callable[[Sequence[Any], Finish], None]
"""Continues a batch of prompts and hands over each row with its place in the batch."""


def decode(
    candidate: Candidate,
    setting: Setting,
    prompts: Sequence[list[int]],
    batch_size: int,
    on_row: Callable[[int, RowResult, float], None],
    done: Collection[int] = (),
) -> None:
    """Run a candidate over all batches that miss a row.

    Args:
        candidate: what :func:`~specdec_fast.audit.candidates.resolve` returned.
        setting: what it decodes with.
        prompts: token ids of each prompt.
        batch_size: prompts decoded together.
        on_row: called as a row finishes with the index of its prompt and the seconds since its batch began.
        done: prompts that have an answer already.
    """
    in_batches(padded(candidate, setting), prompts, batch_size, on_row, done)


def padded(candidate: Candidate, setting: Setting) -> AnswerBatch:
    """A candidate that takes token ids of ragged prompts."""

    def answer(prompts: Sequence[list[int]], finish: Finish) -> None:
        ids, mask = pad_left(prompts, setting.pad_token_id)
        device = setting.target.device
        candidate(ids.to(device), mask.to(device), lambda row: finish(row.index, row))

    return answer


def in_batches(
    answer: AnswerBatch,
    prompts: Sequence[Any],
    batch_size: int,
    on_row: Callable[[int, Any, float], None],
    done: Collection[int] = (),
) -> None:
    """Answer all batches of consecutive prompts that miss a row; ``on_row`` and ``done`` as in :func:`decode`."""
    for first in range(0, len(prompts), batch_size):
        indices = range(first, min(first + batch_size, len(prompts)))
        if all(index in done for index in indices):
            continue
        began = time.perf_counter()

        def finish(place: int, row: Any, indices: range = indices, began: float = began) -> None:
            on_row(indices[place], row, time.perf_counter() - began)

        answer([prompts[index] for index in indices], finish)


class Judge:
    """Compares answers with the oracle's.

    Args:
        oracle: of the target.
        prompts: what the oracle decodes, such as the token ids of each prompt.
        special_ids: the tokenizer's special tokens.
    """

    def __init__(self, oracle: GreedyOracle, prompts: Sequence[Any], special_ids: Collection[int] = ()):
        self.oracle, self.prompts, self.special_ids = oracle, prompts, frozenset(special_ids)

    def run(self, run: Run, answers: Sequence[Answer]) -> RunAudit:
        """Verdict on the answers to all prompts."""
        check = EquivalenceCheck(self.oracle)
        for index, (prompt, answer) in enumerate(zip(self.prompts, answers, strict=True)):
            check.add(index, prompt, answer.token_ids)
        report = check.report()
        rows = []
        for row, prompt, answer in zip(report.rows, self.prompts, answers, strict=True):
            tail = [] if row.first_divergence is None else answer.token_ids[row.first_divergence :]
            rows.append(
                RowAudit(
                    **vars(row),
                    rouge_l=rouge_l(self.oracle.decode(prompt).token_ids, answer.token_ids),
                    repetition=repetition(tail),
                    special_rate=special_rate(tail, self.special_ids),
                    token_ids=answer.token_ids,
                    text=answer.text,
                )
            )
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
        )


def _rate(answers: Sequence[Answer], batch_size: int) -> float:
    batches = [answers[first : first + batch_size] for first in range(0, len(answers), batch_size)]
    seconds = sum(max(answer.seconds for answer in batch) for batch in batches)
    tokens = sum(len(answer.token_ids) for answer in answers)
    return tokens / seconds if seconds else 0.0
