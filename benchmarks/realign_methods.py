"""Ways to realign the KV cache after a verify, all on the same batch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec_fast import ops, reference
from specdec_fast.operators import backends


@dataclass(frozen=True)
class Case:
    """Rows of ``content`` tokens each, of which K drafts are verified; ``K - spread .. K`` accepted, uniformly."""

    batch_size: int
    content: int
    spread: int = 5
    num_drafts: int = 5
    layers: int = 30
    heads: int = 3
    head_dim: int = 64

    @property
    def start(self) -> int:
        """Padding left of every row; what ``PaddedBatch`` allocates for left moves."""
        return 4 * (self.num_drafts + 1)

    @property
    def capacity(self) -> int:
        return self.start + self.content + 2 * (self.num_drafts + 1)

    @property
    def bytes_per_column(self) -> int:
        return 2 * self.layers * self.heads * self.head_dim * torch.float32.itemsize

    def draw(self, generator: np.random.Generator, rounds: int) -> np.ndarray:
        """Accepted drafts ``[rounds, B]``."""
        return generator.integers(self.num_drafts - self.spread, self.num_drafts + 1, (rounds, self.batch_size))


CENTRE = Case(batch_size=8, content=512)


class Judged(NamedTuple):
    """A verify's result: ``n_accepted`` ``[B]``, and the ``target_ids`` ``[B, K + 1]`` that lead to it."""

    n_accepted: Tensor
    target_ids: Tensor


class Aligned(NamedTuple):
    """Row b's KV sits in the columns of ``caches`` from ``start[b]`` on."""

    caches: list[Tensor]
    start: Tensor


class Batch:
    """A batch after a verify. Committing it writes no start or length that is read, so it can be done over and over."""

    def __init__(self, case: Case, device: torch.device):
        rows, num_drafts = case.batch_size, case.num_drafts
        self.case, self.device = case, device
        shape = (rows, case.heads, case.capacity, case.head_dim)
        self.caches = [torch.zeros(shape, device=device) for _ in range(2 * case.layers)]
        self.start, self.length = self._integers(rows) + case.start, self._integers(rows) + case.content
        self.draft_ids, self.stop_ids = self._integers(rows, num_drafts), self._integers(1) - 1
        self.limit, self.max_length = self._integers(rows) + num_drafts, self._integers(rows) + 2**40
        self.tokens = self._integers(rows, case.capacity)
        self.new_start, self.new_length = self._integers(rows), self._integers(rows)
        self.position_ids = self._integers(rows, num_drafts + 2)
        self.mask = torch.zeros(rows, 1, num_drafts + 2, case.capacity, device=device)
        self.summary = self._integers(rows, num_drafts + 4)

    def fill(self) -> None:
        """A distinct value in every slot."""
        first = 0
        for x in self.caches:
            torch.arange(first, first + x.numel(), out=x.view(torch.int32).flatten())
            first += x.numel()
        torch.arange(self.tokens.numel(), out=self.tokens.flatten())

    def verdicts(self, generator: np.random.Generator, count: int) -> list[Judged]:
        n_accepted = torch.from_numpy(self.case.draw(generator, count)).to(self.device)
        position = torch.arange(self.case.num_drafts + 1, device=self.device)
        # every draft is 0
        return [Judged(n, (position >= n[:, None]).long()) for n in n_accepted]

    @property
    def metadata(self) -> list[Tensor]:
        """Outputs of a commit beside the KV."""
        return [self.tokens, self.new_start, self.new_length, self.position_ids, self.mask, self.summary]

    def _integers(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.device)


@dataclass(frozen=True)
class Commit:
    """The whole commit by one backend's ``realign_step_``: acceptance, tokens, mask and position IDs included."""

    kernel: Callable[..., None]
    placement: int

    def __call__(self, batch: Batch, verdict: Judged) -> Aligned:
        # fmt: off
        self.kernel(
            batch.caches, batch.tokens, batch.draft_ids, verdict.target_ids, batch.limit, batch.max_length,
            batch.stop_ids, None, batch.start, batch.length, batch.new_start, batch.new_length, batch.position_ids,
            [batch.mask], [0], batch.summary, batch.case.capacity, self.placement,
        )
        # fmt: on
        return Aligned(batch.caches, batch.new_start)


def naive(batch: Batch, verdict: Judged) -> Aligned:
    """The published approach: new zeros for every layer, then a slice copy for each row; KV only."""
    columns = batch.length + verdict.n_accepted
    width = columns.max().item()
    first, last, new_first = batch.start, batch.start + columns, width - columns
    realigned = []
    for keys, values in zip(batch.caches[::2], batch.caches[1::2], strict=True):
        shape = (keys.shape[0], keys.shape[1], width, keys.shape[3])
        new_keys = torch.zeros(shape, dtype=keys.dtype, device=keys.device)
        new_values = torch.zeros(shape, dtype=values.dtype, device=values.device)
        for row in range(keys.shape[0]):
            source = slice(first[row].item(), last[row].item())
            start = new_first[row].item()
            new_keys[row, :, start:] = keys[row, :, source]
            new_values[row, :, start:] = values[row, :, source]
        realigned += [new_keys, new_values]
    return Aligned(realigned, new_first)


def gather(batch: Batch, verdict: Judged) -> Aligned:
    """One vectorised copy of a layer, at full capacity so that no width is read back; KV only."""
    rows, heads, capacity, _ = batch.caches[0].shape
    shift = verdict.n_accepted.max() - verdict.n_accepted
    source = (torch.arange(capacity, device=batch.device) - shift[:, None]).clamp(min=0)
    line = torch.arange(rows * heads, device=batch.device).view(rows, heads, 1) * capacity
    # index_select copies whole lines; torch.gather takes several times as long
    index = (line + source[:, None]).flatten()
    return Aligned([x.flatten(0, 2).index_select(0, index).view_as(x) for x in batch.caches], batch.start + shift)


def roll(batch: Batch, verdict: Judged) -> Aligned:
    """torch.roll of each row that moves, over all its columns; shifts are read once; KV only."""
    shift = verdict.n_accepted.max() - verdict.n_accepted
    moves = [(row, by) for row, by in enumerate(shift.tolist()) if by]
    for x in batch.caches:
        for row, by in moves:
            x[row] = x[row].roll(by, 1)
    return Aligned(batch.caches, batch.start + shift)


def kernels(device: torch.device) -> dict[str, Callable[..., None]]:
    """``realign_step_`` of every backend that can run on ``device``."""
    able = {backend.name for backend in backends.available() if backend.available}
    found = {"reference": reference.realign_step_}
    if device.type == "cuda" and "triton" in able:
        found["triton"] = importlib.import_module("specdec_fast.kernels.realign").realign_step_
    # compiled backends are named after the device they serve
    if device.type in able and backends.requested() in ("auto", device.type):
        found[device.type] = ops.realign_step_
    return found
