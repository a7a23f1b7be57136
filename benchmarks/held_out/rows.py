"""Answers go to the wrong rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdec_fast.layouts.padded.batch import PaddedBatch
from specdec_fast.operators.commits import Commit
from specdec_fast.result import GenerationResult, RowResult

from .base import HeldOut


class _Reordered(HeldOut):
    """Row i of the result is the answer to row ``order()[i]``."""

    def order(self, finished: list[int], prompt_lengths: list[int]) -> list[int]:
        """``finished`` lists the rows as they finished."""
        raise NotImplementedError

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        on_finish: Callable[[RowResult], None] | None = None,
        **options: Any,
    ) -> GenerationResult:
        finished: list[int] = []
        result = super().generate(
            input_ids, attention_mask, on_finish=lambda row: finished.append(row.index), **options
        )
        order = self.order(finished, [row.prompt_length for row in result.rows])
        rows = [
            replace(result.rows[given], index=asked.index, prompt_length=asked.prompt_length)
            for given, asked in zip(order, result.rows)
        ]
        for row in rows:
            if on_finish:
                on_finish(row)
        new = result.sequences[order, input_ids.shape[1] :]
        return replace(result, sequences=torch.cat([input_ids, new], 1), rows=rows)


class FinishOrder(_Reordered):
    """Rows are returned in the order in which they finished.

    From results appended to a list as rows leave the batch.
    """

    kind = None
    suspect = "row_order"

    def order(self, finished: list[int], prompt_lengths: list[int]) -> list[int]:
        return finished


class LongestFirst(_Reordered):
    """Rows are returned by the length of their prompts, longest first.

    From batches sorted to save padding, and never put back in order.
    """

    kind = None
    suspect = "row_order"

    def order(self, finished: list[int], prompt_lengths: list[int]) -> list[int]:
        return sorted(range(len(prompt_lengths)), key=lambda row: -prompt_lengths[row])


class _MisreadSlotsBatch(PaddedBatch):
    def advance(self, commits: list[Commit]) -> list[int]:
        budget = self.max_length - self.length
        misread = sorted(super().advance(commits))
        # a row's budget goes with its name, so that it is spent on whatever text it is given
        self.max_length = self.length + budget[misread]
        return misread


class SlotsMisread(HeldOut):
    """After a finished row's slot is filled by the last row, the host takes the slots to be in their old order.

    From a compaction that fills holes, read as one that closes ranks; it takes three rows.
    """

    kind = None
    suspect = "row_order"
    batch_type = _MisreadSlotsBatch
