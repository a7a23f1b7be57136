"""The KV layouts by name."""

from __future__ import annotations

from .batch import Batch
from .padded import PaddedBatch
from .ragged import RaggedBatch

LAYOUTS: dict[str, type[Batch]] = {kind.layout: kind for kind in (PaddedBatch, RaggedBatch)}
