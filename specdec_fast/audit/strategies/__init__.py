"""Batch speculative decoders to audit against: correct ones, and faults."""

from __future__ import annotations

from ...eqspec import EQSpec
from .correct import BatchExpansion, MaskedHoles, Rollback
from .faults import BSP, DSD, BonusFromDraft, PaddingVisible, RejectedKept

CORRECT: dict[str, type[EQSpec]] = {
    "eqspec": EQSpec,
    "holes": MaskedHoles,
    "rollback": Rollback,
    "expansion": BatchExpansion,
}
FAULTS: dict[str, type[EQSpec]] = {
    "bsp": BSP,
    "dsd": DSD,
    "bonus-from-draft": BonusFromDraft,
    "padding-visible": PaddingVisible,
    "rejected-kept": RejectedKept,
}
STRATEGIES = CORRECT | FAULTS
