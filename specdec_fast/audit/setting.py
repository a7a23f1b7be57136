"""The setting that all candidates of an audit decode with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ..drafters import Drafter


@dataclass(frozen=True)
class Setting:
    """A target, a draft, and the limits of a row.

    Attributes:
        target: the model whose greedy text counts.
        drafter: for the decoders that draft.
        num_draft_tokens: K.
        max_new_tokens: new tokens per row.
        eos_token_id: ids that end a row.
        pad_token_id: fills a row after its end.
    """

    target: PreTrainedModel
    drafter: Drafter
    num_draft_tokens: int
    max_new_tokens: int
    eos_token_id: list[int]
    pad_token_id: int

    @property
    def limits(self) -> dict[str, Any]:
        return {
            "max_new_tokens": self.max_new_tokens,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
        }
