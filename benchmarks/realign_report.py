"""Tables and plots of the realign benchmark."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .realign_methods import CENTRE

Record = dict[str, Any]

AXES = ("batch_size", "content", "spread")


def show(records: list[Record]) -> None:
    """A table for each case; ratios with their 95 % interval, and the share of valid KV bytes that is written."""
    console = Console()
    first = records[0]
    console.print(", ".join(f"{name} {first[name]}" for name in ("device", "threads", "commit", "torch")))
    for case in dict.fromkeys(map(_case, records)):
        console.print(_table([r for r in records if _case(r) == case]))


def _case(record: Record) -> tuple:
    return tuple(record[name] for name in AXES)


def _table(records: list[Record]) -> Table:
    first = records[0]
    case = f"B={first['batch_size']}, content {first['content']}, spread {first['spread']}"
    lag = f"max n - n_b: {first['lag']:.2f}, limit {first['lag_limit']:.2f}"
    table = Table(
        *("method", "ms", "naive / it", "it / floor", "moved", "ops", "reads"),
        title=f"{case}; floor {first['floor_ms']:.2f} ms; {lag}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for r in records:
        table.add_row(
            f"{r['backend']} {r['method']}",
            f"{r['median_ms']:.2f}",
            _interval(r, "speedup", 1),
            _interval(r, "over_floor", 2),
            f"{r['share_moved']:.0%}",
            str(r["ops"]),
            str(r["syncs"]),
        )
    return table


def _interval(record: Record, name: str, digits: int) -> str:
    if record[name] is None:
        return "-"
    middle, low, high = (f"{record[key]:.{digits}f}" for key in (name, f"{name}_low", f"{name}_high"))
    return f"{middle} ({low}-{high})"


def plot(path: Path, records: list[Record]) -> None:
    """Time along each axis of the sweep, and the lag behind the best row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 9), layout="constrained")
    *times, lag = figure.subplots(2, 2).flat
    for axes, name in zip(times, AXES, strict=True):
        _plot_times(axes, name, _along(name, records))
    times[0].legend(fontsize="small")
    rows = sorted({(r["batch_size"], r["lag"], r["lag_limit"]) for r in _along("batch_size", records)})
    batch_sizes, measured, limits = zip(*rows, strict=True)
    lag.plot(batch_sizes, measured, marker="o", label="E[max n - n_b]")
    lag.plot(batch_sizes, limits, "k--", label="K - mu")
    lag.set(xscale="log", ylabel="columns", ylim=(0, None))
    _label(lag, "batch_size", batch_sizes)
    lag.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def _along(name: str, records: list[Record]) -> list[Record]:
    """Records in which only ``name`` differs from the centre of the sweep, in its order."""
    others = [other for other in AXES if other != name]
    chosen = [r for r in records if all(r[other] == getattr(CENTRE, other) for other in others)]
    return sorted(chosen, key=lambda r: r[name])


def _plot_times(axes, name: str, records: list[Record]) -> None:
    lines: dict[str, dict[int, float]] = defaultdict(dict)
    floor = {r[name]: r["floor_ms"] for r in records}
    for r in records:
        lines[f"{r['backend']} {r['method']}"][r[name]] = r["median_ms"]
    for label, points in lines.items():
        axes.plot(points.keys(), points.values(), marker=".", label=label)
    axes.plot(floor.keys(), floor.values(), "k--", label="floor")
    axes.set(ylabel="ms", yscale="log", xscale="linear" if name == "spread" else "log")
    _label(axes, name, floor)


def _label(axes, name: str, values: Iterable[int]) -> None:
    axes.set_xlabel(name)
    axes.minorticks_off()
    axes.set_xticks(list(values), labels=map(str, values))
