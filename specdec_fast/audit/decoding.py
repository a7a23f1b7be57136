"""Decode the prompts with a candidate, and judge its answers by the oracle."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from ..prompts import pad_left
from ..result import RowResult
from .candidates import Candidate
from .compare import CandidateRow, Comparison, Run
from .diagnosis import Observation, Suspect, diagnose
from .oracle import Oracle
from .probe import Probe
from .replay import Block, Replay
from .results import ProbeReport, RowAudit, RunAudit
from .setting import Setting

# rows decoded again for a diagnosis
_MOST_CONTROLS = 16

Finish = Callable[[int, Any], None]
OnStep = Callable[[int, int], None]
"""Told how many steps are done, 0 at first, and of how many."""
AnswerBatch = Callable[[Sequence[Any], Finish], None]
"""Continues a batch of prompts and hands over each row with its place in the batch."""


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
    in_batches(padded(candidate, setting), prompts, batch_size, on_row, done, probe.begin if probe else None)


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
    on_batch: Callable[[Sequence[Any], int], None] | None = None,
) -> None:
    """Answer all batches of consecutive prompts that miss a row.

    ``on_row`` and ``done`` are those of :func:`decode`; ``on_batch`` is told the prompts of a batch, and the index of
    the first, before it begins.
    """
    for first in range(0, len(prompts), batch_size):
        indices = range(first, min(first + batch_size, len(prompts)))
        if all(index in done for index in indices):
            continue
        batch = [prompts[index] for index in indices]
        if on_batch:
            on_batch(batch, first)
        began = time.perf_counter()

        def finish(place: int, row: Any, indices: range = indices, began: float = began) -> None:
            on_row(indices[place], row, time.perf_counter() - began)

        answer(batch, finish)


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
        self.replay = Replay(setting)
        self.comparison = Comparison(oracle, prompts, special_ids, to_text)

    def run(
        self,
        run: Run,
        candidate: Candidate,
        answers: Sequence[CandidateRow],
        probe: ProbeReport | None = None,
        known: list[Suspect] | None = None,
        on_step: OnStep = lambda done, total: None,
    ) -> RunAudit:
        """Verdict on the answers to all prompts.

        A candidate that is wrong decodes again what tells suspects apart, which ``on_step`` is told of, unless its
        diagnosis is ``known``.
        """
        found = self.comparison.run(run, answers)
        if known is None:
            known = [] if found.equivalent else diagnose(self._observe(run, candidate, found.rows, on_step))
        rate = None if probe else found.tokens_per_second
        return replace(found, tokens_per_second=rate, diagnosis=known, probe=probe)

    def _observe(self, run: Run, candidate: Candidate, rows: Sequence[RowAudit], on_step: OnStep) -> list[Observation]:
        """Everything that outputs can tell: the wrong rows alone and among other neighbours, and their rounds."""
        wrong = [row.index for row in rows if not row.exact and not row.near_tie][:_MOST_CONTROLS]
        # every other row first, so that all have other neighbours
        order = [*range(0, len(rows), 2), *range(1, len(rows), 2)] if run.batch_size > 1 else []
        total, steps = 2 * len(wrong) + len(order), itertools.count()

        def step() -> None:
            on_step(next(steps), total)

        step()
        alone = self._again(candidate, wrong, 1, step)
        regrouped = self._again(candidate, order, run.batch_size, step)
        blocks = {index: self._blocks(self.prompts[index], step) for index in wrong}
        observations = []
        for row in rows:
            first = row.index - row.index % run.batch_size
            batch = self.prompts[first : first + run.batch_size]
            prompt = self.prompts[row.index]
            observations.append(
                Observation(
                    oracle=self.oracle.decode(prompt).token_ids,
                    candidate=row.token_ids,
                    near_tie=row.near_tie is True,
                    padding=max(map(len, batch)) - len(prompt),
                    others=[self.oracle.decode(other).token_ids for other in batch if other is not prompt],
                    blocks=blocks.get(row.index, ()),
                    alone=alone.get(row.index),
                    regrouped=regrouped.get(row.index),
                )
            )
        return observations

    def _blocks(self, prompt: list[int], step: Callable[[], None]) -> Sequence[Block]:
        blocks: Sequence[Block] = ()
        # a target that the candidate spoiled, or that no cached decoding supports, cannot be replayed
        with contextlib.suppress(Exception):
            blocks = self.replay.blocks(prompt)
        step()
        return blocks

    def _again(
        self, candidate: Candidate, indices: Sequence[int], batch_size: int, step: Callable[[], None]
    ) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}

        def keep(slot: int, row: RowResult, _: float) -> None:
            found[indices[slot]] = row.token_ids
            step()

        # a candidate that fails here gives no control, but the verdict on it stands
        with contextlib.suppress(Exception):
            decode(candidate, self.setting, [self.prompts[index] for index in indices], batch_size, keep)
        return found
