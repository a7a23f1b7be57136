"""The KV layouts by name."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..integrations import compat
from .padded.batch import PaddedBatch
from .ragged import RaggedBatch

BatchType = type[PaddedBatch] | type[RaggedBatch]

LAYOUTS: dict[str, BatchType] = {
    PaddedBatch.layout: PaddedBatch,
    RaggedBatch.layout: RaggedBatch,
}


def fastest_layout(models: Sequence[PreTrainedModel]) -> str:
    """``"ragged"`` where it was measured to be faster, on CPUs, and can serve all ``models``; else ``"padded"``."""
    if any(model.device.type != "cpu" for model in models):
        return "padded"
    try:
        for model in models:
            compat.model_traits(model, "ragged")
    except UnsupportedModelError:
        return "padded"
    return "ragged"
