"""Packed forwards of few shapes, each one graph under ``torch.compile``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from ...errors import UnsupportedModelError
from ...integrations import compat
from .cache import RaggedCache
from .model import RaggedModel
from .packing import Packing, Segment
from .pool import CHUNK, RaggedBatch

if TYPE_CHECKING:
    from .pool import RaggedPool

# of all models of a process, since they share the compiled function
MOST_GRAPHS = 128


def bucket(count: int) -> int:
    """The next of four sizes per octave, so at most a quarter more than ``count``."""
    step = 1 << max(0, count.bit_length() - 3)
    return -(-count // step) * step


class BucketedPacking(Packing):
    """A packing whose token count, logit count and table have few shapes.

    Filler tokens come last. They are an ordinary segment, of the slot ``scratch`` that no row has.

    Attributes:
        num_kept: tokens whose logits are wanted; those of ``kept`` beyond are filler.
    """

    def __init__(
        self, segments: Sequence[Segment], keep: Sequence[int], device: torch.device, scratch: int, capacity: int
    ):
        tokens = sum(s.size for s in segments)
        filler = min(bucket(tokens) - tokens, capacity)
        extra = [Segment(scratch, 0, filler)] if filler else []
        super().__init__([*segments, *extra], [*keep, *(0 for _ in extra)], device)
        self.next_row, self.next_position = self.table[:2, : len(segments)]
        missing = scratch + 1 - self.table.shape[1]
        # segments that do not exist have size 0, and begin where the tokens end
        self.table = torch.cat([pad(self.table[:3], (0, missing)), pad(self.table[3:], (0, missing), value=len(self))])
        kept = torch.arange(len(self), device=device) if self.kept is None else self.kept
        self.num_kept = len(kept)
        self.kept = pad(kept, (0, bucket(max(1, len(kept))) - len(kept)))


class CompiledModel(RaggedModel):
    """A :class:`RaggedModel` whose forwards are compiled, except the first, which gives the shapes of the KV."""

    def __init__(self, pool: RaggedPool, model: PreTrainedModel):
        super().__init__(pool, model)
        self.cache = RaggedCache(pool.num_slots + 1, pool.capacity)

    def _pack(self, segments: Sequence[Segment], keep: Sequence[int]) -> Packing:
        if not self.cache.layers:
            return super()._pack(segments, keep)
        return BucketedPacking(segments, keep, self.pool.device, self.pool.num_slots, self.pool.capacity)

    def _call(self, ids: Tensor, positions: Tensor, packing: Packing) -> Tensor:
        if not isinstance(packing, BucketedPacking):
            return super()._call(ids, positions, packing)
        call = compiled_call(ids.device.type)
        try:
            with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS):
                logits = call(self.model, self.traits, self.cache, ids, positions, None, packing.kept)
        except torch._dynamo.exc.Unsupported as error:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} does not compile to one graph; use compile=False ({error})"
            ) from error
        return logits[:, : packing.num_kept]


@functools.cache
def compiled_call(device: str):
    return torch.compile(compat.call, fullgraph=True, mode="reduce-overhead" if device == "cuda" else None)


class CompiledBatch(RaggedBatch):
    """A :class:`RaggedBatch` whose models are compiled."""

    model_type = CompiledModel
    scratch_slots = 1
    smallest_chunk = CHUNK
