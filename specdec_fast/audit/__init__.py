"""Is a batch decoder output-equivalent, and if not, what broke? (arXiv 2510.22876, sections 2 and 4.2)"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .assertion import assert_output_equivalent as assert_output_equivalent
    from .equivalence import EquivalenceCheck as EquivalenceCheck
    from .equivalence import Report as Report
    from .oracle import Oracle as Oracle
    from .oracle import OracleRow as OracleRow
    from .results import AuditReport as AuditReport
    from .results import RunAudit as RunAudit

_EXPORTS = {
    "AuditReport": "results",
    "EquivalenceCheck": "equivalence",
    "Oracle": "oracle",
    "OracleRow": "oracle",
    "Report": "equivalence",
    "RunAudit": "results",
    "assert_output_equivalent": "assertion",
}
__all__ = [*_EXPORTS]


def __getattr__(name: str):
    # lazy, so that what needs no model imports no torch
    if name in _EXPORTS:
        return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
