"""A batch whose KV is spoiled where it was moved."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from specdec_fast.layouts.padded.batch import PaddedBatch


class SpoiledMoveBatch(PaddedBatch):
    """Spoils KV after it was moved; ``victims`` are the caches concerned, the target's by default."""

    victims: ClassVar[slice] = slice(0, 1)

    def commit(self, draft_ids: Tensor, target_ids: Tensor, limit: Tensor, n_accepted: Tensor | None) -> Tensor:
        kv = [x for cache in self._caches[self.victims] for x in cache.tensors()]
        before, start = [x.clone() for x in kv], self.start
        summary = super().commit(draft_ids, target_ids, limit, n_accepted)
        self.spoil(kv, before, self.start != start)
        return summary

    def spoil(self, kv: list[Tensor], before: list[Tensor], moved: Tensor) -> None:
        """``kv`` holds the keys and values of every layer in turn; ``moved`` ``[B]`` says whose row was moved."""
        raise NotImplementedError
