"""Acceptance of drafts, and the bonus token."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Acceptance(Protocol):
    """Judges at most ``limit`` ``[B]`` of the drafts ``[B, K]`` by the target's ``logits`` ``[B, K + 1, V]``.

    Returns ``target_ids`` ``[B, K + 1]``, whose entry at ``n_accepted_b`` is the bonus token, and ``n_accepted``
    ``[B]``, or ``None`` for the longest prefix of the drafts that equals ``target_ids``.
    """

    def __call__(self, draft_ids: Tensor, limit: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]: ...


class GreedyAcceptance:
    """Longest prefix equal to the target's argmax; the bonus is the target's own next token (paper, section 3)."""

    def __call__(self, draft_ids: Tensor, limit: Tensor, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        if logits.dtype == torch.float64:
            logits = logits.float()  # transformers' greedy search picks from float32 scores
        return greedy_ids(logits), None


def greedy_ids(logits: Tensor) -> Tensor:
    """The first best of ``[..., V]``."""
    # on CPUs argmax of bfloat16 takes four times as long
    return logits.max(-1).indices
