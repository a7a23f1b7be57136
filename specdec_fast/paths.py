"""Where the package keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "SPECDEC_FAST_CACHE"


def cache_folder() -> Path:
    """``SPECDEC_FAST_CACHE``, else ``~/.cache/specdec-fast``."""
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/specdec-fast").expanduser()
