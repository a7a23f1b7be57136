"""A batch whose mask shows or hides the wrong columns."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_fast.audit.strategies.holes import HoleBatch
from specdec_fast.operators.commits import Commit


class OverlayBatch(HoleBatch):
    """Masked holes of which ``wrong`` ``[B, C]`` columns are shown where they should be hidden, or hidden where shown.

    Position IDs stay right.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.wrong = torch.zeros_like(self.visible)

    def seen_columns(self, stop: int) -> Tensor:
        return super().seen_columns(stop) ^ self.wrong[: len(self), :stop]

    def commit(self, draft_ids: Tensor, target_ids: Tensor, limit: Tensor, n_accepted: Tensor | None) -> Tensor:
        summary = super().commit(draft_ids, target_ids, limit, n_accepted)
        self.spoil(summary[:, 0], draft_ids.shape[1])
        return summary

    def spoil(self, n_accepted: Tensor, num_drafts: int) -> None:
        """Row b's accepted drafts are in columns ``[end, end + n_accepted_b)``."""
        raise NotImplementedError

    def mark(self, rows: Tensor, column: Tensor) -> None:
        """Of the rows ``[B]`` bool, column ``column[b]`` becomes wrong."""
        index = rows.nonzero()[:, 0]
        self.wrong[index, column[index]] = True

    def advance(self, commits: list[Commit]) -> list[int]:
        order = super().advance(commits)
        self.wrong[: len(order)] = self.wrong[order]
        return order

    def _repack(self, capacity: int) -> None:
        wrong = self.wrong[: len(self), self.first_column : self.end]
        super()._repack(capacity)
        self.wrong = torch.zeros_like(self.visible)
        self.wrong[:, self.slack : self.end] = wrong
