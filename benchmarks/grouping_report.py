"""Tables and the plot of the grouping benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

Record = dict[str, Any]

OFFLINE = {
    "policy": "policy",
    "B": "batch_size",
    "W": "window",
    "grouped": "grouping_rate",
    "realigns": "realigns",
    "bytes moved": "bytes_moved",
    "calls": "verify_calls",
    "rows": "mean_batch",
    "p50": "p50_rounds",
    "p99": "p99_rounds",
}
ONLINE = {"policy": "policy", "p50": "p50_time", "p90": "p90_time", "p99": "p99_time"}
# record field, policy to compare with
RATIOS = [
    ("bytes_moved", "paper"),
    ("verify_calls", "per-batch"),
    ("p99_rounds", "per-batch"),
]


def show(records: list[Record]) -> None:
    """A table for each kind of load, and what the policies of this package make of the rows beside the others."""
    console = Console()
    for arrivals, lengths in dict.fromkeys((r["arrivals"], r["lengths"]) for r in records):
        chosen = [r for r in records if (r["arrivals"], r["lengths"]) == (arrivals, lengths)]
        columns, unit = (OFFLINE, "rounds") if arrivals == "offline" else (ONLINE, "target forwards")
        table = _table(f"{arrivals}, {lengths} lengths; latency in {unit}", *columns)
        for r in chosen:
            table.add_row(*(str(r[name]) for name in columns.values()))
        console.print(table)
    table = _table("ratios", "policy", "lengths", "B", "W", *(f"{field} / {name}" for field, name in RATIOS))
    for cells in ratios(records):
        table.add_row(*cells)
    console.print(table)


def ratios(records: list[Record]) -> list[list[str]]:
    """The ratios of ``age`` at windows of 4 batches; ``per-batch`` has no window."""
    offline = [r for r in records if r["arrivals"] == "offline"]
    found = {(r["policy"], r["lengths"], r["batch_size"], r["window"]): r for r in offline}
    baselines = {("per-batch", r["lengths"], r["batch_size"]): r for r in offline if r["policy"] == "per-batch"}
    lines = []
    for (policy, *shape), record in found.items():
        lengths, batch_size, window = shape
        if policy != "age" or window != 4 * batch_size:
            continue
        others = [baselines.get((name, lengths, batch_size)) or found[name, *shape] for _, name in RATIOS]
        cells = [quotient(record[field], other[field]) for (field, _), other in zip(RATIOS, others, strict=True)]
        lines.append([policy, lengths, str(batch_size), str(window), *cells])
    return lines


def quotient(value: float, base: float) -> str:
    return f"{value / base:.2f}" if base else "-"


def plot(path: Path, records: list[Record]) -> None:
    """Grouping rate of the published policy over the batch size (paper, Figure 5)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    papers = [r for r in records if r["policy"] == "paper" and r["arrivals"] == "offline"]
    sizes = sorted({r["batch_size"] for r in papers})
    windows = sorted({r["window"] // r["batch_size"] for r in papers})
    for lengths, style in (("identical", "o-"), ("random", "x:")):
        for color, window in enumerate(windows):
            chosen = [r for r in papers if (r["lengths"], r["window"]) == (lengths, window * r["batch_size"])]
            rates = [r["grouping_rate"] for r in chosen]
            axes.plot([r["batch_size"] for r in chosen], rates, style, color=f"C{color}", label=f"{lengths}, {window}B")
    axes.set(xscale="log", xlabel="batch size", ylabel="grouping rate", ylim=(0, 1.02))
    axes.minorticks_off()
    axes.set_xticks(sizes, labels=map(str, sizes))
    axes.legend(title="lengths, window", fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
