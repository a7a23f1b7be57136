"""The steps of a round, the same for every decoder: draft, verify, accept, commit, stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from . import compat
from .batch import Batch
from .decoder import Decoder
from .drafters import Drafts
from .errors import InputError
from .result import GenerationStats, RowResult
from .timing import StageClock


@dataclass
class Row:
    """A row on the host: its text so far and its counters."""

    text: list[int]
    remaining: int
    result: RowResult


class Verdict(NamedTuple):
    """Per row of a round: drafts accepted, and whether it has ended; ``stay`` are the other rows in their new order."""

    accepted: list[int]
    finished: list[bool]
    stay: list[int]


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

    def verify(self, rows: Sequence[Row], drafts: Drafts) -> Verdict:
        """Let the target judge the drafts, and append what it commits to each row."""
        batch, clock = self.batch, self.clock
        compat.refuse_autocast(batch.device)
        with clock.stage("verify"):
            logits = self.target.verify(*drafts)
        with clock.stage("accept"):
            limit = torch.tensor(drafts.counts, dtype=torch.int64, device=batch.device)
            target_ids, n_accepted = self.decoder.acceptance(drafts.ids, limit, logits)
        with clock.stage("commit"):
            # the one device-to-host copy of a round
            summary = batch.commit(drafts.ids, target_ids, limit, n_accepted).tolist()
            for row, (n, _, _, *tokens) in zip(rows, summary, strict=True):
                self._append(row, tokens[: n + 1])
            stay = batch.advance(summary)
        return Verdict([line[0] for line in summary], [bool(line[1]) for line in summary], stay)

    def count(self, rows: Sequence[Row], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Add a round of ``rows`` to their counters and to ``stats``."""
        for row, d, n in zip(rows, drafted, accepted, strict=True):
            row.result.rounds += 1
            row.result.drafted += d
            row.result.accepted += n
        self.stats.rounds += bool(rows)
        self.stats.row_rounds += len(rows)
        self.stats.drafted += sum(drafted)
        self.stats.accepted += sum(accepted)

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
