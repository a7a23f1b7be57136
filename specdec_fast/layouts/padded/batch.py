"""The padded layout: rows that share a right edge, and models that run over them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ... import ops, reference
from ...integrations import compat
from ...operators.commits import Commit
from ..batch import Batch, Follower
from .cache import PaddedCache

MaskKind = tuple[torch.dtype, int | None]


class PaddedBatch(Batch):
    """Tokens, starts and right edge of the rows decoded together, and the KV caches that follow them.

    Row b holds its content in columns ``[start_b, end)``. The caches of all models are moved together with the
    tokens, by one operator a round.

    Args:
        input_ids: ``[B, P]`` int64, left-padded.
        lengths: real tokens of each row, 1..P.
        max_new_tokens: new tokens a row may gain.
        num_draft_tokens: largest K of a round.
        stop_ids: token ids that end a row.
        max_position: largest position ID of the target.
    """

    layout = "padded"
    needs = "a 4D attention mask, position_ids and a Cache"

    def __init__(
        self,
        input_ids: Tensor,
        lengths: list[int],
        max_new_tokens: int,
        num_draft_tokens: int,
        stop_ids: list[int],
        max_position: int,
    ):
        rows, width = input_ids.shape
        device = input_ids.device
        # left moves need room
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
        self.max_position = max_position
        self.bytes_moved = 0
        self._caches: list[PaddedCache] = []
        # outputs must not alias inputs, so starts and lengths are double-buffered
        self._spare = (torch.empty_like(self.start), torch.empty_like(self.length))
        self._num_queries = num_draft_tokens + 2
        self._positions = input_ids.new_zeros(rows, self._num_queries)
        self._masks: dict[MaskKind, Tensor] = {}
        # the queries that the last commit prepared masks and position IDs for
        self._prepared = range(0)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @property
    def first_column(self) -> int:
        """Left edge of the longest row; everything before it is padding."""
        return self.end - max(self.lengths)

    def follow(self, model: PreTrainedModel) -> PaddedFollower:
        return PaddedFollower(self, PaddedModel(model))

    def attach(self, model: PaddedModel) -> PaddedCache:
        """An empty KV cache for ``model`` that moves with this batch."""
        cache = PaddedCache(self.capacity)
        self._caches.append(cache)
        for kind in model.mask_kinds:
            self._masks.setdefault(kind, self._new_mask(kind))
        return cache

    def open_round(self, num_drafts: int) -> None:
        needed = self.end + num_drafts + 2
        if needed > self.capacity:
            width = needed - self.first_column + self.slack
            self._repack(self.capacity if width <= self.capacity * 3 // 4 else max(width, self.capacity * 3 // 2))

    def mask(self, kind: MaskKind, first: int, count: int) -> Tensor:
        """Additive mask of the queries in columns ``[first, first + count)``.

        Shape ``[B, 1, count, first + count - first_column]``.
        """
        if not self._is_prepared(first, count):
            dtype, window = kind
            return reference.attention_mask(self.start, first, count, self.first_column, dtype, window)
        offset = first - self._prepared.start
        columns = slice(self.first_column, first + count)
        return self._masks[kind][: len(self), :, offset : offset + count, columns]

    def position_ids(self, first: int, count: int, max_position: int) -> Tensor:
        """Position IDs ``[B, count]`` of the same queries, at most ``max_position``."""
        if not self._is_prepared(first, count) or max_position != self.max_position:
            return reference.position_ids(self.start, first, count, max_position)
        offset = first - self._prepared.start
        return self._positions[: len(self), offset : offset + count]

    def commit(self, draft_ids: Tensor, target_ids: Tensor, limit: Tensor, n_accepted: Tensor | None) -> Tensor:
        """Also prepares the next forward; returns the ``summary`` of :func:`specdec_fast.ops.realign_step_`."""
        rows = len(self)
        new_start, new_length = (spare[:rows] for spare in self._spare)
        summary = self.tokens.new_empty(rows, draft_ids.shape[1] + 4)
        ops.realign_step_(
            [x[:rows] for cache in self._caches for x in cache.tensors()],
            self.tokens[:rows],
            draft_ids,
            target_ids,
            limit,
            self.max_length,
            self.stop_ids,
            n_accepted,
            self.start,
            self.length,
            new_start,
            new_length,
            self._positions[:rows],
            [mask[:rows] for mask in self._masks.values()],
            [window or 0 for _, window in self._masks],
            summary,
            self.max_position,
        )
        self._spare = (self.start, self.length)
        self.start, self.length = new_start, new_length
        return summary

    def advance(self, commits: list[Commit]) -> list[int]:
        """A hole is filled by the last row, so that as few rows as possible are copied."""
        new_end = commits[0].column
        self._prepared = range(new_end - 2, new_end - 2 + self._num_queries)
        for length, row in zip(self.lengths, commits, strict=True):
            if not row.finished and new_end != self.end + row.accepted + 1:
                self._count_moved(length + row.accepted)
        self.end = new_end
        self.lengths = [length + row.accepted + 1 for length, row in zip(self.lengths, commits, strict=True)]
        keep = [place for place, row in enumerate(commits) if not row.finished]
        if len(keep) == len(self.lengths):
            return keep
        return self._keep_rows(keep)

    def _keep_rows(self, keep: list[int]) -> list[int]:
        order = list(range(len(keep)))
        holes = [place for place in order if place not in keep]
        sources = [row for row in keep if row >= len(keep)]
        for hole, source in zip(holes, sources, strict=True):
            order[hole] = source
        self.lengths = [self.lengths[row] for row in order]
        index = torch.tensor(order, dtype=torch.int64, device=self.start.device)
        self.start, self.length, self.max_length = self.start[index], self.length[index], self.max_length[index]
        if holes:
            span = (self.first_column, self.end)
            places, rows = (torch.tensor(x, device=self.start.device) for x in (holes, sources))
            for x in (self.tokens, self._positions, *self._masks.values()):
                x[places] = x[rows]
            for cache in self._caches:
                cache.replace_rows(places, rows, span)
            self._count_moved(len(holes) * (span[1] - span[0]))
        return order

    def _repack(self, capacity: int) -> None:
        """Move the content to the left edge (plus slack) of buffers of ``capacity`` columns."""
        span = (self.first_column, self.end)
        shift = self.slack - span[0]
        tokens = self.tokens.new_zeros(len(self), capacity)
        tokens[:, self.slack : self.end + shift] = self.tokens[: len(self), span[0] : span[1]]
        for cache in self._caches:
            cache.repack(capacity, len(self), span, self.slack)
        self._count_moved(len(self) * (span[1] - span[0]))
        self.tokens, self.capacity = tokens, capacity
        self.start = self.start + shift
        self.end += shift
        self._masks = {kind: self._new_mask(kind) for kind in self._masks}
        self._prepared = range(0)

    def _new_mask(self, kind: MaskKind) -> Tensor:
        return torch.zeros(len(self), 1, self._num_queries, self.capacity, dtype=kind[0], device=self.start.device)

    def _is_prepared(self, first: int, count: int) -> bool:
        return self._prepared.start <= first and first + count <= self._prepared.stop

    def _count_moved(self, columns: int) -> None:
        self.bytes_moved += columns * sum(cache.bytes_per_column for cache in self._caches)


class PaddedModel:
    """A causal LM that runs over padded rows.

    Args:
        model: any transformers causal LM with attention layers only; ``sdpa`` or ``eager`` attention.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.traits = compat.model_traits(model, PaddedBatch.layout)

    @property
    def mask_kinds(self) -> list[MaskKind]:
        """Dtype and sliding window of the masks this model takes."""
        return [(self.model.dtype, window) for window in self.traits.windows.values()]

    @property
    def last_id(self) -> int:
        return compat.text_config(self.model).vocab_size - 1

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
        kinds = zip(self.traits.windows, self.mask_kinds, strict=True)
        masks = {name: batch.mask(kind, first, count) for name, kind in kinds}
        position_ids = batch.position_ids(first, count, self.traits.max_position)
        with compat.turn():
            return compat.call(self.model, self.traits, cache, input_ids, position_ids, masks, keep)


