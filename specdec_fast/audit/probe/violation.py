"""A violation as a probe reports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "wrong_position",
    "kept_rejected_token",
    "lost_token",
    "duplicated_token",
    "wrong_token",
    "visible_padding",
    "other_row",
    "wrong_kv",
    "wrong_mask",
]


@dataclass(frozen=True)
class Violation:
    """The first place where a forward pass broke I1 or I2 (arXiv 2510.22876, section 3).

    Attributes:
        kind: ``wrong_position``: a token at another position ID than the number of tokens before it.
            ``kept_rejected_token``, ``lost_token``, ``duplicated_token``: what attention sees is not the row's text.
            ``wrong_token``: a token was committed that the target did not choose.
            ``visible_padding``: a column without content is seen.
            ``other_row``: a column holds another row's entry.
            ``wrong_kv``: token and position are right, but the entry is not what the model computes for them.
            ``wrong_mask``: a query sees its own future, or not all of its row.
        round: forward passes since the batch began; 0 is the first.
        row: the row's number, as the batch began.
        layer: None where the inputs of the forward are wrong already.
        column: of the keys that attention was given.
        position: content position of the token concerned.
        detail: the finding in words.
        token: what was found there, if it is a token.
    """

    kind: Kind
    round: int
    row: int
    layer: int | None
    column: int
    position: int
    detail: str
    token: int | None = None

    def __str__(self) -> str:
        layer = "inputs" if self.layer is None else f"layer {self.layer}"
        where = f"round {self.round}, row {self.row}, {layer}, column {self.column}"
        return f"{self.kind} at {where}: {self.detail}"
