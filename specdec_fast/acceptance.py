"""How many drafts a row keeps, and the token that follows them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from . import reference


class Acceptance(Protocol):
    """Decides ``n_accepted`` ``[B]`` and ``bonus`` ``[B]`` from drafts and target logits.

    ``draft_ids`` is ``[B, K]``, ``limit`` ``[B]`` (drafts that may be accepted), ``logits`` ``[B, K + 1, V]``.
    """

    def __call__(self, draft_ids: Tensor, limit: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]: ...


class GreedyAcceptance:
    """Longest prefix equal to the target's argmax; the bonus is the target's own next token."""

    def __call__(self, draft_ids: Tensor, limit: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        if logits.dtype == torch.float64:
            logits = logits.float()  # transformers' greedy search picks from float32 scores
        return reference.accept_greedy(draft_ids, logits.argmax(-1), limit)
