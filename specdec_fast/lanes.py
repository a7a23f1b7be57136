"""Lanes of a padded batch that rows enter and leave, and the pool that keeps the rows outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from . import ops, reference
from .batch import Batch, Follower
from .cache import PaddedCache, PaddedLayer
from .padded import MaskKind, PaddedModel


@dataclass(eq=False)
class LaneRow:
    """A row of :class:`Lanes`.

    Attributes:
        text: its tokens, prompt included; shared with the request, which appends to it.
        max_length: tokens at which it is finished.
        lane: its lane, if it has one.
        slot: its place in the pool, if there is one.
    """

    text: list[int]
    max_length: int
    lane: int | None = None
    slot: int | None = None


class LaneMove(NamedTuple):
    """Columns ``[start, start + columns)`` of lane ``source``, or of the row's slot, go ``shift`` to the right."""

    row: LaneRow
    source: int | None
    start: int
    columns: int
    shift: int


class Lanes(Batch):
    """Rows of a padded batch that come and go.

    A round runs over the rows named by :meth:`select`. Tokens come from the host, so only KV lives here. Where there
    are slots, what is written to a lane is written to the row's slot too: a row leaves its lane without a move, and a
    gather brings it back.

    Args:
        num_lanes: most rows of a round.
        width: columns of a lane.
        num_slots: rows of the pool, 0 for none.
        slot_width: columns of a slot.
        stop_ids: token ids that end a row.
        device: where the caches live.
    """

    layout = "padded"
    needs = "a 4D attention mask, position_ids and a Cache"

    def __init__(
        self,
        num_lanes: int,
        width: int,
        num_slots: int,
        slot_width: int,
        stop_ids: Sequence[int],
        device: torch.device,
    ):
        self.num_lanes, self.width, self.num_slots, self.slot_width = num_lanes, width, num_slots, slot_width
        self.stop_ids = torch.tensor(list(stop_ids), dtype=torch.int64, device=device)
        self.bytes_moved = 0
        self.models: list[LaneFollower] = []
        self.select([], [])

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def device(self) -> torch.device:
        return self.stop_ids.device

    @property
    def kv_bytes(self) -> int:
        """Bytes that all caches take."""
        return sum(x.numel() * x.element_size() for x in [*self._caches(), *self._pools()])

    @property
    def first_column(self) -> int:
        """Left edge of the longest row; everything before it is padding."""
        return min(self.starts)

    def follow(self, model: PreTrainedModel) -> LaneFollower:
        follower = LaneFollower(self, PaddedModel(model))
        self.models.append(follower)
        return follower

    def select(self, rows: Sequence[LaneRow], ends: Sequence[int]) -> None:
        """Name the rows of the next round, and the column after the newest token of each.

        Rows run over the same columns. One whose end is beyond that of another feeds as many of its tokens again.
        """
        self.rows, self.ends = list(rows), list(ends)
        self.lengths = [len(row.text) for row in rows]
        self.starts = [end - length for end, length in zip(ends, self.lengths, strict=True)]
        lanes = [row.lane for row in rows]
        # lanes without a gap are a view of the cache
        self.lanes: slice | Tensor = slice(0, len(rows))
        if lanes != list(range(len(rows))):
            self.lanes = torch.tensor(lanes, device=self.device)
        most = [row.max_length for row in rows]
        # [B] each; one copy to the device
        sizes = torch.tensor([self.lengths, self.ends, most], dtype=torch.int64, device=self.device)
        self.length, self.end, self.max_length = sizes
        self.start = self.end - self.length

    def move(self, moves: Sequence[LaneMove]) -> None:
        """Bring rows to where their lanes are, all caches in one operator."""
        if not moves or not self._caches():
            return
        lines = [[m.row.lane, self._source(m), m.start, m.columns, m.shift] for m in moves]
        ops.gather_realign_(self._caches(), self._pools(), *torch.tensor(lines, device=self.device).t().contiguous())
        self.bytes_moved += sum(m.columns for m in moves) * sum(model.cache.bytes_per_column for model in self.models)

    def release(self, row: LaneRow) -> None:
        """Forget a row."""
        for model in self.models:
            model.filled.pop(row, None)

    def open_round(self, num_drafts: int) -> None:
        """Lanes are wide enough from the start."""

    def mask(self, kind: MaskKind, first: int, count: int) -> Tensor:
        """As :meth:`specdec_fast.padded.PaddedBatch.mask`."""
        dtype, window = kind
        return reference.attention_mask(self.start, first, count, self.first_column, dtype, window)

    def position_ids(self, first: int, count: int, max_position: int) -> Tensor:
        """As :meth:`specdec_fast.padded.PaddedBatch.position_ids`."""
        return reference.position_ids(self.start, first, count, max_position)

    def text(self, first: int, last: int) -> Tensor:
        """Tokens of the selected rows in columns ``[first, last)``; 0 outside of a row."""
        lines = []
        for row, start in zip(self.rows, self.starts, strict=True):
            left = [0] * (start - first)
            tokens = row.text[max(0, first - start) : last - start]
            lines.append((left + tokens + [0] * (last - first))[: last - first])
        return torch.tensor(lines, dtype=torch.int64, device=self.device)

    def ahead(self, count: int) -> Tensor:
        """Columns ``[B, count]`` after the newest tokens of the selected rows."""
        return self.end[:, None] + torch.arange(count, device=self.device)

    def commit(self, draft_ids: Tensor, target_ids: Tensor, limit: Tensor, n_accepted: Tensor | None) -> Tensor:
        n_accepted, committed, finished = reference.judge(
            draft_ids, target_ids, limit, n_accepted, self.length, self.max_length, self.stop_ids
        )
        new_length = self.length + n_accepted + 1
        return torch.cat([torch.stack([n_accepted, finished, new_length], 1), committed], 1)

    def advance(self, summary: list[list[int]]) -> list[int]:
        for row, length, (n, *_) in zip(self.rows, self.lengths, summary, strict=True):
            for model in self.models:
                # the bonus token has no KV yet, and that of rejected drafts counts for nothing
                model.filled[row] = min(model.filled.get(row, 0), length + n)
        return [place for place, line in enumerate(summary) if not line[1]]

    def rewind(self) -> None:
        """Forget drafts of the selected rows that a model has run ahead of their text."""
        for row, length in zip(self.rows, self.lengths, strict=True):
            for model in self.models:
                model.filled[row] = min(model.filled.get(row, 0), length - 1)

    def _source(self, move: LaneMove) -> int:
        if move.source is not None:
            return move.source
        assert move.row.slot is not None
        return -1 - move.row.slot

    def _caches(self) -> list[Tensor]:
        return [x for model in self.models for x in model.cache.tensors()]

    def _pools(self) -> list[Tensor]:
        return [x for model in self.models for x in model.cache.pools()] if self.num_slots else []


