"""Base of the held-out faults."""

from __future__ import annotations

from typing import ClassVar

from specdec_fast.audit.diagnosis import Invariant
from specdec_fast.audit.probe.violation import Kind
from specdec_fast.audit.strategies.correct import PaddedEQSpec


class HeldOut(PaddedEQSpec):
    """A fault and the right findings about it.

    Attributes:
        kind: what a probe of the target's forward passes should name first; None where every pass is right.
        suspect: what an analysis of outputs should name; None where every output is right.
    """

    kind: ClassVar[Kind | None]
    suspect: ClassVar[Invariant | None]
