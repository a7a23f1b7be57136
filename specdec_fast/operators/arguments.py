"""Arguments of operators as structures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class AttentionArguments(NamedTuple):
    """The arguments of :func:`specdec_fast.ops.ragged_attention_`, in the order of its schema."""

    out: Tensor
    query: Tensor
    k_pool: Tensor
    v_pool: Tensor
    table: Tensor
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: Tensor | None


class StepArguments(NamedTuple):
    """The arguments of :func:`specdec_fast.ops.realign_step_`, which explains them, in the order of its schema."""

    caches: Sequence[Tensor]
    tokens: Tensor
    draft_ids: Tensor
    target_ids: Tensor
    limit: Tensor
    max_length: Tensor
    stop_ids: Tensor
    n_accepted: Tensor | None
    start: Tensor
    length: Tensor
    new_start: Tensor
    new_length: Tensor
    position_ids: Tensor
    masks: Sequence[Tensor]
    windows: Sequence[int]
    summary: Tensor
    max_position: int
    placement: int
