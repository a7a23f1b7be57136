"""Tokens are committed that the target did not choose."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_fast import reference
from specdec_fast.decoding.acceptance import GreedyAcceptance

from .base import HeldOut


class _GapAcceptance(GreedyAcceptance):
    def __call__(self, draft_ids: Tensor, limit: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        target_ids, _ = super().__call__(draft_ids, limit, logits)
        inside = torch.arange(draft_ids.shape[1], device=limit.device) < limit[:, None]
        return target_ids, ((draft_ids == target_ids[:, :-1]) & inside).sum(1)


class GapsAccepted(HeldOut):
    """As many drafts are kept as equal the target's choice, matches behind the first mismatch included.

    From a sum of matches where a cumulative product belongs.
    """

    kind = "wrong_token"
    suspect = "acceptance"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, acceptance=_GapAcceptance())


class _MaximumAcceptance(GreedyAcceptance):
    def __call__(self, draft_ids: Tensor, limit: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        target_ids, _ = super().__call__(draft_ids, limit, logits)
        n_accepted, _ = reference.accept_greedy(draft_ids, target_ids, limit)
        return target_ids, torch.minimum(n_accepted.amax(), limit)


class BatchMaximum(HeldOut):
    """Every row keeps as many drafts as the best row.

    From a reduction over the batch that keeps it rectangular, with the maximum where the minimum belongs.
    """

    kind = "wrong_token"
    suspect = "acceptance"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, acceptance=_MaximumAcceptance())


class _LateBonusAcceptance(GreedyAcceptance):
    def __call__(self, draft_ids: Tensor, limit: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        target_ids, _ = super().__call__(draft_ids, limit, logits)
        n_accepted, _ = reference.accept_greedy(draft_ids, target_ids, limit)
        late = (n_accepted + (n_accepted < limit))[:, None]
        return target_ids.scatter(1, n_accepted[:, None], target_ids.gather(1, late)), n_accepted


class LateBonus(HeldOut):
    """The bonus token is the target's choice after the first rejected draft, not before it.

    From logits indexed by tokens fed, off by one at the last committed token.
    """

    kind = "wrong_token"
    suspect = "acceptance"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, acceptance=_LateBonusAcceptance())


class _TopTwoAcceptance(GreedyAcceptance):
    def __call__(self, draft_ids: Tensor, limit: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        target_ids, _ = super().__call__(draft_ids, limit, logits)
        likely = (draft_ids[..., None] == logits[:, :-1].topk(2).indices).any(-1)
        inside = torch.arange(draft_ids.shape[1], device=limit.device) < limit[:, None]
        return target_ids, (likely & inside).long().cumprod(1).sum(1)


class TopTwoAccepted(HeldOut):
    """A draft is kept if it is one of the target's two likeliest tokens.

    From acceptance made for sampling, which is lossy by design.
    """

    kind = "wrong_token"
    suspect = "acceptance"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, acceptance=_TopTwoAcceptance())


class _RowAboveAcceptance(GreedyAcceptance):
    def __call__(self, draft_ids: Tensor, limit: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        target_ids, _ = super().__call__(draft_ids, limit, logits)
        if not draft_ids.shape[1]:
            return target_ids, None
        return torch.cat([target_ids[:, :-1], target_ids[:, -1:].roll(1, 0)], 1), None


class BonusOfRowAbove(HeldOut):
    """A fully accepted block is followed by what the target chose for the row above.

    From the last column of logits kept apart, and indexed by a row number that starts at 1.
    """

    kind = "wrong_token"
    suspect = "acceptance"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, acceptance=_RowAboveAcceptance())


class _ClampedBonusAcceptance(GreedyAcceptance):
    def __call__(self, draft_ids: Tensor, limit: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        target_ids, _ = super().__call__(draft_ids, limit, logits)
        last = max(draft_ids.shape[1] - 1, 0)
        return torch.cat([target_ids[:, :-1], target_ids[:, last : last + 1]], 1), None


class BonusIndexClamped(HeldOut):
    """A fully accepted block is followed by its last draft once more.

    From a bonus index clamped to the number of drafts, which is one less than the number of logits.
    """

    kind = "wrong_token"
    suspect = "acceptance"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, acceptance=_ClampedBonusAcceptance())


class _MinimumAcceptance(GreedyAcceptance):
    def __call__(self, draft_ids: Tensor, limit: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        target_ids, _ = super().__call__(draft_ids, limit, logits)
        n_accepted, _ = reference.accept_greedy(draft_ids, target_ids, limit)
        return target_ids, n_accepted.amin().repeat(len(n_accepted))


class BatchMinimum(HeldOut):
    """Every row keeps as many drafts as the worst row: slow, but right, and no alarm may be raised.

    From batches that must stay rectangular.
    """

    kind = None
    suspect = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, acceptance=_MinimumAcceptance())


class _FirstTrustedAcceptance(GreedyAcceptance):
    def __call__(self, draft_ids: Tensor, limit: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        target_ids, _ = super().__call__(draft_ids, limit, logits)
        position = torch.arange(draft_ids.shape[1], device=limit.device)
        matches = (draft_ids == target_ids[:, :-1]) | (position == 0)
        return target_ids, (matches & (position < limit[:, None])).long().cumprod(1).sum(1)


class FirstDraftUnverified(HeldOut):
    """A row's first draft is always kept; those after it are compared with the target's choices.

    From a comparison that begins at the second fed token, since the first is known to be right.
    """

    kind = "wrong_token"
    suspect = "acceptance"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, acceptance=_FirstTrustedAcceptance())
