"""A commit as the device writes it, one tensor, and as the host reads it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Commit(NamedTuple):
    """A round's commit of one row.

    Attributes:
        accepted: drafts accepted.
        finished: the row has ended.
        column: the row's new end: on the padded layout the shared edge, on the ragged one its length.
        tokens: accepted drafts and the bonus token.
    """

    accepted: int
    finished: bool
    column: int
    tokens: list[int]


def packed(n_accepted: Tensor, finished: Tensor, column: Tensor, committed: Tensor) -> Tensor:
    """``[B, K + 4]``: accepted drafts, 1 for a finished row, its column, and ``committed`` ``[B, K + 1]``."""
    return torch.cat([torch.stack([n_accepted, finished, column], 1), committed], 1)


def read(summary: Tensor) -> list[Commit]:
    """The rows of what :func:`packed` gives: the one device-to-host copy of a round."""
    lines = summary.tolist()
    return [Commit(n, bool(finished), column, tokens[: n + 1]) for n, finished, column, *tokens in lines]