class PaddedFollower(Follower):
    """A model whose cache is realigned with the rows of a :class:`PaddedBatch`."""

    def __init__(self, batch: PaddedBatch, model: PaddedModel):
        self.batch, self.model = batch, model
        self.cache = batch.attach(model)
        # trailing columns whose KV may be missing; before the first forward, all of them
        self.pending: int | None = None

    def verify(self, draft_ids: Tensor, counts: list[int]) -> Tensor:
        first = self._first_pending
        self.pending = 1
        ids = torch.cat([self.batch.tokens[: len(self.batch), first : self.batch.end], draft_ids], 1)
        return self.model.forward(self.batch, self.cache, first, ids, keep=draft_ids.shape[1] + 1)

    def draft(self, limits: list[int], choose: Callable[[Tensor], Tensor]) -> Tensor:
        batch, num_drafts = self.batch, max(limits)
        if num_drafts == 0:
            if self.pending is not None:
                self.pending += 1
            return batch.tokens.new_zeros(len(batch), 0)
        first = self._first_pending
        # an id beyond this model's vocabulary can only be a target's that no tokenizer emits
        ids = batch.tokens[: len(batch), first : batch.end].clamp(max=self.model.last_id)
        drafts = []
        for step in range(num_drafts):
            ids = choose(self.model.forward(batch, self.cache, first, ids, keep=1)[:, -1])[:, None]
            drafts.append(ids)
            first = batch.end + step
        # a fully accepted block leaves the last draft without KV, so the next round feeds two tokens
        self.pending = 2
        return torch.cat(drafts, 1)

    @property
    def _first_pending(self) -> int:
        return self.batch.first_column if self.pending is None else self.batch.end - self.pending
