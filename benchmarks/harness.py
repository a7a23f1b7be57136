"""Alternating runs, ratios with an interval, counts, and the record of where they were measured."""

from __future__ import annotations

import csv
import functools
import importlib.metadata
import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PACKAGES = ("specdec-fast", "transformers", "triton")
READS = ("tolist", "numpy", "cpu", "item", "__bool__", "__int__", "__float__", "__index__", "nonzero")
READ_OPERATORS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


@dataclass
class Ratio:
    """Ratio of two medians with a bootstrap 95 % interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f}x [{self.low:.2f}, {self.high:.2f}]"


class DispatchCounter(TorchDispatchMode):
    """Counts the operators that reach the dispatcher (``ops``) and the reads that make the host wait (``syncs``).

    On a CPU some reads never reach the dispatcher, so the tensor methods are watched too. A read inside a read
    counts once.
    """

    def __init__(self):
        super().__init__()
        self.ops = self.syncs = self._depth = 0
        self._patches = ExitStack()

    def __enter__(self) -> DispatchCounter:
        for name in READS:
            self._patches.enter_context(mock.patch.object(Tensor, name, self._counting(getattr(Tensor, name))))
        return super().__enter__()

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops += 1
        self.syncs += self._depth == 0 and func in READ_OPERATORS
        return func(*args, **kwargs or {})

    def _counting(self, read: Callable) -> Callable:
        @functools.wraps(read)
        def counted(*args, **kwargs):
            self.syncs += self._depth == 0
            self._depth += 1
            try:
                return read(*args, **kwargs)
            finally:
                self._depth -= 1

        return counted


def alternate(
    candidates: dict[Any, Callable[[], Any]], repeats: int, device: torch.device
) -> Iterator[tuple[Any, float, Any]]:
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
    """Origin of a number: device, threads, versions, commit."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    # the build, which the metadata of PyPI's wheel does not name
    versions = {"torch": str(torch.__version__)}
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


def write_csv(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, records[0])
        writer.writeheader()
        writer.writerows(records)


def _processor() -> str:
    return torch.cpu.get_capabilities().get("cpu_name") or platform.processor() or platform.machine()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
