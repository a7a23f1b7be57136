"""Batch speculative decoders to audit against: correct ones, and faults."""

from __future__ import annotations

from ...decoding.eqspec import EQSpec
from .correct import BatchExpansion, MaskedHoles, PaddedEQSpec, Rollback
from .faults import (
    BSP,
    DSD,
    BonusFromDraft,
    DuplicatedToken,
    Fault,
    HolesVisible,
    LostToken,
    PaddingVisible,
    PositionOfColumn,
    PositionOffByOne,
    PositionOffset,
    RejectedKept,
    RowsSwapped,
    StaleDraft,
)

CORRECT: dict[str, type[EQSpec]] = {
    "eqspec-padded": PaddedEQSpec,
    "holes": MaskedHoles,
    "rollback": Rollback,
    "expansion": BatchExpansion,
}
FAULTS: dict[str, type[Fault]] = {
    "bsp": BSP,
    "dsd": DSD,
    "bonus-from-draft": BonusFromDraft,
    "padding-visible": PaddingVisible,
    "rejected-kept": RejectedKept,
    "position-off-by-one": PositionOffByOne,
    "position-of-column": PositionOfColumn,
    "position-offset": PositionOffset,
    "holes-visible": HolesVisible,
    "lost-token": LostToken,
    "duplicated-token": DuplicatedToken,
    "rows-swapped": RowsSwapped,
    "stale-draft": StaleDraft,
}
STRATEGIES: dict[str, type[EQSpec]] = CORRECT | FAULTS
