"""EXSPEC beside EQSPEC on a stream of mixed prompts: tokens per second and rounds per row.

    python -m benchmarks.stream --quick

Methods alternate in one process; every output is compared with the target's own before a time is printed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from specdec_fast import EQSpec, EXSpec, NgramDrafter

from .generate import Answers, Bench, show
from .harness import alternate, environment, ratio, write_json
from .simulation import percentile

OPENINGS = ("", "In one sentence: ", "Explain step by step. ")
Run = Callable[[], tuple[Answers, list[int]]]


def exspec(bench: Bench, batch_size: int, k: int) -> Run:
    """Answers in the order of the prompts, and the rounds from a row's first to its last."""
    decoder = EXSpec(bench.model, NgramDrafter(), batch_size=batch_size, num_draft_tokens=k)
    limits = {key: bench.limits[key] for key in ("max_new_tokens", "eos_token_id")}

    def run() -> tuple[Answers, list[int]]:
        rows = decoder.generate_all(bench.encoded, **limits)
        return [row.token_ids for row in rows], [row.record.ended - row.record.started + 1 for row in rows]

    return run


def eqspec(bench: Bench, batch_size: int, k: int, layout: str) -> Run:
    """The same; of a batch's rounds, the first runs its prompts."""
    decoder = EQSpec(bench.model, NgramDrafter(), num_draft_tokens=k, layout=layout)

    def run() -> tuple[Answers, list[int]]:
        results = [decoder.generate(*batch, **bench.limits) for batch in bench.batches(batch_size)]
        rows = [row for result in results for row in result.rows]
        return [row.token_ids for row in rows], [row.rounds + 1 for row in rows]

    return run


def main(
    target: Annotated[str, typer.Option(help="As in `specdec-fast generate`.")] = "smollm2",
    prompts: Annotated[str, typer.Option(metavar="FILE")] = "examples/prompts.jsonl",
    k: Annotated[int, typer.Option("--num-draft-tokens", min=1)] = 5,
    batch_size: Annotated[int, typer.Option(min=2)] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    dtype: Annotated[str, typer.Option()] = "auto",
    device: Annotated[str, typer.Option()] = "auto",
    repeats: Annotated[int, typer.Option(min=7, help="Runs of each method.")] = 7,
    quick: Annotated[bool, typer.Option("--quick", help="8 prompts, B = 4 and 8 new tokens.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="FILE")] = None,
) -> None:
    """Compare EXSPEC with EQSPEC; exit status 1 if an output is wrong, EXSPEC slower, or its P99 above 1.5 times."""
    rows, size, new = (8, min(batch_size, 4), min(max_new_tokens, 8)) if quick else (96, batch_size, max_new_tokens)
    bench = Bench(target, rows, 1, prompts, dtype, device, new, OPENINGS)
    runs: dict[str, Run] = {"exspec, ragged": exspec(bench, size, k)}
    runs |= {f"eqspec, {layout}": eqspec(bench, size, k, layout) for layout in ("ragged", "padded")}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    outcomes: dict[str, tuple[Answers, list[int]]] = {}
    for name, taken, outcomes[name] in alternate(runs, repeats, bench.model.device):
        seconds[name].append(taken)
    records: dict[str, dict[str, Any]] = {}
    for name, (answers, rounds) in outcomes.items():
        percentiles = {f"p{percent}_rounds": percentile(rounds, percent) for percent in (50, 90, 99)}
        records[name] = bench.record(answers, seconds[name], size) | percentiles
    ours, *theirs = runs
    speedups = {
        f"{ours} / {name}": ratio(records[ours]["tokens_per_second"], records[name]["tokens_per_second"])
        for name in theirs
    }
    show(records, speedups)
    for name, record in records.items():
        shown = ", ".join(f"P{percent} {record[f'p{percent}_rounds']}" for percent in (50, 90, 99))
        Console().print(f"{name}: rounds of a row {shown}", highlight=False)
    if json_path:
        facts = {"dtype": str(bench.model.dtype).removeprefix("torch."), "num_draft_tokens": k, "max_new_tokens": new}
        shape = {"prompts": rows, "batch_size": size}
        ratios = {label: vars(speedup) for label, speedup in speedups.items()}
        write_json(
            json_path, environment(bench.model.device) | facts | shape | {"methods": records, "speedups": ratios}
        )
    wrong = any(record["mismatches"] for record in records.values())
    slower = any(speedup.high < 1 for speedup in speedups.values())
    late = records[ours]["p99_rounds"] > 1.5 * max(records[name]["p99_rounds"] for name in theirs)
    raise typer.Exit(int(wrong or slower or late))


if __name__ == "__main__":
    typer.run(main)
