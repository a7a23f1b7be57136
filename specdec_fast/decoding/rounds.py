"""The steps of a round, the same for every decoder: draft, verify, accept, commit, stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..drafters import Drafts
from ..errors import InputError
from ..integrations import compat
from ..layouts.batch import Batch
from ..operators import commits
from ..result import GenerationStats, RowResult
from ..scheduler import Outcome
from .base import Decoder
from .timing import StageClock


@dataclass
class Row:
    """A row on the host: its text so far and its counters."""

    text: list[int]
    remaining: int
    result: RowResult


class Rounds:
    """Rounds over a batch.

    Args:
        decoder: whose target, drafter and acceptance take part.
        batch: the rows and where their KV is.
        longest: tokens that no row will outgrow.
        stop_ids: token ids that end a row.
    """

    def __init__(self, decoder: Decoder, batch: Batch, longest: int, stop_ids: Sequence[int]):
        self.decoder, self.batch = decoder, batch
        self.target = batch.follow(decoder.target)
        self.drafting = decoder.drafter.begin(batch, longest)
        self.stop_ids = set(stop_ids)
        self.vocab_size = decoder.vocab_size
        self.clock = StageClock(batch.device)
        self.stats = GenerationStats()

    def draft(self, rows: Sequence[Row], limits: list[int]) -> Drafts:
        """At most ``limits[b]`` drafts for row b, ready for :meth:`verify`."""
        with self.clock.stage("draft"):
            texts = [(row.result.index, row.text) for row in rows]
            return self._checked(self.drafting.draft(texts, limits), limits)

    def no_drafts(self, rows: int) -> Drafts:
        """Empty drafts for ``rows`` rows."""
        return Drafts(torch.zeros(rows, 0, dtype=torch.int64, device=self.batch.device), [0] * rows)

    def verify(self, rows: Sequence[Row], drafts: Drafts) -> tuple[list[Outcome], list[int]]:
        """Let the target judge the drafts, and append what it commits to each row.

        Returns:
            Outcomes in the order of ``rows``, and the places of those that have not ended, in their new order.
        """
        batch, clock = self.batch, self.clock
        compat.refuse_autocast(batch.device)
        with clock.stage("verify"):
            logits = self.target.verify(*drafts)
        with clock.stage("accept"):
            limit = torch.tensor(drafts.counts, dtype=torch.int64, device=batch.device)
            target_ids, n_accepted = self.decoder.acceptance(drafts.ids, limit, logits)
        with clock.stage("commit"):
            committed = commits.read(batch.commit(drafts.ids, target_ids, limit, n_accepted))
            for row, commit in zip(rows, committed, strict=True):
                self._append(row, commit.tokens)
            stay = batch.advance(committed)
        return [Outcome(commit.accepted, commit.finished) for commit in committed], stay

    def count(self, rows: Sequence[Row], drafted: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Add a round of ``rows`` to their counters and to ``stats``."""
        for row, d, outcome in zip(rows, drafted, outcomes, strict=True):
            row.result.rounds += 1
            row.result.drafted += d
            row.result.accepted += outcome.accepted
        self.stats.rounds += bool(rows)
        self.stats.row_rounds += len(rows)
        self.stats.drafted += sum(drafted)
        self.stats.accepted += sum(outcome.accepted for outcome in outcomes)

    def _checked(self, drafts: Drafts, limits: list[int]) -> Drafts:
        """Drafts cut to the columns in use, or an error that names what the drafter got wrong."""
        ids, counts = drafts
        name = type(self.decoder.drafter).__name__
        if len(counts) != len(limits) or not all(0 <= n <= limit for n, limit in zip(counts, limits, strict=True)):
            raise InputError(f"{name} drafted {counts} tokens; need 0 to {limits}")
        width, device = max(counts), self.batch.device
        if ids.dim() != 2 or len(ids) != len(limits) or ids.shape[1] < width or ids.dtype != torch.int64:
            raise InputError(f"{name} drafted ids {ids.dtype} {list(ids.shape)}; need int64 [{len(limits)}, {width}]")
        if ids.device != device:
            raise InputError(f"{name} drafted on {ids.device}; the batch is on {device}")
        # filler may be anything, and an id no row can hold is only a wrong draft
        return Drafts(ids[:, :width].clamp(0, self.vocab_size - 1), counts)

    def _append(self, row: Row, tokens: list[int]) -> None:
        stop = next((i for i, token in enumerate(tokens) if token in self.stop_ids), None)
        if stop is not None:
            tokens = tokens[: stop + 1]
            row.result.finish_reason = "eos"
        row.text += tokens
        row.remaining -= len(tokens)
        row.result.token_ids += tokens
        self.stats.tokens += len(tokens)
