"""Builds the C++ and CUDA operators where that is possible; without them the package is slower, not smaller.

``SPECDEC_FAST_BUILD`` is ``auto`` (what the machine allows), ``none``, ``cpu`` or ``cuda``; the last two fail when
they cannot. torch must be importable: install with ``pip install --no-build-isolation``.
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist
from setuptools.errors import SetupError

MODES = ("auto", "none", "cpu", "cuda")
MODE = os.environ.get("SPECDEC_FAST_BUILD") or "auto"
# the LibTorch stable ABI of torch 2.11: one binary for every later torch and every Python
TARGET = ["-DTORCH_TARGET_VERSION=0x020b000000000000ULL"]
CXX = ["-O3", "-g0", "-std=c++17", "-fvisibility=hidden", *TARGET]
NVCC = ["-O3", "-std=c++17", "-Xcompiler=-fvisibility=hidden", "-DUSE_CUDA", *TARGET]


def notice(text: str) -> None:
    print(f"\nspecdec-fast: {text}\n", file=sys.stderr)


def leave_note(folder: str, reason: str) -> None:
    """Say in the package why the C++ operators are missing, for ``specdec_fast.operators.backends`` to read."""
    Path(folder, "specdec_fast", "_C.missing").write_text(reason, encoding="utf-8")


def sources(pattern: str) -> list[str]:
    return sorted(map(str, Path("csrc").glob(pattern)))


def missing(kind: str) -> str:
    """Why ``kind`` (``cpu`` or ``cuda``) cannot be built here, or an empty string."""
    try:
        import torch
        from torch.utils.cpp_extension import CUDA_HOME, get_cxx_compiler
    except ImportError as error:
        return f"torch cannot be imported without --no-build-isolation ({error})"
    if shutil.which(get_cxx_compiler().split()[0]) is None:
        return f"there is no C++ compiler ({get_cxx_compiler()})"
    if kind == "cuda" and not (torch.version.cuda and CUDA_HOME and sources("cuda/*.cu")):
        return f"it takes a CUDA build of torch, not {torch.__version__}, and a CUDA toolkit; CUDA_HOME is {CUDA_HOME}"
    return ""


class Source(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Keep the link to the kernels, which setuptools would copy."""
        super().make_release_tree(base_dir, [file for file in files if not file.startswith("specdec_fast/kernels/")])
        Path(base_dir, "specdec_fast", "kernels").symlink_to("../kernels")


def noting(reason: str) -> type[build_py]:
    class Python(build_py):
        def run(self) -> None:
            super().run()
            leave_note("" if self.editable_mode else self.build_lib, reason)

    return Python


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
        return {"cmdclass": {"sdist": Source, "build_py": noting(reasons.get("cpu", "SPECDEC_FAST_BUILD=none"))}}
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

    if "cuda" in kinds and not torch.cuda.is_available():
        # torch asks the GPU what to build for, and fails where there is none
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")

    class Build(BuildExtension):
        def run(self) -> None:
            inplace, compiler = self.inplace, self.compiler
            while self.extensions:
                try:
                    return super().run()
                # a toolchain fails in many ways; only auto may do without what it cannot build
                except Exception as error:
                    if MODE != "auto":
                        raise
                    notice(f"building without {self.extensions.pop().name}: {error}")
                    self.inplace, self.compiler = inplace, compiler
            leave_note("" if inplace else self.build_lib, "they did not compile; `pip install -v` shows why")

    flags = {"extra_compile_args": {"cxx": CXX, "nvcc": NVCC}, "py_limited_api": True}
    modules = []
    if "cpu" in kinds:
        modules.append(CppExtension("specdec_fast._C", ["csrc/ops.cpp", *sources("cpu/*.cpp")], **flags))
    if "cuda" in kinds:
        modules.append(CUDAExtension("specdec_fast._C_cuda", sources("cuda/*.cu"), **flags))
    return {"ext_modules": modules, "cmdclass": {"sdist": Source, "build_ext": Build}}


setup(
    # find_packages skips the symlinked kernels, which has no __init__.py
    packages=[*find_packages(include=["specdec_fast", "specdec_fast.*"]), "specdec_fast.kernels"],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    **extensions(),
)
