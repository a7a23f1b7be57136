"""The padded layout: rows that share a right edge, and models that run over them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import compat, reference
from .cache import PaddedCache


class Commit(NamedTuple):
    """What a round did, on the device: ``n_accepted`` ``[B]``, ``committed`` ``[B, K + 1]``, ``finished`` ``[B]``."""

    n_accepted: Tensor
    committed: Tensor
    finished: Tensor
    new_end: Tensor
    shift: Tensor


class PaddedBatch:
    """Tokens, starts and right edge of the rows decoded together, and the KV caches that follow them.

    Row b holds its content in columns ``[start_b, end)``. Caches are attached with :meth:`new_cache` and are moved
    together with the tokens.

    Args:
        input_ids: ``[B, P]`` int64, left-padded.
        lengths: real tokens of each row, 1..P.
        max_new_tokens: new tokens a row may gain.
        num_draft_tokens: largest K of a round.
        stop_ids: token ids that end a row.
    """

    def __init__(
        self, input_ids: Tensor, lengths: list[int], max_new_tokens: int, num_draft_tokens: int, stop_ids: list[int]
    ):
        rows, width = input_ids.shape
        device = input_ids.device
        self.slack = 4 * (num_draft_tokens + 1)
        self.capacity = self.slack + width + max_new_tokens + 2 * (num_draft_tokens + 1)
        self.end = self.slack + width
        self.lengths = list(lengths)
        self.tokens = input_ids.new_zeros(rows, self.capacity)
        self.tokens[:, self.slack : self.end] = input_ids
        self.length = torch.tensor(lengths, device=device)
        self.start = self.end - self.length
        self.max_length = self.length + max_new_tokens
        self.stop_ids = torch.tensor(stop_ids, dtype=torch.int64, device=device)
        self.caches: list[PaddedCache] = []
        self._masks: dict[tuple[torch.dtype, int | None], Tensor] = {}
        self._block = (self.end, 0)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def first_column(self) -> int:
        """Left edge of the longest row; everything before it is padding."""
        return self.end - max(self.lengths)

    def new_cache(self) -> PaddedCache:
        """An empty KV cache that moves with this batch."""
        cache = PaddedCache(self.capacity)
        self.caches.append(cache)
        return cache

    @property
    def bytes_moved(self) -> int:
        return sum(cache.bytes_moved for cache in self.caches)

    def open_round(self, num_drafts: int) -> None:
        """Make room for ``num_drafts`` drafts and a bonus token, and drop the masks of the round before."""
        needed = self.end + num_drafts + 2
        if needed > self.capacity:
            width = needed - self.first_column + self.slack
            self._repack(self.capacity if width <= self.capacity * 3 // 4 else max(width, self.capacity * 3 // 2))
        self._masks.clear()
        self._block = (self.end - 2, num_drafts + 2)

    def mask(self, first: int, count: int, dtype: torch.dtype, window: int | None) -> Tensor:
        """Additive mask of the queries in columns ``[first, first + count)``.

        Shape ``[B, 1, count, first + count - first_column]``.
        """
        block_first, block_count = self._block
        if first < block_first or first + count > block_first + block_count:
            return reference.attention_mask(self.start, first, count, self.first_column, dtype, window)
        key = (dtype, window)
        if key not in self._masks:
            self._masks[key] = reference.attention_mask(
                self.start, block_first, block_count, self.first_column, dtype, window
            )
        offset = first - block_first
        return self._masks[key][:, :, offset : offset + count, : first + count - self.first_column]

    def commit(self, draft_ids: Tensor, n_accepted: Tensor, bonus: Tensor) -> Commit:
        """Append a round's tokens and bring every cache back in step, without a host read.

        Args:
            draft_ids: ``[B, K]`` int64.
            n_accepted, bonus: ``[B]`` int64.

        The right edge on the host follows in :meth:`advance`, once ``new_end`` has been read.
        """
        num_drafts = draft_ids.shape[1]
        committed = reference.committed_tokens(draft_ids, n_accepted, bonus)
        finished = reference.finished_rows(committed, n_accepted, self.length, self.max_length, self.stop_ids)
        end = self.start[0] + self.length[0]
        new_end, shift = reference.plan_realign(self.start, end, n_accepted, finished, num_drafts)
        num_columns = (self.length + n_accepted) * ~finished
        self.tokens[: len(self), self.end : self.end + num_drafts + 1] = committed
        if len(self) > 1:
            # a left move reaches at most K columns before the leftmost row
            span = (max(self.first_column - num_drafts, 0), self.end + num_drafts + 1)
            for cache in self.caches:
                cache.realign_(self.start, num_columns, shift, span)
            tokens = self.tokens[: len(self), None, span[0] : span[1], None]
            reference.realign_([tokens], self.start - span[0], num_columns + 1, shift)
        self.start = self.start + shift
        self.length = self.length + n_accepted + 1
        return Commit(n_accepted, committed, finished, new_end, shift)

    def advance(self, new_end: int, n_accepted: list[int], keep: list[int]) -> list[int]:
        """Follow :meth:`commit` on the host and let finished rows go.

        Args:
            new_end: the right edge that the commit chose.
            n_accepted: of every row.
            keep: rows that go on, ascending.

        Returns:
            The rows that now sit in slots 0..len(keep) - 1; a hole is filled by the last row, so that as few rows
            as possible are copied.
        """
        self.end = new_end
        self.lengths = [length + n + 1 for length, n in zip(self.lengths, n_accepted, strict=True)]
        if len(keep) == len(self.lengths):
            return keep
        stay = set(keep)
        holes = [slot for slot in range(len(keep)) if slot not in stay]
        sources = [row for row in keep if row >= len(keep)]
        order = list(range(len(keep)))
        for hole, source in zip(holes, sources, strict=True):
            order[hole] = source
        self.lengths = [self.lengths[row] for row in order]
        index = torch.tensor(order, dtype=torch.int64, device=self.start.device)
        self.start, self.length, self.max_length = self.start[index], self.length[index], self.max_length[index]
        if holes:
            span = (self.first_column, self.end)
            slots, rows = (torch.tensor(x, device=self.start.device) for x in (holes, sources))
            self.tokens[slots] = self.tokens[rows]
            for cache in self.caches:
                cache.replace_rows(slots, rows, span)
        return order

    def _repack(self, capacity: int) -> None:
        """Move the content to the left edge (plus slack) of buffers of ``capacity`` columns."""
        span = (self.first_column, self.end)
        shift = self.slack - span[0]
        tokens = self.tokens.new_zeros(len(self), capacity)
        tokens[:, self.slack : self.end + shift] = self.tokens[: len(self), span[0] : span[1]]
        for cache in self.caches:
            cache.repack(capacity, len(self), span, self.slack)
        self.tokens, self.capacity = tokens, capacity
        self.start = self.start + shift
        self.end += shift


class PaddedModel:
    """A causal LM that runs over a :class:`PaddedBatch`.

    Args:
        model: any transformers causal LM with attention layers only; ``sdpa`` or ``eager`` attention.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.traits = compat.model_traits(model)

    def forward(self, batch: PaddedBatch, cache: PaddedCache, first: int, input_ids: Tensor, keep: int) -> Tensor:
        """Run columns ``[first, first + Q)`` and write their KV.

        Args:
            first: column of the first query.
            input_ids: ``[B, Q]`` int64.
            keep: trailing queries whose logits are returned.

        Returns:
            ``[B, keep, vocabulary]``.
        """
        count = input_ids.shape[1]
        cache.write_at(first, batch.first_column)
        masks = {
            kind: batch.mask(first, count, self.model.dtype, window) for kind, window in self.traits.windows.items()
        }
        position_ids = reference.position_ids(batch.start, first, count, self.traits.max_position)
        return compat.call(self.model, self.traits, cache, input_ids, position_ids, masks, keep)
