"""Alternating runs, ratios with an interval, and the record of where they were measured."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

PACKAGES = ("specdec-fast", "torch", "transformers", "triton")


@dataclass
class Ratio:
    """Ratio of two medians with a bootstrap 95 % interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f}x [{self.low:.2f}, {self.high:.2f}]"


def alternate(
    candidates: dict[str, Callable[[], Any]], repeats: int, device: torch.device
) -> Iterator[tuple[str, float, Any]]:
    """Run every candidate once per repeat, in rotating order; yields name, seconds and what the candidate returned.

    A first, unmeasured pass warms up every candidate.
    """
    names = list(candidates)
    for repeat in range(-1, repeats):
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            _synchronize(device)
            began = time.perf_counter()
            outcome = candidates[name]()
            _synchronize(device)
            if repeat >= 0:
                yield name, time.perf_counter() - began, outcome


def ratio(numerator: list[float], denominator: list[float], samples: int = 10_000) -> Ratio:
    """Median of ``numerator`` over median of ``denominator``."""
    generator = np.random.default_rng(0)

    def medians(values: list[float]) -> np.ndarray:
        picks = generator.integers(len(values), size=(samples, len(values)))
        return np.median(np.asarray(values)[picks], axis=1)

    low, high = np.quantile(medians(numerator) / medians(denominator), [0.025, 0.975])
    return Ratio(float(np.median(numerator) / np.median(denominator)), float(low), float(high))


def environment(device: torch.device) -> dict[str, Any]:
    """Where a number comes from: device, threads, versions, commit."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    versions = {}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": git.stdout.strip() or None,
    }


def write_json(path: Path, record: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")


def _processor() -> str:
    return torch.cpu.get_capabilities().get("cpu_name") or platform.processor() or platform.machine()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
