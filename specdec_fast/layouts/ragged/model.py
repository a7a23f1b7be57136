"""A transformers causal LM run over packed tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import PreTrainedModel

from ...integrations import compat
from ..batch import Follower
from . import attention
from .cache import RaggedCache
from .packing import Packing, Segment

if TYPE_CHECKING:
    from .pool import RaggedPool


class RaggedModel(Follower):
    """A causal LM whose KV follows the rows of a :class:`RaggedPool`.

    Only real tokens reach the model: its ``input_ids`` are ``[1, N]``, the tokens of all rows one after the other.

    Args:
        model: any transformers causal LM that finds its attention function in ``AttentionInterface``.
    """

    cache_type = RaggedCache

    def __init__(self, pool: RaggedPool, model: PreTrainedModel):
        self.pool, self.model = pool, model
        self.traits = compat.model_traits(model, pool.layout)
        self.cache = self.cache_type(pool.num_slots, pool.capacity)
        self._configs = compat.attention_configs(model)
        self._last_id = compat.text_config(model).vocab_size - 1

    def missing(self, slot: int, num_drafts: int = 0) -> Segment:
        """The tokens of the row in ``slot`` that have no KV yet, and ``num_drafts`` drafts after them."""
        filled = self.cache.filled[slot]
        return Segment(slot, filled, self.pool.lengths[slot] - filled + num_drafts)

    def forward(self, segments: Sequence[Segment], keep: Sequence[int]) -> Tensor:
        """Run ``segments`` of any slots in one pass: whole prompts, chunks of them, newest tokens, drafts.

        A segment starts where the KV of its row ends, or before. Its tokens are read from the pool.

        Args:
            keep: trailing tokens of each segment whose logits are wanted.

        Returns:
            ``[sum(keep), V]``, segment after segment.
        """
        return self._run(self._pack(segments, keep))

    def verify(self, draft_ids: Tensor, counts: list[int]) -> Tensor:
        pool, num_drafts = self.pool, draft_ids.shape[1]
        pool.write_drafts(draft_ids)
        segments = [self.missing(slot, n) for slot, n in zip(pool.rows, counts, strict=True)]
        logits = self.forward([*segments, *pool.riders], [n + 1 for n in counts] + [0] * len(pool.riders))
        if sum(counts) == len(counts) * num_drafts:
            return logits.unflatten(0, (len(counts), num_drafts + 1))
        return logits[pool.rectangle(counts, num_drafts + 1)]

    def draft(self, limits: list[int], choose: Callable[[Tensor], Tensor]) -> Tensor:
        pool = self.pool
        for step in range(max(limits)):
            slots = [slot for slot, limit in zip(pool.rows, limits, strict=True) if limit > step]
            packing = self._pack([self.missing(slot, step) for slot in slots], [1] * len(slots))
            pool.tokens[packing.next_row, packing.next_position] = choose(self._run(packing))
        return pool.drafts(max(limits))

    def _pack(self, segments: Sequence[Segment], keep: Sequence[int]) -> Packing:
        return Packing(segments, keep, self.pool.device)

    def _call(self, ids: Tensor, positions: Tensor, packing: Packing) -> Tensor:
        keep = 0 if packing.kept is None else packing.kept
        return compat.call(self.model, self.traits, self.cache, ids, positions, None, keep)

    def _run(self, packing: Packing) -> Tensor:
        traits = self.traits
        # an id beyond this model's vocabulary can only be a target's that no tokenizer emits
        ids = self.pool.tokens[packing.row_of, packing.position_of].clamp_(max=self._last_id)
        positions = packing.position_of
        if max(s.end for s in packing.segments) > traits.max_position:
            positions = positions.clamp(max=traits.max_position)
        logits = self._logits(ids, positions, packing)
        for segment in packing.segments:
            self.cache.filled[segment.slot] = segment.end
        return logits

    def _logits(self, ids: Tensor, positions: Tensor, packing: Packing) -> Tensor:
        with compat.attention_set(self._configs, attention.NAME), attention.over(self.cache, packing):
            return self._call(ids[None], positions[None], packing)[0]
