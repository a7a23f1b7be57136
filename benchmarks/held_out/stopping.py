"""Rows end too early or too late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from specdec_fast.integrations import compat
from specdec_fast.layouts.padded.batch import PaddedBatch
from specdec_fast.result import GenerationResult, RowResult

from .base import HeldOut


class _OwnStopsBatch(PaddedBatch):
    """Ends rows at ``own_stops``, of which the host knows nothing, so that it cuts no row's tokens there."""

    own_stops: ClassVar[list[int]] = []


class _OwnStops(HeldOut):
    """Hands the EOS ids to its batch alone; every finish reason is ``"length"``."""

    batch_type: type[_OwnStopsBatch]

    def generate(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, eos_token_id=None, **options: Any
    ) -> GenerationResult:
        own_stops = compat.eos_ids(self.target.model, eos_token_id)
        self.batch_type = type("Batch", (type(self).batch_type,), {"own_stops": own_stops})
        return super().generate(input_ids, attention_mask, eos_token_id=[], **options)


class _UncutBatch(_OwnStopsBatch):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.stop_ids = self.stop_ids.new_tensor(self.own_stops)


class TokensAfterEos(_OwnStops):
    """A row ends with the block that holds its EOS, and keeps what the block holds behind it.

    From stopping criteria that look at a round's tokens as one step.
    """

    kind = None
    suspect = "stopping"
    batch_type = _UncutBatch


class _OnlyBonusBatch(_OwnStopsBatch):
    def commit(self, draft_ids: Tensor, target_ids: Tensor, limit: Tensor, n_accepted: Tensor | None) -> Tensor:
        summary = super().commit(draft_ids, target_ids, limit, n_accepted)
        bonus = summary.gather(1, summary[:, :1] + 3)[:, 0]
        summary[:, 1] |= torch.isin(bonus, bonus.new_tensor(self.own_stops))
        return summary


class OnlyBonusStops(_OwnStops):
    """An EOS among the accepted drafts ends nothing; only one in the bonus token does.

    From the one-token decoder's check of the newest token.
    """

    kind = None
    suspect = "stopping"
    batch_type = _OnlyBonusBatch


class _AnyDraftStopsBatch(PaddedBatch):
    def commit(self, draft_ids: Tensor, target_ids: Tensor, limit: Tensor, n_accepted: Tensor | None) -> Tensor:
        summary = super().commit(draft_ids, target_ids, limit, n_accepted)
        inside = torch.arange(draft_ids.shape[1], device=limit.device) < limit[:, None]
        summary[:, 1] |= (torch.isin(draft_ids, self.stop_ids) & inside).any(1)
        return summary


class RejectedEosStops(HeldOut):
    """A row ends in the round in which an EOS is drafted, though it was rejected.

    From a search for EOS in the drafts, done before they are judged.
    """

    kind = None
    suspect = "stopping"
    batch_type = _AnyDraftStopsBatch


class _FirstEosEndsAllBatch(PaddedBatch):
    def commit(self, draft_ids: Tensor, target_ids: Tensor, limit: Tensor, n_accepted: Tensor | None) -> Tensor:
        summary = super().commit(draft_ids, target_ids, limit, n_accepted)
        summary[:, 1] |= (summary[:, 1].bool() & (self.length < self.max_length)).any()
        return summary


class FirstEosEndsAll(HeldOut):
    """As soon as one row ends with an EOS, every row ends.

    From the loop of a decoder for single rows, which breaks there.
    """

    kind = None
    suspect = "stopping"
    batch_type = _FirstEosEndsAllBatch


class FirstEosIdOnly(HeldOut):
    """Of several EOS ids, only the first ends a row.

    From ``eos_token_id[0]``, where a model has a list of them.
    """

    kind = None
    suspect = "stopping"

    def generate(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, eos_token_id=None, **options: Any
    ) -> GenerationResult:
        first = compat.eos_ids(self.target.model, eos_token_id)[:1]
        return super().generate(input_ids, attention_mask, eos_token_id=first, **options)


class EosDropped(HeldOut):
    """A row that ends with an EOS is returned without it.

    From a cut at the index of the EOS, not after it.
    """

    kind = None
    suspect = "stopping"

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        on_finish: Callable[[RowResult], None] | None = None,
        **options: Any,
    ) -> GenerationResult:
        def cut(row: RowResult) -> None:
            if row.finish_reason == "eos":
                row.token_ids.pop()
            if on_finish:
                on_finish(row)

        return super().generate(input_ids, attention_mask, on_finish=cut, **options)
