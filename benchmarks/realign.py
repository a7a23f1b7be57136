"""Cost of realigning the KV cache after a round, beside the published approach and a plain copy.

python -m benchmarks.realign --quick --json benchmarks/results/realign_cpu.json
python -m benchmarks.realign --check
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track

from specdec_fast import reference

from .harness import DispatchCounter, Ratio, alternate, environment, ratio, write_csv, write_json
from .realign_methods import CENTRE, Aligned, Batch, Case, Commit, Judged, gather, kernels, naive, roll
from .realign_report import plot, show

Key = tuple[str, str]
Method = Callable[[Batch, Judged], Aligned]
Record = dict[str, Any]

LAYOUTS = {"minimal": 0, "packed": 1}
NAIVE, FLOOR = ("torch", "naive"), ("torch", "copy")
BASELINES: dict[Key, Method] = {NAIVE: naive, ("torch", "gather"): gather, ("torch", "roll"): roll}

GATED = [replace(CENTRE, batch_size=rows) for rows in (2, 8, 32)]
SWEEP = [
    *(replace(CENTRE, batch_size=rows) for rows in (1, 2, 4, 8, 16, 32, 64)),
    *(replace(CENTRE, content=content) for content in (128, 256, 1024, 2048)),
    *(replace(CENTRE, spread=spread) for spread in (0, 1, 3)),
]
# a timed sample is about this many, so that small batches see many verdicts
COLUMNS = 32 * 512
SHARE_DRAWS, LAG_DRAWS = 500, 20_000

MIN_SPEEDUP, MAX_OVER_FLOOR = 2.5, 1.25
MAX_SHARE = {8: 0.75, 32: 0.85}


def measure(case: Case, steps: dict[str, Callable[..., None]], device: torch.device, repeats: int) -> list[Record]:
    """Check every method on ``case``, then time them in turns; one record for each."""
    commits = {(name, layout): Commit(step, code) for name, step in steps.items() for layout, code in LAYOUTS.items()}
    methods: dict[Key, Method] = commits | BASELINES
    generator = np.random.default_rng(0)
    batch = Batch(case, device)
    verdicts = batch.verdicts(generator, max(1, COLUMNS // (case.batch_size * case.content)))
    many = batch.verdicts(generator, SHARE_DRAWS)
    counts = check_and_count(methods, batch, verdicts)
    least = columns_written(Commit(reference.realign_step_, LAYOUTS["minimal"]), case, verdicts)
    seconds = time_in_turns(methods, batch, verdicts, copy_of(least * case.bytes_per_column, device), repeats)
    of_case = asdict(case) | {
        "floor_ms": median_ms(seconds[FLOOR]),
        "naive_ms": median_ms(seconds[NAIVE]),
        "valid_bytes": int(valid_columns(case, verdicts).mean() * case.bytes_per_column),
        **acceptance_lag(case, generator),
    }
    records = []
    for key, method in methods.items():
        own = {
            "backend": key[0],
            "method": key[1],
            "median_ms": median_ms(seconds[key]),
            "bytes_moved": int(columns_written(method, case, verdicts).mean() * case.bytes_per_column),
            "share_moved": columns_written(method, case, many).sum() / valid_columns(case, many).sum(),
            "ops": counts[key][0],
            "syncs": counts[key][1],
            **flat("speedup", ratio(seconds[NAIVE], seconds[key])),
            # a copy of nothing is no floor
            **flat("over_floor", ratio(seconds[key], seconds[FLOOR]) if least.any() else None),
        }
        records.append(own | of_case)
    return records


def check_and_count(methods: dict[Key, Method], batch: Batch, verdicts: list[Judged]) -> dict[Key, tuple[int, int]]:
    """Operators and host reads of every method, the most of any verdict.

    A bit that differs from the reference ends the benchmark.
    """
    counts = dict.fromkeys(methods, (0, 0))
    truth = Batch(batch.case, batch.device)
    for verdict in verdicts:
        truth.fill()
        expected = Commit(reference.realign_step_, LAYOUTS["minimal"])(truth, verdict)
        columns = (batch.length + verdict.n_accepted).tolist()
        for key, method in methods.items():
            batch.fill()
            with DispatchCounter() as counter:
                aligned = method(batch, verdict)
            same = same_content(aligned, expected, columns)
            if isinstance(method, Commit):
                same = same and same_metadata(batch, verdict, method.placement)
            if not same:
                raise RuntimeError(f"{' '.join(key)} differs from the reference on {batch.case}")
            counts[key] = max(counts[key], (counter.ops, counter.syncs))
    return counts


def same_content(aligned: Aligned, expected: Aligned, columns: list[int]) -> bool:
    places = list(zip(aligned.start.tolist(), expected.start.tolist(), columns, strict=True))
    return all(
        torch.equal(x[row, :, a : a + count], y[row, :, e : e + count])
        for x, y in zip(aligned.caches, expected.caches, strict=True)
        for row, (a, e, count) in enumerate(places)
    )


def same_metadata(batch: Batch, verdict: Judged, placement: int) -> bool:
    truth = Batch(replace(batch.case, layers=0), batch.device)
    truth.fill()
    Commit(reference.realign_step_, placement)(truth, verdict)
    return all(map(torch.equal, batch.metadata, truth.metadata))


def columns_written(method: Method, case: Case, verdicts: list[Judged]) -> np.ndarray:
    """KV columns that ``method`` writes after each verdict: those that change in place, or all of a new cache."""
    # what it writes does not depend on layers, heads and dim
    thin = Batch(replace(case, layers=1, heads=1, head_dim=1), verdicts[0].n_accepted.device)
    thin.fill()
    before = thin.caches[0].clone()
    counts = []
    for verdict in verdicts:
        thin.fill()
        after = method(thin, verdict).caches[0]
        counts.append((after != before).sum().item() if after is thin.caches[0] else after.numel())
    return np.array(counts)


def valid_columns(case: Case, verdicts: list[Judged]) -> np.ndarray:
    return np.array([case.batch_size * case.content + v.n_accepted.sum().item() for v in verdicts])


def acceptance_lag(case: Case, generator: np.random.Generator) -> Record:
    """E[max n - n_b], and the K - mu it approaches in large batches (paper, appendix B)."""
    n = case.draw(generator, LAG_DRAWS)
    return {"lag": (n.max(1, keepdims=True) - n).mean(), "lag_limit": case.num_drafts - n.mean()}


def copy_of(sizes: np.ndarray, device: torch.device) -> Callable[[], None]:
    """Plain copies of ``sizes`` bytes."""
    source = torch.ones(int(sizes.max()), dtype=torch.uint8, device=device)
    target = source.clone()

    def copy() -> None:
        for size in sizes:
            target[:size].copy_(source[:size])

    return copy


def time_in_turns(
    methods: dict[Key, Method], batch: Batch, verdicts: list[Judged], floor: Callable[[], None], repeats: int
) -> dict[Key, list[float]]:
    """Seconds per verdict of every method, and of ``floor``."""

    def run(method: Method) -> None:
        for verdict in verdicts:
            method(batch, verdict)

    seconds = defaultdict(list)
    candidates = {key: partial(run, method) for key, method in methods.items()} | {FLOOR: floor}
    for key, taken, _ in alternate(candidates, repeats, batch.device):
        seconds[key].append(taken / len(verdicts))
    return seconds


def median_ms(seconds: list[float]) -> float:
    return 1000 * float(np.median(seconds))


def flat(name: str, measured: Ratio | None) -> Record:
    low, middle, high = (measured.low, measured.median, measured.high) if measured else (None,) * 3
    return {name: middle, f"{name}_low": low, f"{name}_high": high}


def failures(record: Record) -> list[str]:
    """Bounds that a record misses; a time misses one only with its whole interval."""
    rows, share = record["batch_size"], record["share_moved"]
    max_share = MAX_SHARE.get(rows, 1.0)
    slow, over = record["speedup_high"] < MIN_SPEEDUP, record["over_floor_low"] > MAX_OVER_FLOOR
    missed = {
        f"{record['speedup']:.2f}x faster than naive, need {MIN_SPEEDUP}x": slow,
        f"{record['over_floor']:.2f}x the floor, allowed {MAX_OVER_FLOOR}x": over,
        f"{share:.0%} of valid bytes moved, allowed {max_share:.0%}": share > max_share,
        f"{record['ops']} operators, need 1": record["ops"] != 1,
        f"{record['syncs']} host reads, need 0": record["syncs"] != 0,
    }
    return [f"B={rows}: {text}" for text, is_missed in missed.items() if is_missed]


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Only content 512 and B = 2, 8, 32.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Exit status 1 if the cpu backend misses a bound there.")
    ] = False,
    repeats: Annotated[int, typer.Option(min=7)] = 7,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
    csv_path: Annotated[Path | None, typer.Option("--csv")] = None,
    png_path: Annotated[Path | None, typer.Option("--png")] = None,
) -> None:
    """Compare every backend that can run with the published approach, a gather, torch.roll and a plain copy."""
    target = torch.device(device)
    steps = kernels(target)
    if check and "cpu" not in steps:
        raise typer.BadParameter("--check needs the compiled cpu backend")
    cases = track(GATED if quick or check else SWEEP, console=Console(stderr=True))
    where = environment(target) | {"torch": torch.__version__}
    where = {name: where[name] for name in ("device", "threads", "commit", "torch")}
    records = [record | where for case in cases for record in measure(case, steps, target, repeats)]
    show(records)
    for path, write in ((json_path, write_json), (csv_path, write_csv), (png_path, plot)):
        if path:
            write(path, records)
    if check:
        require_bounds(records)


def require_bounds(records: list[Record]) -> None:
    gated = [record for record in records if (record["backend"], record["method"]) == ("cpu", "minimal")]
    missed = [text for record in gated for text in failures(record)]
    for text in missed or ["every bound is kept"]:
        typer.echo(text)
    if missed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
