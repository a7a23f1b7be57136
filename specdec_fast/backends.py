"""Which implementations of the operators can run here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Backend:
    """A backend, and why it cannot run if it cannot."""

    name: str
    available: bool
    reason: str = ""


def available() -> list[Backend]:
    """All backends, the ones that cannot run included."""
    missing = [Backend(name, False, "not built into this version") for name in ("cpu", "triton", "cuda")]
    return [Backend("reference", True), *missing]
