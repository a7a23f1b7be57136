"""Rates of found faults, right names and false alarms of the probe and the analysis of outputs.

    python -m benchmarks.audit_confusion --quick --json benchmarks/results/audit_confusion.json

Every run draws a tiny random model, prompts, a draft of random quality, batch size and K, and decodes with one
candidate: a correct strategy, a fault that the audit was built with, or one of the sets of held-out faults. A run
counts as faulty if one of its forward passes or answers differs from the correct decoder's, bit by bit; no audit
decides that.
"""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from specdec_fast import EQSpec, ModelDrafter, selfcheck
from specdec_fast.audit.candidates import resolve
from specdec_fast.audit.compare import CandidateRow, Run
from specdec_fast.audit.decoding import Judge, decode
from specdec_fast.audit.oracle import Oracle
from specdec_fast.audit.probed import ProbedRun
from specdec_fast.audit.setting import Setting
from specdec_fast.audit.strategies import CORRECT, FAULTS, MaskedHoles
from specdec_fast.audit.strategies.correct import PaddedEQSpec
from specdec_fast.audit.strategies.holes import HoleBatch
from specdec_fast.prompts import pad_left

from .harness import environment, write_json
from .held_out import FOURTH, HELD_OUT, SECOND, THIRD

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from tiny_models import DRAFT_NOISE, FAMILIES, VOCAB_SIZE, make_draft, make_model, make_prompts

SETS: dict[str, dict[str, type[EQSpec]]] = {
    "": CORRECT | FAULTS,
    "held_out_": HELD_OUT,
    "second_held_out_": SECOND,
    "third_held_out_": THIRD,
    "fourth_held_out_": FOURTH,
}
"""Candidates by what their scores' names begin with."""
BLIND = ("second_held_out_", "third_held_out_", "fourth_held_out_")


@dataclass
class Score:
    """Counts over runs; ``right_diagnosis`` is of the faulty runs that were detected."""

    runs: int = 0
    faulty: int = 0
    detected: int = 0
    right_diagnosis: int = 0
    clean: int = 0
    false_alarms: int = 0

    def add(self, faulty: bool, detected: bool, right: bool) -> None:
        self.runs += 1
        self.faulty += faulty
        self.detected += faulty and detected
        self.right_diagnosis += faulty and detected and right
        self.clean += not faulty
        self.false_alarms += detected and not faulty


@dataclass
class Scores:
    """Of both detectors, over all runs but those of the blind sets, and over each set of held-out faults alone.

    The detectors were corrected with the first set in view; the others have had no part in them.
    """

    probe: Score = field(default_factory=Score)
    outputs: Score = field(default_factory=Score)
    held_out_probe: Score = field(default_factory=Score)
    held_out_outputs: Score = field(default_factory=Score)
    second_held_out_probe: Score = field(default_factory=Score)
    second_held_out_outputs: Score = field(default_factory=Score)
    third_held_out_probe: Score = field(default_factory=Score)
    third_held_out_outputs: Score = field(default_factory=Score)
    fourth_held_out_probe: Score = field(default_factory=Score)
    fourth_held_out_outputs: Score = field(default_factory=Score)

    def add(self, of: str, probe: tuple[bool, bool, bool], outputs: tuple[bool, bool, bool]) -> None:
        for prefix in (of,) if of in ("", *BLIND) else ("", of):
            getattr(self, f"{prefix}probe").add(*probe)
            getattr(self, f"{prefix}outputs").add(*outputs)


