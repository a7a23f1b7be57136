"""The masked-holes layout: nothing moves, and rejected drafts stay behind as columns that nobody sees."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import reference
from ...layouts.padded.batch import MaskKind, PaddedBatch
from ...operators import commits


class HoleBatch(PaddedBatch):
    """Rows whose content may have holes; every round appends K + 1 columns to each of them.

    Correct as it stands: ``visible`` ``[B, C]`` says which columns hold content, and a token's position ID is the
    number of visible columns before it. Subclasses plant faults.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._first = self.end - max(self.lengths)
        self.visible = torch.zeros_like(self.tokens, dtype=torch.bool)
        self.visible[:, : self.end] = torch.arange(self.end, device=self.start.device) >= self.start[:, None]

    @property
    def first_column(self) -> int:
        return self._first

    def mask(self, kind: MaskKind, first: int, count: int) -> Tensor:
        dtype, window = kind
        column = torch.arange(first + count, device=self.start.device)
        query = column[first:, None]
        seen = self.seen_columns(first + count)[:, None] & (column <= query)
        if window is not None:
            position = self.column_positions(first + count)
            seen &= position[:, first:, None] - position[:, None] < window
        # a hole, as a query, sees itself alone, so that no softmax runs over nothing
        seen |= column == query
        return reference.mask_values(seen[:, :, self.first_column :], dtype)[:, None]

    def position_ids(self, first: int, count: int, max_position: int) -> Tensor:
        return self.column_positions(first + count)[:, first:].clamp(0, max_position)

    def content_columns(self, stop: int) -> Tensor:
        """``[B, stop]`` bool; the drafts of this round, at ``end`` and after, count as content."""
        content = self.visible[: len(self), :stop].clone()
        content[:, self.end :] = True
        return content

    def seen_columns(self, stop: int) -> Tensor:
        """Columns of ``[0, stop)`` that the mask shows: ``[B, stop]`` bool."""
        return self.content_columns(stop)

    def column_positions(self, stop: int) -> Tensor:
        """Position ID of what columns ``[0, stop)`` hold: ``[B, stop]``."""
        return self.content_columns(stop).long().cumsum(1) - 1

    def kept_drafts(self, n_accepted: Tensor, num_drafts: int) -> Tensor:
        """Drafts of a round that stay visible: ``[B, K]`` bool."""
        return torch.arange(num_drafts, device=n_accepted.device) < n_accepted[:, None]

    def commit(self, draft_ids: Tensor, target_ids: Tensor, limit: Tensor, n_accepted: Tensor | None) -> Tensor:
        if n_accepted is None:
            n_accepted, bonus = reference.accept_greedy(draft_ids, target_ids, limit)
        else:
            bonus = target_ids.gather(1, n_accepted[:, None])[:, 0]
        rows, num_drafts = draft_ids.shape
        last = self.end + num_drafts
        self.tokens[:rows, self.end : last] = draft_ids
        self.tokens[:rows, last] = bonus
        self.visible[:rows, self.end : last] = self.kept_drafts(n_accepted, num_drafts)
        self.visible[:rows, last] = True
        committed = reference.committed_tokens(draft_ids, n_accepted, bonus)
        finished = reference.finished_rows(committed, n_accepted, self.length, self.max_length, self.stop_ids)
        self.length = self.length + n_accepted + 1
        new_end = torch.full_like(n_accepted, last + 1)
        return commits.packed(n_accepted, finished, new_end, committed)

    def advance(self, rows: list[commits.Commit]) -> list[int]:
        self.end = rows[0].column
        self.lengths = [length + row.accepted + 1 for length, row in zip(self.lengths, rows, strict=True)]
        keep = [place for place, row in enumerate(rows) if not row.finished]
        order = keep if len(keep) == len(self.lengths) else self._keep_rows(keep)
        self.visible[: len(order)] = self.visible[order]
        return order

    def _repack(self, capacity: int) -> None:
        shift = self.slack - self.first_column
        visible = self.visible[: len(self), self.first_column : self.end]
        super()._repack(capacity)
        self.visible = torch.zeros_like(self.tokens, dtype=torch.bool)
        self.visible[:, self.slack : self.end] = visible
        self._first += shift
