"""Progress of a run on stderr, its results on stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..audit.summary import SUMMARY_WIDTH, summary_table

if TYPE_CHECKING:
    from ..audit.equivalence import Report
    from ..audit.results import AuditReport, RunAudit
    from ..result import GenerationStats


class PlainDisplay:
    """A line per event, for logs and pipes."""

    def message(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def begin(self, task: str, done: int, total: int) -> None:
        self._task, self._done, self._total = task, done, total

    def advance(self) -> None:
        self._done += 1

    def update(self, stats: GenerationStats) -> None:
        """New counters in the middle of a batch; a log does without them."""

    def end_of_batch(self, note: str = "") -> None:
        self.message(f"{self._task} {self._done}/{self._total}{note and ', '}{note}")

    def close(self) -> None:
        """Nothing is left on the screen."""


class TerminalDisplay:
    """A progress bar with the running rate and acceptance."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._progress: Progress | None = None

    def message(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, task: str, done: int, total: int) -> None:
        self.close()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=self._console)
        self._progress.start()
        self._id = self._progress.add_task(task, completed=done, total=total, note="")

    def advance(self) -> None:
        assert self._progress is not None
        self._progress.advance(self._id)

    def update(self, stats: GenerationStats) -> None:
        assert self._progress is not None
        self._progress.update(self._id, note=describe_rate(stats))

    def end_of_batch(self, note: str = "") -> None:
        """The bar shows it already."""

    def close(self) -> None:
        if self._progress:
            self._progress.stop()


Display = PlainDisplay | TerminalDisplay


def open_display() -> Display:
    return TerminalDisplay() if sys.stderr.isatty() else PlainDisplay()


def describe_rate(stats: GenerationStats) -> str:
    acceptance = f", {stats.accepted / stats.drafted:.0%} of drafts accepted" if stats.drafted else ""
    return f"{stats.tokens} tokens, {stats.tokens_per_second:.1f} tokens/s{acceptance}"


def print_answers(rows: Iterable[dict[str, Any]]) -> None:
    """A table of shortened prompts and whole answers."""
    console = Console()
    if not console.is_terminal:
        console.width = 120
    table = Table("#", "prompt", "answer", show_lines=True)
    for row in rows:
        # as Text, since model output may look like markup
        prompt = Text(" ".join(row["prompt"].split()))
        prompt.truncate(60, overflow="ellipsis")
        table.add_row(str(row["index"]), prompt, Text(row.get("error") or row["text"].strip()))
    console.print(table)


def print_summary(stats: GenerationStats, rows: int, resumed: int) -> None:
    """Counters and times of a run."""
    kept = f" ({resumed} from an earlier run)" if resumed else ""
    print(
        f"{rows} prompts{kept}, {stats.tokens} tokens in {stats.seconds:.1f} s: {stats.tokens_per_second:.1f} tokens/s"
    )
    print(
        f"{stats.rounds} rounds, {stats.drafted} tokens drafted, {stats.accepted} accepted: "
        f"{stats.mean_accepted:.2f} per row and round"
    )
    stages = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in stats.stage_seconds.items())
    print(f"{stages}; {stats.bytes_moved / 1e6:.1f} MB of KV cache moved")


def print_check(report: Report, num_prompts: int) -> None:
    """Match with the target alone, and every row that differs."""
    if not report.rows:
        print(f"check: none of {num_prompts} prompts has a text to compare")
        return
    band = f" (less than {2 * report.noise:.2g} logits apart)" if report.noise else ""
    left_out = f" (of {len(report.rows)} of {num_prompts} prompts, the rest failed)"
    print(
        f"check: {report.exact_match:.1%} exact match, {report.partial_match:.1%} partial match, "
        f"{report.near_ties} near-ties{band}, {report.mismatches} mismatches"
        + (left_out if len(report.rows) < num_prompts else "")
    )
    if report.weakness:
        print(report.weakness)
    for row in report.rows:
        if not row.exact:
            kind = "near-tie" if row.near_tie else "MISMATCH"
            gap = "" if row.gap is None else f", logit gap {row.gap:.2g}, noise {report.noise:.2g}"
            print(f"  prompt {row.index}: {kind} at token {row.first_divergence}{gap}")


def print_audit(report: AuditReport) -> None:
    """A line per candidate and batch size, never a rate without its verdict; then the evidence."""
    console = Console()
    if not console.is_terminal:
        console.width = SUMMARY_WIDTH
    if report.runs:
        console.print(summary_table(report.runs, report.unit))
    if report.unit != "token ids":
        print(f"compared by {report.unit}: the server returns no token ids")
    if report.weakness:
        print(report.weakness)
    for run in report.runs:
        _print_findings(run)


def _print_findings(run: RunAudit) -> None:
    name = f"{run.candidate}, B={run.batch_size}"
    if run.probe:
        if run.probe.checked:
            print(f"{name}, probe: {run.probe.violation or 'no violation'} ({run.probe.checked} forwards checked)")
        else:
            print(f"{name}, probe: saw no forward of the target, so it says nothing; does the candidate load its own?")
        if run.probe.draft_violation:
            print(f"{name}, draft: {run.probe.draft_violation}")
        if run.probe.accepted is not None and run.probe.accepted_alone is not None:
            share = f"{run.probe.accepted:.1%} of drafts accepted"
            print(f"{name}: {share}, {run.probe.accepted_alone:.1%} by a correct decoder")
    for row in run.rows:
        if row.near_tie:
            print(f"{name}: prompt {row.index} is a near-tie at token {row.first_divergence}, logit gap {row.gap:.2g}")
    # a guess adds nothing to what was measured
    for suspect in [] if run.violation else run.diagnosis[:2]:
        explained = f"would explain {suspect.explained} of {run.mismatches} wrong rows"
        print(f"{name}, a guess from the outputs: {suspect.name}, {explained}: {'; '.join(suspect.evidence)}")
        print(f"  refuted if {suspect.refuted_by}")