class LaneLayer(PaddedLayer):
    """A layer whose rows are the lanes selected, and a pool beside it."""

    cache: LaneCache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        lanes = self.cache.batch
        self.keys, self.values = (
            x.new_zeros(lanes.num_lanes, x.shape[1], lanes.width, x.shape[3]) for x in (key_states, value_states)
        )
        self.pools = tuple(
            x.new_zeros(lanes.num_slots, x.shape[1], lanes.slot_width, x.shape[3]) for x in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache, lanes = self.cache, self.cache.batch.lanes
        column, end, first = cache.column, cache.column + key_states.shape[2], cache.first_column
        for kept, new in ((self.keys, key_states), (self.values, value_states)):
            kept[lanes, :, column:end] = new
        if cache.mirror is not None:
            row, query, slot, position = cache.mirror
            # [1, H, N, D]
            keys, values = (x[row, :, query].transpose(0, 1)[None] for x in (key_states, value_states))
            k_pool, v_pool = self.pools
            ops.append_kv_(k_pool, v_pool, keys, values, slot, position)
        return self.keys[lanes, :, first:end], self.values[lanes, :, first:end]


class LaneCache(PaddedCache):
    """KV of all layers in the lanes of a batch."""

    layer_class = LaneLayer

    def __init__(self, batch: Lanes):
        super().__init__(batch.width)
        self.batch = batch
        # rows and columns of the forward's input, and the slots and positions that they are written to as well
        self.mirror: Tensor | None = None

    def pools(self) -> list[Tensor]:
        """Keys and values of every layer's pool, ``[W, H, C, D]``."""
        return [x for layer in self.layers if layer.is_initialized for x in layer.pools]


class LaneFollower(Follower):
    """A model whose KV follows the rows of :class:`Lanes`.

    Attributes:
        filled: per row, leading positions whose KV is that of the row's text.
    """

    def __init__(self, batch: Lanes, runner: PaddedModel):
        self.batch, self.runner = batch, runner
        self.cache = LaneCache(batch)
        self.filled: dict[LaneRow, int] = {}

    def verify(self, draft_ids: Tensor, counts: list[int]) -> Tensor:
        batch, num_drafts = self.batch, draft_ids.shape[1]
        first = min(end - n for end, n in zip(batch.ends, self._missing(), strict=True))
        last = max(batch.ends) + num_drafts
        ids = batch.text(first, last).scatter_(1, batch.ahead(num_drafts) - first, draft_ids)
        # a row that leads drafts less, so that all rows end in the same columns
        last = max(end + n for end, n in zip(batch.ends, counts, strict=True))
        newest = min(batch.ends) - 1
        logits = self._run(first, ids[:, : last - first], counts, keep=last - newest)
        if max(batch.ends) == newest + 1:
            return logits
        wanted = (batch.ahead(num_drafts + 1) - 1 - newest).clamp(max=last - newest - 1)
        return logits[torch.arange(len(batch), device=batch.device)[:, None], wanted]

    def draft(self, limits: list[int], choose: Callable[[Tensor], Tensor]) -> Tensor:
        batch, num_drafts = self.batch, max(limits)
        if num_drafts == 0:
            return batch.length.new_zeros(len(batch), 0)
        first = column = min(batch.ends) - 2
        self._catch_up(first)
        last = max(end + n for end, n in zip(batch.ends, limits, strict=True))
        tokens, following = batch.text(first, max(batch.ends) + num_drafts), min(batch.ends)
        while following < last:
            ids = tokens[:, column - first : following - first].clamp(max=self.runner.last_id)
            chosen = choose(self._run(column, ids, limits, keep=1)[:, -1])
            # a row that leads still feeds its own text
            tokens[:, following - first] = torch.where(batch.end > following, tokens[:, following - first], chosen)
            column, following = following, following + 1
        return tokens.gather(1, batch.ahead(num_drafts) - first)

    def _missing(self) -> list[int]:
        """Tokens of each selected row that have no KV."""
        return [n - self.filled.get(row, 0) for row, n in zip(self.batch.rows, self.batch.lengths, strict=True)]

    def _catch_up(self, column: int) -> None:
        """Run what newcomers lack before ``column``."""
        batch, rows, ends = self.batch, self.batch.rows, self.batch.ends
        lacking = [end - n for end, n in zip(ends, self._missing(), strict=True)]
        lagging = [place for place, first in enumerate(lacking) if first < column]
        if lagging:
            batch.select([rows[place] for place in lagging], [ends[place] for place in lagging])
            first = min(lacking)
            ids = batch.text(first, column).clamp(max=self.runner.last_id)
            self._run(first, ids, [0] * len(lagging), keep=1)
            batch.select(rows, ends)

    def _run(self, first: int, ids: Tensor, limits: list[int], keep: int) -> Tensor:
        """Columns ``[first, first + Q)``, of which at most ``limits[b]`` beyond row b's text count as its own."""
        batch, last = self.batch, first + ids.shape[1]
        filled = [min(last, end + n) for end, n in zip(batch.ends, limits, strict=True)]
        self.cache.mirror = self._mirror(first, filled) if batch.num_slots else None
        logits = self.runner.forward(batch, self.cache, first, ids, keep)
        for row, column, start in zip(batch.rows, filled, batch.starts, strict=True):
            self.filled[row] = column - start
        return logits

    def _mirror(self, first: int, filled: list[int]) -> Tensor | None:
        entries = []
        for place, (row, last, start) in enumerate(zip(self.batch.rows, filled, self.batch.starts, strict=True)):
            if row.slot is not None:
                entries += [(place, c - first, row.slot, c - start) for c in range(max(first, start), last)]
        # one copy to the device
        return torch.tensor(entries, device=self.batch.device).t().contiguous() if entries else None
