"""The package's cache folder, and errors of files that cannot be written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import WriteError

CACHE_VARIABLE = "SPECDEC_FAST_CACHE"


def cache_folder() -> Path:
    """``SPECDEC_FAST_CACHE``, else ``~/.cache/specdec-fast``."""
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/specdec-fast").expanduser()


@contextmanager
def writing(name: Path | str) -> Iterator[None]:
    """Turn a failed write into a ``WriteError`` that names its file, which the error of a full disk does not."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise WriteError(f"cannot write {name}: {error.strerror or error}") from error
