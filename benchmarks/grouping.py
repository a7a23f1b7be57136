"""Grouping rate, bytes moved and latency of every scheduling policy, simulated (paper, Figure 5, Table 5, appendix E).

python -m benchmarks.grouping --quick --json benchmarks/results/grouping.json
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from specdec_fast.scheduler import Scheduler

from .grouping_report import Record, plot, show
from .harness import write_json
from .simulation import POLICIES, Trace, Traffic, percentile, simulate

# SmolLM2-135M in bfloat16: 30 layers, keys and values, 3 heads of 64
BYTES_PER_COLUMN = 30 * 2 * 3 * 64 * 2
TRAFFIC = {
    "random": Traffic(prompt_lengths=(16, 256), max_new_tokens=128, mean_new_tokens=96),
    "identical": Traffic(prompt_lengths=(16, 16), max_new_tokens=50, mean_new_tokens=math.inf),
}
QUICK_SIZES, QUICK_WINDOWS = (2, 8, 32), (1, 4, 16)
SIZES, WINDOWS = (1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8, 16)
# share of what per-batch decoding can serve
LOAD = 0.7
TURNS = 4
ONLINE_SIZE, ONLINE_ROWS = 8, 1024


@dataclass(frozen=True)
class Case:
    """One simulation; ``window`` in batch sizes."""

    policy: str
    batch_size: int
    window: int
    lengths: str
    arrivals: str = "offline"

    @property
    def layout(self) -> str:
        return "ragged" if self.policy == "age" else "padded"

    @property
    def traffic(self) -> Traffic:
        return replace(TRAFFIC[self.lengths], turns=TURNS if self.arrivals == "multi-turn" else 1)

    def run(self, arrival_rate: float | None = None) -> Trace:
        """Simulate it; without a rate all rows are there from the start."""
        traffic = self.traffic
        scheduler = Scheduler(
            batch_size=self.batch_size,
            window=self.window * self.batch_size,
            layout=self.layout,
            policy=POLICIES[self.policy],
            max_columns=traffic.max_columns,
        )
        # enough rows for a steady state, the same for every policy and window
        count = max(128, 32 * self.batch_size)
        if arrival_rate is None:
            return simulate(scheduler, traffic.jobs(count), traffic)
        return simulate(scheduler, traffic.jobs(ONLINE_ROWS // traffic.turns, 0, arrival_rate), traffic)

    def record(self, trace: Trace) -> Record:
        rounds = {f"p{percent}_rounds": percentile(trace.rounds_of_rows, percent) for percent in (50, 90, 99)}
        times = {f"p{percent}_time": round(percentile(trace.latencies, percent), 1) for percent in (50, 90, 99)}
        return {
            "policy": self.policy,
            "layout": self.layout,
            "batch_size": self.batch_size,
            "window": self.window * self.batch_size,
            "lengths": self.lengths,
            "arrivals": self.arrivals,
            "grouping_rate": round(trace.grouping_rate, 4),
            "realigns": trace.verify_calls - trace.grouped,
            "bytes_moved": trace.columns_moved * BYTES_PER_COLUMN,
            "verify_calls": trace.verify_calls,
            "mean_batch": round(trace.mean_batch, 3),
            **rounds,
            **times,
            "tokens": trace.tokens,
        }


def offline(sizes: tuple[int, ...], windows: tuple[int, ...]) -> Iterator[Case]:
    """Every policy on a set of prompts that are all there."""
    for lengths in TRAFFIC:
        for batch_size in sizes:
            for policy in POLICIES:
                # a batch that no row joins has no window
                for window in windows if policy != "per-batch" else windows[:1]:
                    yield Case(policy, batch_size, window, lengths)


def online() -> Iterator[tuple[Case, float]]:
    """Every policy under Poisson arrivals and conversations, with the arrival rate (paper, appendix E)."""
    for arrivals in ("poisson", "multi-turn"):
        baseline = Case("per-batch", ONLINE_SIZE, 1, "random", "poisson")
        trace = baseline.run()
        rate = LOAD * len(trace.records) / trace.time
        for policy in POLICIES:
            case = replace(baseline, policy=policy, window=1 if policy == "per-batch" else 4, arrivals=arrivals)
            yield case, rate / case.traffic.turns


def main(
    quick: Annotated[bool, typer.Option("--quick", help="B = 2, 8, 32 and W = B, 4B, 16B only.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
    png_path: Annotated[Path | None, typer.Option("--png")] = None,
) -> None:
    """Simulate every scheduling policy on the same rows: no model, no GPU, the same numbers on every machine."""
    sizes, windows = (QUICK_SIZES, QUICK_WINDOWS) if quick else (SIZES, WINDOWS)
    cases = [*((case, None) for case in offline(sizes, windows)), *online()]
    records = [case.record(case.run(rate)) for case, rate in track(cases, console=Console(stderr=True))]
    show(records)
    for path, write in ((json_path, write_json), (png_path, plot)):
        if path:
            write(path, records)


if __name__ == "__main__":
    typer.run(main)
