"""An audit in a few lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from .results import AuditReport, RowAudit, RunAudit, Unit

SUMMARY_WIDTH = 140
_SHOWN_ROWS = 5


def summary_table(runs: Iterable[RunAudit], unit: Unit = "token ids") -> Table:
    """Two lines per candidate and batch size, the second with the rate; it fits 80 columns."""
    rate = "characters/s" if unit == "characters" else "tokens/s"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("candidate", overflow="fold")
    table.add_column("B", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for name in ("exact", "partial", "near-ties", "mismatches"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        speed = "rate: probed" if run.tokens_per_second is None else f"{run.tokens_per_second:.1f} {rate}"
        table.add_row(
            run.candidate,
            str(run.batch_size),
            f"{run.verdict}\n{speed}",
            f"{run.exact_match:.1%}",
            f"{run.partial_match:.1%}",
            f"{run.near_ties}, {run.undecided} unknown" if run.undecided else str(run.near_ties),
            str(run.mismatches),
        )
    return table


def describe(report: AuditReport) -> str:
    """The table, and of each run that is not equivalent the first divergences."""
    console = Console(width=SUMMARY_WIDTH)
    with console.capture() as capture:
        console.print(summary_table(report.runs, report.unit))
    lines = [capture.get().strip("\n"), *filter(None, [report.weakness])]
    for run in report.runs:
        mismatches = [row for row in run.rows if not row.exact and not row.near_tie]
        lines += [_describe_row(run, row, report.prompts[row.index].oracle_ids) for row in mismatches[:_SHOWN_ROWS]]
        if len(mismatches) > _SHOWN_ROWS:
            lines.append(f"{run.candidate}, B={run.batch_size}: and {len(mismatches) - _SHOWN_ROWS} more prompts")
    return "\n".join(lines)


def _describe_row(run: RunAudit, row: RowAudit, oracle: Sequence[int]) -> str:
    at = row.first_divergence
    assert at is not None
    found, expected = (tokens[at] if at < len(tokens) else "the end" for tokens in (row.token_ids, oracle))
    gap = "" if row.gap is None else f", whose logit leads by {row.gap:.2g}"
    return f"{run.candidate}, B={run.batch_size}, prompt {row.index}: token {at} is {found}, not {expected}{gap}"