@dataclass(frozen=True)
class Case:
    """One candidate of one of ``SETS`` in one random setting."""

    name: str
    of: str
    setting: Setting
    prompts: list[list[int]]
    batch_size: int

    @property
    def decoder(self) -> type[EQSpec] | None:
        return SETS[self.of].get(self.name)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names that the probe may give to what it finds first; empty where every pass of the target is right."""
        kind = getattr(self.decoder, "kind", None)
        return (kind,) if kind else getattr(self.decoder, "kinds", ())

    @property
    def suspects(self) -> tuple[str, ...]:
        suspect = getattr(self.decoder, "suspect", None)
        return (suspect,) if suspect else getattr(self.decoder, "suspects", ())

    def candidate(self) -> Callable[..., None]:
        if not self.of:
            return resolve(self.name, self.setting)
        decoder = SETS[self.of][self.name](
            self.setting.target, self.setting.drafter, num_draft_tokens=self.setting.num_draft_tokens
        )
        return lambda ids, mask, finish: decoder.generate(ids, mask, **self.setting.limits, on_finish=finish) and None


def cases(runs: int, seed: int) -> Iterator[Case]:
    names = [("autoregressive", ""), *((name, of) for of, candidates in SETS.items() for name in candidates)]
    for number in range(runs):
        draw = random.Random(f"{seed} {number}")
        name, of = names[number % len(names)]
        family = "gemma3" if name == "short-window" else draw.choice(FAMILIES)
        target = make_model(family, draw.randrange(1000))
        draft = make_draft(target, DRAFT_NOISE[family] * draw.choice((0.3, 1, 2)), draw.randrange(1000))
        batch_size = draw.choice((2, 4, 8))
        lengths = [draw.randrange(1, 24) for _ in range(batch_size)]
        eos = draw.sample(range(3, VOCAB_SIZE), 3) if of or draw.random() < 0.5 else []
        setting = Setting(target, ModelDrafter(draft), draw.randrange(2, 7), draw.randrange(16, 33), eos, 0)
        yield Case(name, of, setting, make_prompts(lengths, draw.randrange(1000)), batch_size)


def answers_of(case: Case, candidate: Callable[..., None], **options: Any) -> list[CandidateRow]:
    found: dict[int, CandidateRow] = {}

    def keep(index: int, row: Any, seconds: float) -> None:
        found[index] = CandidateRow(row.token_ids, seconds, row.drafted, row.accepted)

    decode(candidate, case.setting, case.prompts, case.batch_size, keep, **options)
    return [found[index] for index in range(len(case.prompts))]


def trace(case: Case, decoder: type[EQSpec]) -> list[Any]:
    """All inputs and outputs of the target, and the answers."""
    setting, seen = case.setting, []
    run = decoder(setting.target, setting.drafter, num_draft_tokens=setting.num_draft_tokens)

    def record(_: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if selfcheck.running.get():
            return
        masks = kwargs["attention_mask"]
        masks = masks.values() if isinstance(masks, dict) else [masks]
        # buffers are written again in the next round
        seen.extend(x.clone() for x in (kwargs["input_ids"], kwargs["position_ids"], *masks, output.logits))

    rows: dict[int, list[int]] = {}
    hook = setting.target.register_forward_hook(record, with_kwargs=True)
    try:
        batch = pad_left(case.prompts, 0)
        run.generate(*batch, **setting.limits, on_finish=lambda row: rows.update({row.index: row.token_ids}))
    finally:
        hook.remove()
    return [*seen, rows]


def struck(case: Case) -> tuple[bool, bool]:
    """Two flags: the fault changed a forward pass of the target; it changed an answer."""
    if case.decoder is None or not (case.kinds or case.suspects):
        return False, False
    assert case.decoder.batch_type
    holes = issubclass(case.decoder.batch_type, HoleBatch)
    *right, right_rows = trace(case, MaskedHoles if holes else PaddedEQSpec)
    *found, found_rows = trace(case, case.decoder)
    # a run that ends early has made no pass that is wrong
    same = len(found) <= len(right) and all(torch.equal(a, b) for a, b in zip(right, found))
    return not same, right_rows != found_rows


def run_case(case: Case, scores: Scores) -> dict[str, Any]:
    passes_differ, answers_differ = struck(case)
    with ProbedRun(case.setting) as probed:
        answers = answers_of(case, case.candidate(), probe=probed.target)
    judge = Judge(case.setting, Oracle(case.setting.target, **case.setting.limits), case.prompts)
    run = judge.run(Run(case.name, case.batch_size), case.candidate(), answers)
    violation = probed.violation(answers)
    suspect = run.diagnosis[0].name if run.diagnosis else None
    probe = (
        bool(case.kinds) and (passes_differ or answers_differ),
        violation is not None,
        bool(violation and violation.kind in case.kinds),
    )
    outputs = (answers_differ, run.mismatches > 0, suspect in case.suspects)
    scores.add(case.of, probe, outputs)
    found = {"violation": str(violation) if violation else None, "suspect": suspect, "mismatches": run.mismatches}
    return {"candidate": case.name, "probe": probe, "outputs": outputs, **found}


def main(
    runs: Annotated[int, typer.Option(min=1, help="Runs, each of one candidate in one setting.")] = 400,
    seed: Annotated[int, typer.Option(help="Of every random choice.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="80 runs.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="FILE")] = None,
) -> None:
    """Score the audit; exit status 1 on a false alarm, or on a fault that the probe misses or misnames.

    Only false alarms count in the second, third and fourth set of held-out faults.
    """
    torch.set_num_threads(1)
    total = 80 if quick else runs
    scores, records = Scores(), []
    for case in track(cases(total, seed), total=total, description="runs", disable=not sys.stderr.isatty()):
        records.append(run_case(case, scores))
    show(scores, records)
    if json_path:
        write_json(json_path, environment(torch.device("cpu")) | {"seed": seed, **asdict(scores), "records": records})
    probe = scores.probe
    false_alarms = sum(score.false_alarms for score in vars(scores).values())
    right = probe.right_diagnosis == probe.faulty and not false_alarms
    raise typer.Exit(int(not right))


def show(scores: Scores, records: list[dict[str, Any]]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table("detector", *Score.__dataclass_fields__)
    for name, score in vars(scores).items():
        table.add_row(name.replace("_", " "), *map(str, vars(score).values()))
    console.print(table)
    by_candidate: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        by_candidate[record["candidate"]].append(record)
    table = Table(
        "candidate", "probe: faulty", "named right", "outputs: faulty", "diagnosed right", "first other finding"
    )
    for name, group in by_candidate.items():
        counts = [
            f"{sum(all(r[detector]) if right else r[detector][0] for r in group)}"
            for detector in ("probe", "outputs")
            for right in (False, True)
        ]
        other = next((r["violation"] for r in group if r["violation"] and not all(r["probe"])), "")
        table.add_row(name, *counts, other[:60])
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
