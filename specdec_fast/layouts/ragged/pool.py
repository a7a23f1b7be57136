"""Sequences of any length in slots, and the rounds over any of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ... import reference
from ...errors import InputError
from ...operators.commits import Commit, packed
from ..batch import Batch
from .model import RaggedModel
from .packing import Segment

# columns by which rows grow at least
CHUNK = 256


class RaggedPool(Batch):
    """Slots for sequences, their tokens, and the KV caches of the models that follow them.

    A sequence keeps its slot from :meth:`lease` to :meth:`release`. A round runs over the slots named by
    :meth:`select`: any of them, in any order. Committing a round moves no KV.

    Args:
        num_slots: most sequences at a time (W).
        stop_ids: token ids that end a row.
        device: where tokens and caches live.
        chunk: columns by which rows grow at least.
        max_columns: columns that all slots together may take, ``None`` for no bound.

    Attributes:
        rows: the slots of the next round.
        riders: what rides along with its verify.
        models: what follows the rows.
        lengths: tokens of each slot, 0 for a free one.
        capacity: columns of a slot (C).
    """

    layout = "ragged"
    needs = "AttentionInterface, position_ids and a Cache"
    model_type = RaggedModel
    # slots beyond those that are leased
    scratch_slots = 0

    def __init__(
        self,
        num_slots: int,
        stop_ids: Sequence[int],
        device: torch.device,
        *,
        chunk: int = CHUNK,
        max_columns: int | None = None,
    ):
        self.num_slots, self.chunk, self.max_columns = num_slots, chunk, max_columns
        self.capacity = 0
        self.bytes_moved = 0
        self.lengths = [0] * num_slots
        self.tokens = torch.zeros(num_slots + self.scratch_slots, 0, dtype=torch.int64, device=device)
        self.length, self.max_length = (self.tokens.new_zeros(num_slots) for _ in range(2))
        self.stop_ids = self.tokens.new_tensor(list(stop_ids))
        self._free = list(range(num_slots))[::-1]
        self.models: list[RaggedModel] = []
        self.select([])

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    def follow(self, model: PreTrainedModel) -> RaggedModel:
        follower = self.model_type(self, model)
        self.models.append(follower)
        return follower

    def lease(self, prompt: Tensor, max_length: int) -> int:
        """Give a sequence a slot; its KV is computed by the first forward that runs it.

        Args:
            prompt: ``[n]`` int64, n at least 1.
            max_length: tokens at which it is finished, prompt included.

        Raises:
            InputError: no slot is free, or none can be widened within ``max_columns``.
        """
        if not self._free:
            raise InputError(f"all {self.num_slots} slots are leased; release one first")
        self.reserve(len(prompt))
        slot = self._free.pop()
        self.tokens[slot, : len(prompt)] = prompt
        self.length[slot], self.max_length[slot] = len(prompt), max_length
        self.lengths[slot] = len(prompt)
        return slot

    def release(self, slot: int) -> None:
        """Take a sequence's slot back, at any point of its life."""
        if not self.lengths[slot]:
            raise InputError(f"slot {slot} is not leased")
        self.lengths[slot] = 0
        for model in self.models:
            model.cache.truncate(slot, 0)
        self._free.append(slot)
        if slot in self.rows:
            self.select([row for row in self.rows if row != slot])

    def select(self, slots: Sequence[int], riders: Sequence[Segment] = ()) -> None:
        """Name the slots of the next round, and the pieces of other slots' prompts that ride along with its verify."""
        self.rows, self.riders = list(slots), list(riders)
        # [B]
        self.slots = self.tokens.new_tensor(self.rows)

    def reserve(self, columns: int) -> None:
        """Widen every slot to at least ``columns`` columns.

        Raises:
            InputError: that would take more than ``max_columns``.
        """
        if columns > self.capacity:
            capacity = self._round_up(max(columns, self.capacity * 3 // 2), columns, self.num_slots)
            self._rebuild(range(self.num_slots), self.num_slots, capacity)

    def resize(self, num_slots: int, columns: int) -> dict[int, int]:
        """Another number of slots, none fewer than are leased, with at least ``columns`` columns; selects none.

        Returns:
            Where each leased slot went.

        Raises:
            InputError: that would take more than ``max_columns``.
        """
        leased = [slot for slot, length in enumerate(self.lengths) if length]
        self._rebuild(leased, num_slots, self._round_up(columns, columns, num_slots))
        self._free = list(range(len(leased), num_slots))[::-1]
        self.select([])
        return {slot: place for place, slot in enumerate(leased)}

    @property
    def kv_bytes(self) -> int:
        """Bytes that all caches take."""
        return sum(x.numel() * x.element_size() for model in self.models for x in model.cache.tensors())

    def open_round(self, num_drafts: int) -> None:
        self.open_rows([num_drafts] * len(self))

    def open_rows(self, limits: Sequence[int]) -> None:
        """Make room for ``limits[b]`` drafts and a bonus token of selected row b."""
        lengths = [self.lengths[slot] for slot in self.rows]
        self.reserve(max((n + limit + 1 for n, limit in zip(lengths, limits, strict=True)), default=0))
        # drafts are written as a rectangle, whose filler needs no KV
        self._widen_tokens(max(lengths, default=0) + max(limits, default=0) + 1)

    def _round_up(self, columns: int, least: int, num_slots: int) -> int:
        """Columns rounded up to ``chunk`` and cut to what ``max_columns`` allows in a slot, which must be ``least``."""
        rounded = -(-columns // self.chunk) * self.chunk
        if self.max_columns is None:
            return rounded
        most = self.max_columns // (num_slots + self.scratch_slots)
        if least > most:
            raise InputError(
                f"a row needs {least} columns, max_columns={self.max_columns} allows {most} in each of "
                f"{num_slots} slots"
            )
        return min(rounded, most)

    def _rebuild(self, kept: Sequence[int], num_slots: int, capacity: int) -> None:
        """Slots ``kept`` become the first of ``num_slots`` slots with ``capacity`` columns."""
        index = self.tokens.new_tensor(list(kept))
        rows = num_slots + self.scratch_slots
        self.lengths = [self.lengths[slot] for slot in kept] + [0] * (num_slots - len(kept))
        for name, count in (("tokens", rows), ("length", num_slots), ("max_length", num_slots)):
            old = getattr(self, name)[index]
            setattr(self, name, torch.cat([old, old.new_zeros(count - len(kept), *old.shape[1:])]))
        self.bytes_moved += sum(model.cache.rebuild(kept, rows, capacity) for model in self.models)
        self.num_slots, self.capacity = num_slots, capacity
        self.tokens = self.tokens[:, : max(capacity, max(self.lengths, default=0))]
        self._widen_tokens(capacity)

    def _widen_tokens(self, columns: int) -> None:
        self.tokens = torch.nn.functional.pad(self.tokens, (0, max(0, columns - self.tokens.shape[1])))

    def rewind(self) -> None:
        """Forget drafts of the selected rows that a model has run ahead of their text."""
        for slot in self.rows:
            for model in self.models:
                model.cache.truncate(slot, self.lengths[slot] - 1)

    def write_drafts(self, draft_ids: Tensor) -> None:
        """Put drafts ``[B, K]`` after the tokens of the selected rows; they become text only by :meth:`commit`."""
        self.tokens[self.slots[:, None], self._ahead(draft_ids.shape[1])] = draft_ids

    def drafts(self, num_drafts: int) -> Tensor:
        """Drafts after the tokens of the selected rows: ``[B, num_drafts]``."""
        return self.tokens[self.slots[:, None], self._ahead(num_drafts)]

    def rectangle(self, counts: list[int], width: int) -> Tensor:
        """Indices ``[B, width]`` into packed rows of ``counts[b] + 1`` entries; beyond a row's end, its last."""
        index, first = [], 0
        for n in counts:
            index.append([first + min(i, n) for i in range(width)])
            first += n + 1
        return self.tokens.new_tensor(index)

    def commit(self, draft_ids: Tensor, target_ids: Tensor, limit: Tensor, n_accepted: Tensor | None) -> Tensor:
        length = self.length[self.slots]
        n_accepted, committed, finished = reference.judge(
            draft_ids, target_ids, limit, n_accepted, length, self.max_length[self.slots], self.stop_ids
        )
        self.tokens[self.slots[:, None], self._ahead(committed.shape[1])] = committed
        new_length = length + n_accepted + 1
        self.length[self.slots] = new_length
        return packed(n_accepted, finished, new_length, committed)

    def advance(self, commits: list[Commit]) -> list[int]:
        rows = self.rows
        for slot, row in zip(rows, commits, strict=True):
            self.lengths[slot] = row.column
            for model in self.models:
                # the bonus token has no KV yet, and that of rejected drafts counts for nothing
                model.cache.truncate(slot, row.column - 1)
        stay = [b for b, row in enumerate(commits) if not row.finished]
        if len(stay) < len(rows):
            self.select([rows[b] for b in stay])
            for slot in set(rows) - set(self.rows):
                self.release(slot)
        return stay

    def _ahead(self, count: int) -> Tensor:
        """Columns ``[B, count]`` after the newest tokens of the selected rows."""
        return self.length[self.slots][:, None] + torch.arange(count, device=self.device)


class RaggedBatch(RaggedPool):
    """A rectangle of prompts, all in slots from the start.

    Arguments are those of ``PaddedBatch``. ``max_position`` is not needed: no row holds more positions than tokens.
    """

    smallest_chunk = 1

    def __init__(
        self,
        input_ids: Tensor,
        lengths: list[int],
        max_new_tokens: int,
        num_draft_tokens: int,
        stop_ids: list[int],
        max_position: int,
    ):
        longest = max(lengths)
        chunk = max(self.smallest_chunk, min(CHUNK, max_new_tokens + num_draft_tokens + 1))
        super().__init__(len(lengths), stop_ids, input_ids.device, chunk=chunk)
        self.reserve(longest + chunk)
        self.select([self.lease(ids[-n:], n + max_new_tokens) for ids, n in zip(input_ids, lengths, strict=True)])
