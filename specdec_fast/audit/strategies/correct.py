"""Other ways to keep a batch correct, which an audit must find clean (arXiv 2510.22876, section 2)."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ... import reference
from ...decoding.acceptance import GreedyAcceptance
from ...decoding.eqspec import EQSpec
from ...layouts.padded.batch import PaddedBatch, PaddedFollower, PaddedModel
from ...layouts.padded.cache import PaddedCache
from ...prompts import pad_left
from .holes import HoleBatch


class PaddedEQSpec(EQSpec):
    """EQSPEC on the padded layout."""

    batch_type = PaddedBatch


class MaskedHoles(EQSpec):
    """Nothing moves; rejected drafts stay behind as masked columns, and the cache grows by K + 1 a round."""

    batch_type = HoleBatch


class Rollback(PaddedEQSpec):
    """Every row keeps only as many drafts as the worst row of the batch, so the batch stays rectangular: slow."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, acceptance=_BatchMinimum())


class _ExpandedBatch(PaddedBatch):
    def follow(self, model: PreTrainedModel) -> PaddedFollower:
        # the target comes first; a draft drafts as ever
        return super().follow(model) if self._caches else PaddedFollower(self, _ExpandedModel(model))


class BatchExpansion(EQSpec):
    """Every prefix of the drafts is a row of its own, so that no row is ever ragged: K + 1 times the memory."""

    batch_type = _ExpandedBatch


class _BatchMinimum(GreedyAcceptance):
    def __call__(self, draft_ids: Tensor, limit: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        target_ids, _ = super().__call__(draft_ids, limit, logits)
        n_accepted, _ = reference.accept_greedy(draft_ids, target_ids, limit)
        return target_ids, n_accepted.amin().expand_as(n_accepted).contiguous()


class _ExpandedModel(PaddedModel):
    def forward(self, batch: PaddedBatch, cache: PaddedCache, first: int, input_ids: Tensor, keep: int) -> Tensor:
        assert isinstance(batch, PaddedBatch)
        rows = len(input_ids)
        texts = torch.cat([batch.tokens[:rows, :first], input_ids], 1).tolist()
        contents = [text[start:] for text, start in zip(texts, batch.start.tolist(), strict=True)]
        prefixes = [content[: len(content) - n] for content in contents for n in reversed(range(keep))]
        ids, mask = pad_left(prefixes, 0)
        ids = ids.to(input_ids.device)
        expanded = PaddedBatch(ids, mask.sum(1).tolist(), 1, 1, [], batch.max_position)
        logits = super().forward(expanded, expanded.attach(self), expanded.first_column, ids, keep=1)
        return logits.view(rows, keep, -1)
