"""What the compilers make of the CUDA sources, built once a session."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "csrc" / "cuda"
SHIM = Path(__file__).parent / "shim"
ARCHITECTURES = (80, 90, 100)
SANITIZERS = {
    "plain": (),
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover"),
    "thread": ("-fsanitize=thread",),
}
HAS_NVCC = shutil.which("nvcc") is not None


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="specdec-fast-")


def directory(name: str) -> Path:
    """A folder that goes away with the session."""
    path = Path(_temporary().name) / name
    path.mkdir(exist_ok=True)
    return path


def mutant(name: str, file: str, old: str, new: str, occurrence: int = 0) -> Path:
    """A copy of the sources with one occurrence of ``old`` replaced by ``new``."""
    copy = Path(_temporary().name) / name
    shutil.copytree(SOURCES, copy, dirs_exist_ok=True)
    pieces = (copy / file).read_text().split(old)
    assert len(pieces) > occurrence + 1, f"{file} has no `{old}` number {occurrence}"
    text = old.join(pieces[: occurrence + 1]) + new + old.join(pieces[occurrence + 1 :])
    (copy / file).write_text(text)
    return copy


@functools.cache
def program(sanitizer: str, sources: Path = SOURCES) -> Path:
    """The harness as a program under ``plain``, ``address`` (with undefined behaviour) or ``thread``."""
    return _harness(directory(f"host-{sources.name}") / sanitizer, sources, *SANITIZERS[sanitizer])


@functools.cache
def library() -> Path:
    """The harness as a library."""
    return _harness(directory("host-library") / "harness.so", SOURCES, "-shared", "-fPIC")


def _harness(output: Path, sources: Path, *flags: str) -> Path:
    command = ["g++", "-std=c++20", "-O1", "-g", "-pthread", "-Wall", "-Werror", "-Wno-unknown-pragmas", *flags]
    subprocess.run([*command, f"-I{sources}", SHIM / "harness.cpp", "-o", output], check=True)
    return output


@functools.cache
def ptx(sources: Path = SOURCES) -> str:
    """PTX of the kernels, from nvcc."""
    output = directory(f"device-{sources.name}") / "kernels.ptx"
    command = ["nvcc", "-O3", "-std=c++17", "-arch=sm_90", "-ptx", f"-I{sources}", SHIM / "kernels.cu", "-o", output]
    subprocess.run(command, check=True)
    return output.read_text()


@functools.cache
def object_file(name: str) -> Path:
    """A source as it is shipped, compiled for all architectures against this torch's headers."""
    output = directory("objects") / f"{name}.o"
    include = Path(torch.__file__).parent / "include"
    # TORCH_TARGET_VERSION: the stable ABI of torch 2.11
    options = ["-O3", "-std=c++17", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000ULL", "-Xcompiler", "-fPIC"]
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHITECTURES]
    command = ["nvcc", *options, *targets, f"-I{include}", "-c", SOURCES / f"{name}.cu", "-o", output]
    subprocess.run(command, check=True)
    return output
