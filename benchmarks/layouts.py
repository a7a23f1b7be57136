"""The ragged layout beside the padded one and transformers: tokens per second against batch size and prompt lengths.

    python -m benchmarks.layouts --quick --json layouts.json

Methods alternate in one process; every output is compared with the target's own before a time is printed.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import PreTrainedModel

from specdec_fast import EQSpec, NgramDrafter, SelfDrafter
from specdec_fast.drafters import Drafter
from specdec_fast.errors import InputError

from .generate import Answers, Bench, show
from .harness import Ratio, alternate, environment, ratio, write_json

LAYOUTS = ("ragged", "padded")
Profiled = Callable[[], tuple[Answers, float]]


def with_lengths(bench: Bench, lengths: str, rows: int) -> Bench:
    """``rows`` of the prompts: the ``uniform`` ones are the shortest, the ``mixed`` ones range from short to long."""
    order = sorted(range(len(bench.encoded)), key=lambda i: len(bench.encoded[i]))
    if rows > len(order):
        raise InputError(f"a batch of {rows} needs as many prompts; the file has {len(order)}")
    last = len(order) - 1
    picked = order[:rows] if lengths == "uniform" else [order[last * i // (rows - 1)] for i in range(rows)]
    chosen = copy.copy(bench)
    # in the order of the file, so that no batch is of one length
    chosen.encoded = [bench.encoded[i] for i in sorted(picked)]
    # transformers' assisted generation takes one row at a time, so four tell its speed
    chosen.stride = max(1, rows // 4)
    return chosen


@contextmanager
def forward_seconds(*models: PreTrainedModel) -> Iterator[list[float]]:
    """Collects the seconds of each forward of ``models``."""
    seconds: list[float] = []
    began: list[float] = []

    def end(*_: Any) -> None:
        start = began.pop()
        # a layer subset shares the hooks of its target, so they run twice
        if not began:
            seconds.append(time.perf_counter() - start)

    with ExitStack() as hooks:
        for model in models:
            hooks.callback(model.register_forward_pre_hook(lambda *_: began.append(time.perf_counter())).remove)
            hooks.callback(model.register_forward_hook(end).remove)
        yield seconds


def profiled(bench: Bench, drafter: Drafter, batch_size: int, k: int, layout: str) -> Profiled:
    """EQSPEC, and the share of its rounds, prompts left out, that is spent outside of forwards."""
    decoder = EQSpec(bench.model, drafter, num_draft_tokens=k, layout=layout)

    def run() -> tuple[Answers, float]:
        answers, rounds, inside = [], 0.0, 0.0
        for batch in bench.batches(batch_size):
            with forward_seconds(bench.model, *drafter.models) as forwards:
                began = time.perf_counter()
                result = decoder.generate(*batch, **bench.limits)
                seconds = time.perf_counter() - began
            rounds += seconds - forwards[0]
            inside += sum(forwards[1:])
            answers += [row.token_ids for row in result.rows]
        return answers, 1 - inside / rounds

    return run


def compare(
    bench: Bench, lengths: str, batch_size: int, drafters: dict[str, Drafter], k: int, repeats: int
) -> dict[str, Any]:
    """All methods on the prompts of ``bench``, in turns."""
    ours = [(layout, name) for name in drafters for layout in LAYOUTS]
    methods: dict[str, Callable[[], Any]] = {
        f"{layout}, {name}": profiled(bench, drafters[name], batch_size, k, layout) for layout, name in ours
    }
    methods["greedy"] = bench.greedy(batch_size)
    for name, drafter in drafters.items():
        methods[f"assisted, {name}"] = bench.assisted(next(iter(drafter.models), None), k)
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    answers: dict[str, Answers] = {}
    outside: dict[str, list[float]] = {}
    for name, taken, outcome in alternate(methods, repeats, bench.model.device):
        seconds[name].append(taken)
        if name.startswith(LAYOUTS):
            answers[name], share = outcome
            outside.setdefault(name, []).append(share)
        else:
            answers[name] = outcome
    records: dict[str, dict[str, Any]] = {}
    for name, taken in seconds.items():
        records[name] = bench.record(answers[name], taken, 1 if name.startswith("assisted") else batch_size)
        if name in outside:
            records[name]["outside_forwards"] = statistics.median(outside[name])
    pairs = [(f"ragged, {name}", other) for name in drafters for other in (f"padded, {name}", "greedy")]
    pairs += [(f"ragged, {name}", f"assisted, {name}") for name in drafters]
    rates = {name: record["tokens_per_second"] for name, record in records.items()}
    return {
        "lengths": lengths,
        "batch_size": batch_size,
        "prompt_tokens": [len(row) for row in bench.encoded],
        "methods": records,
        "speedups": {f"{a} / {b}": vars(ratio(rates[a], rates[b])) for a, b in pairs},
    }


def main(
    target: Annotated[str, typer.Option(help="As in `specdec-fast generate`.")] = "smollm2",
    prompts: Annotated[str, typer.Option(metavar="FILE")] = "examples/prompts.jsonl",
    layers: Annotated[str, typer.Option(help="Layers of the self-draft.")] = "~14",
    k: Annotated[int, typer.Option("--num-draft-tokens", min=1)] = 5,
    batch_sizes: Annotated[str, typer.Option(metavar="B,...")] = "1,4,8,16",
    self_draft_at: Annotated[str, typer.Option(metavar="B,...", help="Where the self-draft takes part.")] = "8",
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 32,
    dtype: Annotated[str, typer.Option()] = "auto",
    device: Annotated[str, typer.Option()] = "auto",
    repeats: Annotated[int, typer.Option(min=7, help="Runs of each method.")] = 7,
    quick: Annotated[bool, typer.Option("--quick", help="B = 1 and 4, and 8 new tokens.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="FILE")] = None,
) -> None:
    """Compare layouts; exit status 1 if an output of ours is wrong or ragged is slower than padded."""
    sizes = [1, 4] if quick else [int(size) for size in batch_sizes.split(",")]
    drafted_sizes = {int(size) for size in self_draft_at.split(",")}
    new = min(max_new_tokens, 8) if quick else max_new_tokens
    bench = Bench(target, None, 1, prompts, dtype, device, new)
    n_gram: dict[str, Drafter] = {"n-gram": NgramDrafter()}
    both = n_gram | {"layer subset": SelfDrafter.from_spec(bench.model, layers)}
    facts = {"dtype": str(bench.model.dtype).removeprefix("torch."), "num_draft_tokens": k, "max_new_tokens": new}
    facts = environment(bench.model.device) | facts
    cells = []
    for lengths in ("uniform", "mixed"):
        for size in sizes:
            # at least four prompts, one by one if need be
            chosen = with_lengths(bench, lengths, max(size, 4))
            drafters = both if size in drafted_sizes else n_gram
            cells.append(compare(chosen, lengths, size, drafters, k, repeats))
            show_cell(cells[-1])
            if json_path:
                write_json(json_path, facts | {"cells": cells})
    wrong = any(
        record["mismatches"] for cell in cells for name, record in cell["methods"].items() if name.startswith(LAYOUTS)
    )
    slower = any(
        speedup["high"] < 1 for cell in cells for label, speedup in cell["speedups"].items() if "/ padded" in label
    )
    raise typer.Exit(int(wrong or slower))


def show_cell(cell: dict[str, Any]) -> None:
    shortest, longest = min(cell["prompt_tokens"]), max(cell["prompt_tokens"])
    title = f"B={cell['batch_size']}, {cell['lengths']} prompts of {shortest} to {longest} tokens"
    show(cell["methods"], {label: Ratio(**speedup) for label, speedup in cell["speedups"].items()}, title)


if __name__ == "__main__":
    typer.run(main)
