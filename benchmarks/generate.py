"""Tokens per second of EQSPEC beside transformers' assisted and batched greedy generation, with the same drafts.

    python -m benchmarks.generate --quick --json benchmarks/results/generate_cpu.json

Methods alternate in one process; every output is compared with the target's own before a time is printed.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig

from specdec_fast import EQSpec, NgramDrafter, SelfDrafter
from specdec_fast.audit.equivalence import EquivalenceCheck
from specdec_fast.audit.oracle import Oracle
from specdec_fast.decoding import autoregressive
from specdec_fast.drafters import Drafter
from specdec_fast.integrations import compat
from specdec_fast.models import load
from specdec_fast.prompts import encode, pad_left, read

from .harness import Ratio, alternate, environment, ratio, write_json

Answers = list[list[int]]
Method = Callable[[], Answers]


class Bench:
    """A target and ``rows`` of its prompts, or all; batch size 1 takes only every ``stride``-th, to keep a run short.

    Each of ``openings`` before each prompt of the file makes a prompt.
    """

    def __init__(
        self,
        target: str,
        rows: int | None,
        stride: int,
        prompts: str,
        dtype: str,
        device: str,
        max_new_tokens: int,
        openings: Sequence[str] = ("",),
    ):
        self.model, self.tokenizer = load(target, dtype=dtype, device=device)
        chosen = [replace(prompt, text=opening + prompt.text) for opening in openings for prompt in read(prompts)]
        if rows is not None:
            chosen = chosen[:: max(1, len(chosen) // rows)][:rows]
        self.encoded = encode(chosen, self.tokenizer, chat=bool(self.tokenizer.chat_template))
        self.stride = stride
        eos = compat.eos_ids(self.model, None)
        pad = compat.pad_id(self.model, self.tokenizer.pad_token_id, eos)
        self.limits = {"max_new_tokens": max_new_tokens, "eos_token_id": eos, "pad_token_id": pad}
        self.oracle = Oracle(self.model, **self.limits)

    def rows(self, batch_size: int) -> list[list[int]]:
        return self.encoded if batch_size > 1 else self.encoded[:: self.stride]

    def batches(self, batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        rows = self.rows(batch_size)
        for first in range(0, len(rows), batch_size):
            ids, mask = pad_left(rows[first : first + batch_size], self.limits["pad_token_id"])
            yield ids.to(self.model.device), mask.to(self.model.device)

    def eqspec(self, drafter: Drafter, batch_size: int, k: int) -> Method:
        decoder = EQSpec(self.model, drafter, num_draft_tokens=k)
        results = lambda: (decoder.generate(*batch, **self.limits) for batch in self.batches(batch_size))  # noqa: E731
        return lambda: [row.token_ids for result in results() for row in result.rows]

    def greedy(self, batch_size: int) -> Method:
        """transformers' own greedy search."""
        run = lambda batch: autoregressive.generate(self.model, *batch, **self.limits)  # noqa: E731
        return lambda: [row.token_ids for batch in self.batches(batch_size) for row in run(batch).rows]

    def assisted(self, assistant: Any, k: int) -> Method:
        """transformers' own assisted generation (``assistant=None``: prompt lookup), which takes one row at a time."""
        config = GenerationConfig(do_sample=False, **self.limits)
        options: dict[str, Any] = {}
        if assistant is None:
            config.prompt_lookup_num_tokens, config.max_matching_ngram_size = k, 3
        else:
            assistant.generation_config = copy.deepcopy(config)
            assistant.generation_config.num_assistant_tokens = k
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            # a fixed number of drafts, as EQSPEC makes; the default stops at the first unsure one
            assistant.generation_config.assistant_confidence_threshold = 0.0
            options["assistant_model"] = assistant

        def run() -> Answers:
            with autoregressive.no_generation_defaults(self.model), torch.inference_mode():
                return [
                    self.model.generate(ids, attention_mask=mask, generation_config=config, **options)[
                        0, ids.shape[1] :
                    ].tolist()
                    for ids, mask in self.batches(1)
                ]

        return run

    def record(self, answers: Answers, seconds: list[float], batch_size: int) -> dict[str, Any]:
        """Token rates and verdict of a method whose runs took ``seconds``."""
        tokens = sum(map(len, answers))
        rates = {"tokens": tokens, "tokens_per_second": [tokens / taken for taken in seconds]}
        return rates | self.verify(answers, batch_size)

    def verify(self, answers: Answers, batch_size: int) -> dict[str, Any]:
        check = EquivalenceCheck(self.oracle)
        for index, (prompt, tokens) in enumerate(zip(self.rows(batch_size), answers, strict=True)):
            check.add(index, prompt, tokens)
        report = check.report()
        keys = ("exact_match", "near_ties", "mismatches", "noise")
        return {key: getattr(report, key) for key in keys}


