"""Builds the C++ and CUDA operators where that is possible; without them the package is slower, not smaller.

``SPECDEC_FAST_BUILD`` is ``auto`` (what the machine allows), ``none``, ``cpu`` or ``cuda``; the last two fail when
they cannot. torch must be importable: install with ``pip install --no-build-isolation``.
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.errors import SetupError

MODES = ("auto", "none", "cpu", "cuda")
MODE = os.environ.get("SPECDEC_FAST_BUILD") or "auto"
# the LibTorch stable ABI of torch 2.11: one binary for every later torch and every Python
TARGET = ["-DTORCH_TARGET_VERSION=0x020b000000000000ULL"]
CXX = ["-O3", "-g0", "-std=c++17", "-fvisibility=hidden", *TARGET]
NVCC = ["-O3", "-std=c++17", "-DUSE_CUDA", *TARGET]


def notice(text: str) -> None:
    print(f"\nspecdec-fast: {text}\n", file=sys.stderr)


def sources(folder: str, pattern: str) -> list[str]:
    return sorted(map(str, Path("csrc", folder).glob(pattern)))


def missing(kind: str) -> str:
    """Why ``kind`` (``cpu`` or ``cuda``) cannot be built here, or an empty string."""
    try:
        import torch
        from torch.utils.cpp_extension import CUDA_HOME, get_cxx_compiler
    except ImportError as error:
        return f"torch cannot be imported ({error}); install with --no-build-isolation"
    if shutil.which(get_cxx_compiler().split()[0]) is None:
        return f"there is no C++ compiler ({get_cxx_compiler()})"
    if kind == "cuda" and torch.version.cuda is None:
        return f"torch {torch.__version__} is not a CUDA build"
    if kind == "cuda" and CUDA_HOME is None:
        return "there is no CUDA toolkit; set CUDA_HOME"
    if kind == "cuda" and not sources("cuda", "*.cu"):
        return "csrc/cuda holds no sources"
    return ""


def extensions() -> dict:
    if MODE not in MODES:
        raise SetupError(f"SPECDEC_FAST_BUILD={MODE!r}; accepted are {', '.join(MODES)}")
    wanted = {"none": [], "cpu": ["cpu"]}.get(MODE, ["cpu", "cuda"])
    reasons = {kind: missing(kind) for kind in wanted}
    for kind, reason in reasons.items():
        if reason and MODE != "auto":
            raise SetupError(f"SPECDEC_FAST_BUILD={MODE}, but {reason}")
        if reason:
            notice(f"building without the {kind} operators: {reason}")
    kinds = [kind for kind, reason in reasons.items() if not reason]
    if not kinds:
        return {}
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

    common = {"py_limited_api": True, "depends": sorted(map(str, Path("csrc").rglob("*.h")))}
    modules = []
    if "cpu" in kinds:
        flags = {"cxx": CXX}
        files = ["csrc/ops.cpp", *sources("cpu", "*.cpp")]
        modules.append(CppExtension("specdec_fast._C", files, extra_compile_args=flags, **common))
    if "cuda" in kinds:
        flags = {"cxx": [*CXX, "-DUSE_CUDA"], "nvcc": NVCC}
        files = [*sources("cuda", "*.cpp"), *sources("cuda", "*.cu")]
        modules.append(CUDAExtension("specdec_fast._C_cuda", files, extra_compile_args=flags, **common))
    return {"ext_modules": modules, "cmdclass": {"build_ext": BuildExtension}}


setup(
    # named here because the symlinked kernels has no __init__.py
    packages=["specdec_fast", "specdec_fast.drafters", "specdec_fast.kernels"],
    package_data={"specdec_fast": ["py.typed", "schemas.inc"], "specdec_fast.kernels": ["README.md"]},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    **extensions(),
)
