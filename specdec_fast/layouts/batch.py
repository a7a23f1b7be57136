"""The interface of KV layouts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..operators.commits import Commit


class Batch(ABC):
    """Rows decoded together, and the models whose KV caches follow them.

    A round is :meth:`open_round`, drafts, :meth:`Follower.verify`, :meth:`commit`, :meth:`advance`. The first round
    drafts nothing and runs the prompts.

    Attributes:
        layout: name of the layout.
        needs: what a model must take to run on it.
        bytes_moved: KV bytes relocated so far.
    """

    layout: ClassVar[str]
    needs: ClassVar[str]
    bytes_moved: int

    @abstractmethod
    def __len__(self) -> int:
        """Rows of the next round."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of its tensors."""

    @abstractmethod
    def follow(self, model: PreTrainedModel) -> Follower:
        """Give ``model`` an empty KV cache that stays in step with the rows.

        Raises:
            UnsupportedModelError: a model that this layout cannot serve.
        """

    @abstractmethod
    def open_round(self, num_drafts: int) -> None:
        """Make room for ``num_drafts`` drafts and a bonus token."""

    @abstractmethod
    def commit(self, draft_ids: Tensor, target_ids: Tensor, limit: Tensor, n_accepted: Tensor | None) -> Tensor:
        """Append a round's tokens and realign every cache; no host read.

        Args:
            draft_ids: ``[B, K]`` int64.
            target_ids: ``[B, K + 1]`` int64; the bonus is ``target_ids[b, n_accepted_b]``.
            limit: ``[B]`` int64, drafts of each row that may be accepted.
            n_accepted: ``[B]`` int64, or ``None`` for the longest prefix that equals ``target_ids``.

        Returns:
            What :func:`specdec_fast.operators.commits.read` reads; :meth:`advance` follows on the host.
        """

    @abstractmethod
    def advance(self, commits: list[Commit]) -> list[int]:
        """Follow :meth:`commit` on the host and let finished rows go; returns which rows stay, in their new order."""


class Follower(ABC):
    """A causal LM whose KV cache follows the rows of a batch."""

    @abstractmethod
    def verify(self, draft_ids: Tensor, counts: list[int]) -> Tensor:
        """Run the tokens whose KV is missing, then the drafts.

        Args:
            draft_ids: ``[B, K]`` int64; of row b the first ``counts[b]`` are drafts, the rest is filler.

        Returns:
            Logits ``[B, K + 1, V]`` after the newest token and after each draft; what follows filler means nothing.
        """

    @abstractmethod
    def draft(self, limits: list[int], choose: Callable[[Tensor], Tensor]) -> Tensor:
        """Continue row b by ``limits[b]`` tokens, one forward each.

        Args:
            choose: picks the next tokens ``[R]`` from logits ``[R, V]``.

        Returns:
            ``[B, max(limits)]`` int64; beyond a row's limit comes filler.
        """