def main(
    target: Annotated[str, typer.Option(help="As in `specdec-fast generate`.")] = "smollm2",
    prompts: Annotated[str, typer.Option(metavar="FILE")] = "examples/prompts.jsonl",
    layers: Annotated[str, typer.Option(help="Layers of the self-draft.")] = "~14",
    k: Annotated[int, typer.Option("--num-draft-tokens", min=1)] = 5,
    batch_size: Annotated[int, typer.Option(min=2)] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    dtype: Annotated[str, typer.Option()] = "auto",
    device: Annotated[str, typer.Option()] = "auto",
    repeats: Annotated[int, typer.Option(min=7, help="Runs of each method.")] = 7,
    quick: Annotated[bool, typer.Option("--quick", help="8 prompts (2 at batch size 1) and 24 new tokens.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="FILE")] = None,
) -> None:
    """Compare tokens per second; exit status 1 if an output of ours is wrong or batch 1 is slower than assisted."""
    rows, stride, new = (8, 4, min(max_new_tokens, 24)) if quick else (32, 4, max_new_tokens)
    bench = Bench(target, rows, stride, prompts, dtype, device, new)
    self_draft = SelfDrafter.from_spec(bench.model, layers)
    batched = f"B={batch_size}"
    methods: dict[str, Method] = {
        "eqspec, n-gram, B=1": bench.eqspec(NgramDrafter(), 1, k),
        "assisted, n-gram, B=1": bench.assisted(None, k),
        "eqspec, layer subset, B=1": bench.eqspec(self_draft, 1, k),
        "assisted, layer subset, B=1": bench.assisted(self_draft.model, k),
        "greedy, B=1": bench.greedy(1),
        f"eqspec, n-gram, {batched}": bench.eqspec(NgramDrafter(), batch_size, k),
        f"greedy, {batched}": bench.greedy(batch_size),
    }
    pairs = [
        ("eqspec, n-gram, B=1", "assisted, n-gram, B=1"),
        ("eqspec, layer subset, B=1", "assisted, layer subset, B=1"),
        ("eqspec, n-gram, B=1", "greedy, B=1"),
        (f"eqspec, n-gram, {batched}", f"greedy, {batched}"),
    ]
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    answers: dict[str, Answers] = {}
    for name, taken, answers[name] in alternate(methods, repeats, bench.model.device):
        seconds[name].append(taken)
    records = {}
    for name, taken in seconds.items():
        records[name] = bench.record(answers[name], taken, 1 if name.endswith("B=1") else batch_size)
    speedups = {
        f"{ours} / {theirs}": ratio(records[ours]["tokens_per_second"], records[theirs]["tokens_per_second"])
        for ours, theirs in pairs
    }
    show(records, speedups)
    if json_path:
        facts = {"dtype": str(bench.model.dtype).removeprefix("torch."), "num_draft_tokens": k, "max_new_tokens": new}
        shown = {label: vars(speedup) for label, speedup in speedups.items()}
        write_json(json_path, environment(bench.model.device) | facts | {"methods": records, "speedups": shown})
    wrong = any(record["mismatches"] for name, record in records.items() if name.startswith("eqspec"))
    slower = any(speedup.high < 1 for label, speedup in speedups.items() if "/ assisted" in label)
    raise typer.Exit(int(wrong or slower))


def show(records: dict[str, dict[str, Any]], speedups: dict[str, Ratio], title: str | None = None) -> None:
    console = Console()
    profiled = any("outside_forwards" in record for record in records.values())
    columns = ["method", "tokens/s", *(["outside forwards"] if profiled else []), "exact", "near-ties", "mismatches"]
    table = Table(*columns, title=title)
    for name, record in records.items():
        cells = [name, f"{statistics.median(record['tokens_per_second']):.1f}"]
        if profiled:
            cells.append(f"{record['outside_forwards']:.1%}" if "outside_forwards" in record else "")
        counts = (str(record[key]) for key in ("near_ties", "mismatches"))
        table.add_row(*cells, f"{record['exact_match']:.0%}", *counts)
    console.print(table)
    noise = max(record["noise"] for record in records.values())
    console.print(f"near-ties: gaps of less than {2 * noise:.2g} logits, twice the noise of rounding", highlight=False)
    for label, speedup in speedups.items():
        console.print(f"{label}: {speedup}", highlight=False)


if __name__ == "__main__":
    typer.run(main)
