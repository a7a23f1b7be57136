"""Decode the prompts with a candidate, and judge its answers by the oracle."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ..prompts import pad_left
from ..result import RowResult
from .candidates import Candidate
from .diagnosis import Observation, diagnose
from .equivalence import EquivalenceCheck, RowReport
from .oracle import Oracle
from .probe import Probe
from .replay import replay
from .results import ProbeReport, RowAudit, RunAudit
from .setting import Setting
from .text import repetition, rouge_l, special_rate, token_span

# rows decoded again for a diagnosis
_MOST_CONTROLS = 16


@dataclass(frozen=True)
class Run:
    """One candidate at one batch size; consecutive prompts are decoded together."""

    candidate: str
    batch_size: int

    def __str__(self) -> str:
        return f"{self.candidate}, B={self.batch_size}"


@dataclass(frozen=True)
class Answer:
    """New tokens of a row, the seconds from the start of its batch until it was finished, and its drafts if known."""

    token_ids: list[int]
    seconds: float
    drafted: int = 0
    accepted: int = 0


def decode(
    candidate: Candidate,
    setting: Setting,
    prompts: Sequence[list[int]],
    batch_size: int,
    on_row: Callable[[int, RowResult, float], None],
    done: Collection[int] = (),
    probe: Probe | None = None,
) -> None:
    """Run a candidate over all batches that miss a row.

    Args:
        candidate: what :func:`~specdec_fast.audit.candidates.resolve` returned.
        setting: what it decodes with.
        prompts: token ids of each prompt.
        batch_size: prompts decoded together.
        on_row: called as a row finishes with the index of its prompt and the seconds since its batch began.
        done: prompts that have an answer already.
        probe: told of each batch before it begins.
    """
    device = setting.target.device
    for first in range(0, len(prompts), batch_size):
        indices = range(first, min(first + batch_size, len(prompts)))
        if all(index in done for index in indices):
            continue
        ids, mask = pad_left([prompts[index] for index in indices], setting.pad_token_id)
        if probe:
            probe.begin([prompts[index] for index in indices])
        began = time.perf_counter()

        def finish(row: RowResult, indices: range = indices, began: float = began) -> None:
            on_row(indices[row.index], row, time.perf_counter() - began)

        candidate(ids.to(device), mask.to(device), finish)


class Judge:
    """Compares answers with the oracle's.

    Args:
        setting: what the candidates decode with.
        oracle: of the target.
        prompts: token ids of each prompt.
        special_ids: the tokenizer's special tokens.
        to_text: turns token ids into text.
    """

    def __init__(
        self,
        setting: Setting,
        oracle: Oracle,
        prompts: Sequence[list[int]],
        special_ids: Collection[int] = (),
        to_text: Callable[[list[int]], str] = str,
    ):
        self.setting, self.oracle, self.prompts = setting, oracle, prompts
        self.special_ids, self.to_text = frozenset(special_ids), to_text

    def run(
        self, run: Run, candidate: Candidate, answers: Sequence[Answer], probe: ProbeReport | None = None
    ) -> RunAudit:
        """Verdict on the answers to all prompts; a candidate that is wrong decodes again what tells suspects apart."""
        check = EquivalenceCheck(self.oracle)
        for index, (prompt, answer) in enumerate(zip(self.prompts, answers, strict=True)):
            check.add(index, prompt, answer.token_ids)
        report = check.report()
        rows = [self._row(*row) for row in zip(report.rows, self.prompts, answers, strict=True)]
        wrong = [row.index for row in rows if not row.exact and not row.near_tie]
        return RunAudit(
            candidate=run.candidate,
            batch_size=run.batch_size,
            exact_match=report.exact_match,
            partial_match=report.partial_match,
            near_ties=report.near_ties,
            mismatches=report.mismatches,
            noise=report.noise,
            rouge_l=sum(row.rouge_l for row in rows) / len(rows),
            tokens_per_second=None if probe else _rate(answers, run.batch_size),
            rows=rows,
            diagnosis=diagnose(self._observe(run, candidate, rows)) if wrong else [],
            probe=probe,
        )

    def _row(self, row: RowReport, prompt: list[int], answer: Answer) -> RowAudit:
        oracle_ids, split = self.oracle.decode(prompt).token_ids, row.first_divergence
        tail = [] if split is None else answer.token_ids[split:]
        return RowAudit(
            **vars(row),
            rouge_l=rouge_l(oracle_ids, answer.token_ids),
            repetition=repetition(tail),
            special_rate=special_rate(tail, self.special_ids),
            token_ids=answer.token_ids,
            text=self.to_text(answer.token_ids),
            span=None if split is None else token_span(answer.token_ids, split, self.to_text),
            oracle_span=None if split is None else token_span(oracle_ids, split, self.to_text),
        )

    def _observe(self, run: Run, candidate: Candidate, rows: Sequence[RowAudit]) -> list[Observation]:
        """Everything that outputs can tell: the wrong rows alone and among other neighbours, and their rounds."""
        wrong = [row.index for row in rows if not row.exact and not row.near_tie][:_MOST_CONTROLS]
        alone = self._again(candidate, wrong, 1)
        # every other row first, so that all have other neighbours
        order = [*range(0, len(rows), 2), *range(1, len(rows), 2)]
        regrouped = self._again(candidate, order, run.batch_size) if run.batch_size > 1 else {}
        observations = []
        for row in rows:
            first = row.index - row.index % run.batch_size
            batch = self.prompts[first : first + run.batch_size]
            prompt = self.prompts[row.index]
            observations.append(
                Observation(
                    oracle=self.oracle.decode(prompt).token_ids,
                    candidate=row.token_ids,
                    near_tie=row.near_tie,
                    padding=max(map(len, batch)) - len(prompt),
                    others=[self.oracle.decode(other).token_ids for other in batch if other is not prompt],
                    blocks=replay(self.setting, prompt) if row.index in wrong else (),
                    alone=alone.get(row.index),
                    regrouped=regrouped.get(row.index),
                )
            )
        return observations

    def _again(self, candidate: Candidate, indices: Sequence[int], batch_size: int) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}

        def keep(slot: int, row: RowResult, _: float) -> None:
            found[indices[slot]] = row.token_ids

        decode(candidate, self.setting, [self.prompts[index] for index in indices], batch_size, keep)
        return found


def _rate(answers: Sequence[Answer], batch_size: int) -> float:
    batches = [answers[first : first + batch_size] for first in range(0, len(answers), batch_size)]
    seconds = sum(max(answer.seconds for answer in batch) for batch in batches)
    tokens = sum(len(answer.token_ids) for answer in answers)
    return tokens / seconds if seconds else 0.0
