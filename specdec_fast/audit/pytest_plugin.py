"""A fixture for the test suites of other decoders; pytest starts without importing torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from . import AuditReport


@pytest.fixture(name="assert_output_equivalent")
def _assert_output_equivalent() -> Callable[..., AuditReport]:
    """Fail unless a batch decoder writes its target's own greedy text (specdec_fast.audit.assert_output_equivalent)."""
    from . import assert_output_equivalent

    return assert_output_equivalent
