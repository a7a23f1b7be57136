"""Tokens per second of EQSPEC beside transformers' assisted and batched greedy generation, with the same draft.

python -m benchmarks.generate --quick --json benchmarks/results/generate_cpu.json
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig

from specdec_fast import EQSpec, NgramDrafter, SelfDrafter, autoregressive, compat
from specdec_fast.equivalence import EquivalenceCheck
from specdec_fast.models import load
from specdec_fast.prompts import encode, pad_left, read

from .harness import alternate, environment, ratio, write_json

Answers = list[list[int]]


class Bench:
    """The target, its prompts, and every way to continue them that is compared."""

    def __init__(
        self, target: str, prompts: str, layers: str, dtype: str, device: str, count: int, max_new_tokens: int
    ):
        self.model, self.tokenizer = load(target, dtype=dtype, device=device)
        chosen = read(prompts)
        # spread over the file, so that every kind of prompt takes part
        chosen = chosen[:: max(1, len(chosen) // count)][:count]
        self.encoded = encode(chosen, self.tokenizer, chat=bool(self.tokenizer.chat_template))
        eos = compat.eos_ids(self.model, None)
        self.limits = {
            "max_new_tokens": max_new_tokens,
            "eos_token_id": eos,
            "pad_token_id": compat.pad_id(self.model, self.tokenizer.pad_token_id, eos),
        }
        self.layers = SelfDrafter.from_spec(self.model, layers)

    def batches(self, batch_size: int):
        for first in range(0, len(self.encoded), batch_size):
            ids, mask = pad_left(self.encoded[first : first + batch_size], self.limits["pad_token_id"])
            yield ids.to(self.model.device), mask.to(self.model.device)

    def eqspec(self, drafter, batch_size: int, k: int) -> Callable[[], Answers]:
        decoder = EQSpec(self.model, drafter, num_draft_tokens=k)
        return lambda: [
            row.token_ids
            for ids, mask in self.batches(batch_size)
            for row in decoder.generate(ids, mask, **self.limits).rows
        ]

    def greedy(self, batch_size: int) -> Callable[[], Answers]:
        return lambda: [
            row.token_ids
            for ids, mask in self.batches(batch_size)
            for row in autoregressive.generate(self.model, ids, mask, **self.limits).rows
        ]

    def assisted(self, draft: str, k: int) -> Callable[[], Answers]:
        """transformers' own assisted generation, which takes one row at a time."""
        config = GenerationConfig(do_sample=False, **self.limits)
        options: dict[str, Any] = {}
        if draft == "ngram":
            config.prompt_lookup_num_tokens, config.max_matching_ngram_size = k, 3
        else:
            assistant = self.layers.model
            assistant.generation_config = copy.deepcopy(config)
            assistant.generation_config.num_assistant_tokens = k
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            # a fixed number of drafts, as EQSPEC makes; the default stops at the first unsure one
            assistant.generation_config.assistant_confidence_threshold = 0.0
            options["assistant_model"] = assistant

        def run() -> Answers:
            answers = []
            with autoregressive.no_generation_defaults(self.model), torch.inference_mode():
                for ids, mask in self.batches(1):
                    out = self.model.generate(ids, attention_mask=mask, generation_config=config, **options)
                    answers.append(out[0, ids.shape[1] :].tolist())
            return answers

        return run

    def verify(self, answers: Answers) -> dict[str, Any]:
        check = EquivalenceCheck(self.model, **self.limits)
        for index, (prompt, tokens) in enumerate(zip(self.encoded, answers, strict=True)):
            check.add(index, prompt, tokens)
        report = check.report()
        return {"exact_match": report.exact_match, "near_ties": report.near_ties, "mismatches": report.mismatches}


def main(
    target: Annotated[str, typer.Option()] = "smollm2",
    prompts: Annotated[str, typer.Option()] = "examples/prompts.jsonl",
    layers: Annotated[str, typer.Option(help="Layers of the self-draft.")] = "~14",
    k: Annotated[int, typer.Option("--num-draft-tokens")] = 5,
    batch_size: Annotated[int, typer.Option()] = 8,
    max_new_tokens: Annotated[int, typer.Option()] = 64,
    dtype: Annotated[str, typer.Option()] = "auto",
    device: Annotated[str, typer.Option()] = "auto",
    repeats: Annotated[int, typer.Option(min=7)] = 7,
    quick: Annotated[bool, typer.Option("--quick", help="8 prompts, 32 new tokens.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Compare in one alternating run; every output is checked before its time is printed."""
    count, max_new_tokens = (8, min(max_new_tokens, 32)) if quick else (32, max_new_tokens)
    bench = Bench(target, prompts, layers, dtype, device, count, max_new_tokens)
    candidates = {
        "eqspec ngram B=1": bench.eqspec(NgramDrafter(), 1, k),
        "assisted ngram B=1": bench.assisted("ngram", k),
        f"eqspec layers B={1}": bench.eqspec(bench.layers, 1, k),
        f"assisted layers B={1}": bench.assisted("layers", k),
        "greedy B=1": bench.greedy(1),
        f"eqspec ngram B={batch_size}": bench.eqspec(NgramDrafter(), batch_size, k),
        f"greedy B={batch_size}": bench.greedy(batch_size),
    }
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    answers: dict[str, Answers] = {}
    for name, taken, outcome in alternate(candidates, repeats, bench.model.device):
        seconds[name].append(taken)
        answers[name] = outcome
    verdicts = {name: bench.verify(tokens) for name, tokens in answers.items()}
    tokens = {name: sum(map(len, a)) for name, a in answers.items()}
    pairs = {
        "eqspec / assisted, n-gram, B=1": ("eqspec ngram B=1", "assisted ngram B=1"),
        "eqspec / assisted, layer subset, B=1": ("eqspec layers B=1", "assisted layers B=1"),
        "eqspec n-gram / greedy, B=1": ("eqspec ngram B=1", "greedy B=1"),
        f"eqspec n-gram / greedy, B={batch_size}": (f"eqspec ngram B={batch_size}", f"greedy B={batch_size}"),
    }
    per_token = {name: [t / tokens[name] for t in taken] for name, taken in seconds.items()}
    speedups = {label: ratio(per_token[slow], per_token[fast]) for label, (fast, slow) in pairs.items()}
    _show(per_token, verdicts, speedups)
    if json_path:
        record = {
            "environment": environment(bench.model.device) | {"dtype": str(bench.model.dtype)},
            "prompts": len(bench.encoded),
            "max_new_tokens": max_new_tokens,
            "num_draft_tokens": k,
            "methods": {
                name: {"tokens": tokens[name], "seconds": seconds[name], **verdicts[name]} for name in candidates
            },
            "speedups": {label: vars(r) for label, r in speedups.items()},
        }
        write_json(json_path, record)
    if any(verdict["mismatches"] for name, verdict in verdicts.items() if name.startswith("eqspec")):
        raise typer.Exit(1)


def _show(per_token, verdicts, speedups) -> None:
    console = Console()
    table = Table("method", "tokens/s", "exact", "near-ties", "mismatches")
    for name, taken in per_token.items():
        verdict = verdicts[name]
        rate = 1 / sorted(taken)[len(taken) // 2]
        table.add_row(
            name, f"{rate:.1f}", f"{verdict['exact_match']:.0%}", str(verdict["near_ties"]), str(verdict["mismatches"])
        )
    console.print(table)
    for label, speedup in speedups.items():
        console.print(f"{label}: {speedup}", highlight=False)


if __name__ == "__main__":
    typer.run(main)
