"""Implementations of the operators that can run here, and the one asked for."""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import InputError

VARIABLE = "SPECDEC_FAST_BACKEND"
NAMES = ("reference", "cpu", "triton", "cuda")
_PACKAGE = Path(__file__).parents[1]
_HOW_TO_BUILD = "install with `pip install --no-build-isolation`"
_UNWANTED = "SPECDEC_FAST_BUILD=none"


class Backend(NamedTuple):
    """An implementation of the operators; ``reason`` says what it serves, or why it cannot run."""

    name: str
    available: bool
    reason: str


def requested() -> str:
    """Value of ``SPECDEC_FAST_BACKEND``: ``auto``, or the one backend to use."""
    name = os.environ.get(VARIABLE) or "auto"
    if name not in ("auto", *NAMES):
        raise InputError(f"{VARIABLE}={name!r}; accepted are auto, {', '.join(NAMES)}")
    return name


def available() -> list[Backend]:
    """Every backend, and whether it can run here."""
    return [Backend("reference", True, "PyTorch, any device"), _cpu(), _triton(), _cuda()]


def require(name: str) -> None:
    """Raise unless backend ``name`` can run."""
    backend = next(b for b in available() if b.name == name)
    if not backend.available:
        raise InputError(f"{VARIABLE}={name}, which cannot run here: {backend.reason}")


def is_built(extension: str) -> bool:
    return any(_PACKAGE.glob(f"{extension}.*so"))


def unbuilt_notice() -> str:
    """A warning for CPU tensors that miss the C++ operators; empty if they are built or not wanted."""
    if requested() != "auto" or is_built("_C") or _note() == _UNWANTED:
        return ""
    return (
        f"the C++ operators are not built{_because()}; slower ones take over. Install again, where torch, "
        "setuptools>=77 and a C++ compiler are present, with `pip install --no-build-isolation --force-reinstall "
        f"--no-deps`; {VARIABLE}=reference does without them and without this warning"
    )


def _note() -> str:
    """Reason for missing C++ operators, as setup.py recorded it."""
    note = _PACKAGE / "_C.missing"
    return note.read_text(encoding="utf-8") if note.exists() else ""


def _because() -> str:
    return f": {_note()}" if _note() else ""


@functools.cache
def load(extension: str) -> str:
    """Load a built extension and register its operators; returns why that failed, or an empty string."""
    try:
        torch.ops.load_library(next(_PACKAGE.glob(f"{extension}.*so")))
    except (OSError, RuntimeError) as error:
        return f"{extension} does not load into torch {torch.__version__}: {error}"
    return ""


def has_gpu() -> bool:
    return torch.cuda.is_available()


def interprets_triton() -> bool:
    """Triton then runs on CPU tensors, slowly."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _cpu() -> Backend:
    if not is_built("_C"):
        reason = f"not built{_because()}; {_HOW_TO_BUILD} where torch and a C++ compiler are present"
        return Backend("cpu", False, reason)
    # a process that asked for another backend must not load it: a second definition of the operators would clash
    problem = load("_C") if requested() in ("auto", "cpu") else ""
    return Backend("cpu", not problem, problem or "C++, CPU tensors")


def _triton() -> Backend:
    if importlib.util.find_spec("triton") is None:
        return Backend("triton", False, "triton is not installed")
    if not (_PACKAGE / "kernels" / "realign.py").exists():
        return Backend("triton", False, "specdec_fast.kernels.realign is missing")
    if interprets_triton():
        return Backend("triton", True, "Triton interpreted, any device")
    return Backend("triton", has_gpu(), "Triton, GPU tensors" if has_gpu() else "torch sees no GPU")


def _cuda() -> Backend:
    if not is_built("_C_cuda"):
        return Backend("cuda", False, f"not built; {_HOW_TO_BUILD} where a CUDA build of torch and nvcc are present")
    if not has_gpu():
        return Backend("cuda", False, "torch sees no GPU")
    problem = load("_C_cuda") if requested() in ("auto", "cuda") else ""
    return Backend("cuda", not problem, problem or "CUDA C++, GPU tensors")
