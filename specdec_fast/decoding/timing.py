"""Time per stage, without adding a synchronisation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..result import STAGES


class StageClock:
    """Adds up the time of named stages: wall time on a CPU, event time on a CUDA device."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        if self._cuda:
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            yield
            last.record()
            self._events.append((name, first, last))
        else:
            began = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - began

    def seconds(self) -> dict[str, float]:
        """Totals by stage; waits for the device."""
        for name, first, last in self._events:
            last.synchronize()
            self._seconds[name] += first.elapsed_time(last) / 1000
        self._events.clear()
        return dict(self._seconds)
