"""Batch speculative decoding for Hugging Face causal LMs, correct row by row."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import audit as audit
    from . import drafters as drafters
    from . import errors as errors
    from . import hf as hf
    from . import models as models
    from . import ops as ops
    from . import reference as reference
    from .decoding.eqspec import EQSpec as EQSpec
    from .drafters import ModelDrafter as ModelDrafter
    from .drafters import NgramDrafter as NgramDrafter
    from .drafters import SelfDrafter as SelfDrafter
    from .exspec import EXSpec as EXSpec
    from .integrations.realign_cache import realign_cache as realign_cache
    from .result import GenerationResult as GenerationResult

__version__ = "0.1.0"

_EXPORTS = {
    "EQSpec": "decoding.eqspec",
    "EXSpec": "exspec",
    "GenerationResult": "result",
    "ModelDrafter": "drafters",
    "NgramDrafter": "drafters",
    "SelfDrafter": "drafters",
    "realign_cache": "integrations.realign_cache",
}
_MODULES = ("audit", "drafters", "errors", "hf", "models", "ops", "reference")
__all__ = ["__version__", *_EXPORTS, *_MODULES]


def __getattr__(name: str):
    # lazy, so that the operators can be imported without transformers
    if name in _EXPORTS:
        return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
