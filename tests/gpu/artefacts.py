"""Compiled CUDA sources, built once a session."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from filelock import FileLock

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "csrc" / "cuda"
SHIM = Path(__file__).parent / "shim"
ARCHITECTURES = (80, 90, 100)
SANITIZERS = {
    "plain": (),
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover"),
    "thread": ("-fsanitize=thread",),
}


def _nvcc_architectures() -> list[str]:
    if shutil.which("nvcc") is None:
        return []
    return subprocess.run(["nvcc", "--list-gpu-arch"], capture_output=True, text=True).stdout.split()


HAS_NVCC = {f"compute_{arch}" for arch in ARCHITECTURES} <= {*_nvcc_architectures()}


@functools.cache
def _session() -> Path:
    """A folder for all workers of a test run; the last one to leave removes it."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"process-{os.getpid()}")
    folder = Path(tempfile.gettempdir()) / f"specdec-fast-{run}"
    here = folder / "workers" / str(os.getpid())
    here.parent.mkdir(parents=True, exist_ok=True)
    here.touch()
    atexit.register(_leave, folder, here)
    return folder


def _leave(folder: Path, here: Path) -> None:
    here.unlink(missing_ok=True)
    if not any(here.parent.iterdir()):
        shutil.rmtree(folder, ignore_errors=True)


def _once(name: str, make: Callable[[Path], None]) -> Path:
    """The path ``name`` of the session, made by the first worker that asks for it."""
    path = _session() / name
    with FileLock(_session() / f"{name}.lock"):
        if not path.exists():
            unfinished = path.with_name(f"{name}.unfinished")
            make(unfinished)
            unfinished.rename(path)
    return path


def _compile(name: str, *command: str | Path) -> Path:
    return _once(name, lambda output: subprocess.run([*command, "-o", output], check=True))


def directory(name: str) -> Path:
    """A folder of the session."""
    return _once(name, Path.mkdir)


def mutant(name: str, file: str, old: str, new: str, occurrence: int = 0) -> Path:
    """A copy of the sources with one occurrence of ``old`` replaced by ``new``."""

    def change(copy: Path) -> None:
        shutil.copytree(SOURCES, copy)
        pieces = (copy / file).read_text().split(old)
        assert len(pieces) > occurrence + 1, f"{file} has no `{old}` number {occurrence}"
        (copy / file).write_text(old.join(pieces[: occurrence + 1]) + new + old.join(pieces[occurrence + 1 :]))

    return _once(name, change)


def program(sanitizer: str, sources: Path = SOURCES) -> Path:
    """The harness as a program under ``plain``, ``address`` (with undefined behaviour) or ``thread``."""
    return _harness(f"{sources.name}-{sanitizer}", sources, *SANITIZERS[sanitizer])


def library() -> Path:
    """The harness as a library."""
    return _harness("library.so", SOURCES, "-shared", "-fPIC")


def _harness(name: str, sources: Path, *flags: str) -> Path:
    command = ["g++", "-std=c++20", "-O1", "-g", "-pthread", "-Wall", "-Werror", "-Wno-unknown-pragmas", *flags]
    return _compile(name, *command, f"-I{sources}", SHIM / "harness.cpp")


def ptx(sources: Path = SOURCES) -> str:
    """PTX of the kernels, from nvcc."""
    command = ["nvcc", "-O3", "-std=c++17", "-arch=sm_90", "-ptx", f"-I{sources}"]
    return _compile(f"{sources.name}.ptx", *command, SHIM / "kernels.cu").read_text()


def object_file(name: str) -> Path:
    """A source as it is shipped, compiled for all architectures against this torch's headers."""
    include = Path(torch.__file__).parent / "include"
    # TORCH_TARGET_VERSION: the stable ABI of torch 2.11
    options = ["-O3", "-std=c++17", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000ULL", "-Xcompiler", "-fPIC"]
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHITECTURES]
    return _compile(f"{name}.o", "nvcc", *options, *targets, f"-I{include}", "-c", SOURCES / f"{name}.cu")
