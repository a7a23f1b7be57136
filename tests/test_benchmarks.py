"""The harness measures what it says, and the realign benchmark compares equal results and can fail."""

import csv
import json
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import typer
from tiny_dirs import save_tiny

from benchmarks import generate, harness, layouts, realign, realign_methods, stream
from benchmarks.realign_methods import Batch, Case, Commit
from specdec_fast import NgramDrafter, SelfDrafter, ops, reference
from specdec_fast.operators import backends

CPU = torch.device("cpu")
TINY = Case(batch_size=3, content=9, layers=2, heads=2, head_dim=4)
METHODS = {
    ("reference", "minimal"): Commit(reference.realign_step_, 0),
    ("reference", "packed"): Commit(reference.realign_step_, 1),
    ("cpu", "minimal"): Commit(ops.realign_step_, 0),
    ("cpu", "packed"): Commit(ops.realign_step_, 1),
    **realign.BASELINES,
}
FIELDS = "backend method batch_size content median_ms floor_ms naive_ms bytes_moved valid_bytes ops syncs"


def verdict_of(batch, n_accepted):
    """The verdict that accepts ``n_accepted``."""
    n = torch.tensor(n_accepted)
    return realign_methods.Judged(n, (torch.arange(batch.case.num_drafts + 1) >= n[:, None]).long())


@pytest.fixture
def tiny(monkeypatch):
    """The benchmark with small batches and few draws."""
    monkeypatch.setattr(realign, "GATED", [TINY])
    monkeypatch.setattr(realign, "COLUMNS", 2 * TINY.batch_size * TINY.content)
    monkeypatch.setattr(realign, "SHARE_DRAWS", 20)
    monkeypatch.setattr(realign, "LAG_DRAWS", 100)


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only where a test says so."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(harness, "time", SimpleNamespace(perf_counter=lambda: now.seconds))
    return now


def test_alternate_times_every_candidate_in_turn(clock):
    calls = []

    def candidate(name, seconds):
        def run():
            calls.append(name)
            clock.seconds += seconds
            return name

        return run

    candidates = {"a": candidate("a", 3.0), "b": candidate("b", 1.0), "c": candidate("c", 2.0)}
    measured = list(harness.alternate(candidates, 7, CPU))
    assert all(name == outcome for name, _, outcome in measured)
    assert calls[3:] == [name for name, _, _ in measured]
    assert ["".join(calls[i : i + 3]) for i in range(3, 24, 3)] == ["abc", "bca", "cab", "abc", "bca", "cab", "abc"]
    taken = {name: [t for other, t, _ in measured if other == name] for name in candidates}
    assert taken == {"a": [3.0] * 7, "b": [1.0] * 7, "c": [2.0] * 7}
    assert harness.ratio(taken["a"], taken["c"]) == harness.Ratio(1.5, 1.5, 1.5)


def test_ratio_interval_covers_the_truth_at_its_rate():
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        slow, fast = (center * generator.lognormal(sigma=0.1, size=15) for center in (3.0, 1.0))
        measured = harness.ratio(list(slow), list(fast), samples=500)
        assert measured.low <= measured.median <= measured.high
        covered += measured.low <= 3.0 <= measured.high
    assert 0.9 < covered / 200 < 1.0


def test_one_slow_run_moves_no_median():
    assert harness.ratio([2.0] * 6 + [90.0], [1.0] * 7).median == 2.0


def test_counter_sees_each_read_once():
    x = torch.arange(3)
    with harness.DispatchCounter() as counter:
        y = x + 1
        assert (counter.ops, counter.syncs) == (1, 0)
        for count, read in enumerate(
            (y.tolist, y.numpy, y[0].item, lambda: bool(y[0]), lambda: int(y[1]), y.nonzero), 1
        ):
            read()
            assert counter.syncs == count
    x.tolist()
    assert counter.syncs == 6


@pytest.mark.parametrize("spread", [0, 1, 5])
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("key", METHODS, ids=" ".join)
def test_every_method_leaves_the_same_content(key, rows, spread):
    batch = Batch(Case(rows, content=7, spread=spread, layers=2, heads=2, head_dim=4), CPU)
    (verdict,) = batch.verdicts(np.random.default_rng(rows), 1)
    batch.fill()
    before = [x.clone() for x in batch.caches]
    aligned = METHODS[key](batch, verdict)
    for row, start in enumerate(aligned.start.tolist()):
        columns = batch.case.content + int(verdict.n_accepted[row])
        old = slice(batch.case.start, batch.case.start + columns)
        for x, y in zip(aligned.caches, before, strict=True):
            assert torch.equal(x[row, :, start : start + columns], y[row, :, old])
    realign.check_and_count({key: METHODS[key]}, batch, [verdict])


@pytest.mark.parametrize("key", METHODS, ids=" ".join)
def test_counts(key):
    batch = Batch(TINY, CPU)
    verdicts = [verdict_of(batch, n) for n in ([5, 3, 0], [2, 2, 2])]
    operators, syncs = realign.check_and_count({key: METHODS[key]}, batch, verdicts)[key]
    # naive reads its width, then three offsets for each row and layer
    assert syncs == {"naive": 1 + 3 * TINY.batch_size * TINY.layers, "roll": 1}.get(key[1], 0)
    assert (operators == 1) == (key[0] == "cpu")


@pytest.mark.skipif(not backends.is_built("_C"), reason="the C++ operators are not built")
def test_the_compiled_step_dispatches_nothing_inside():
    batch = Batch(TINY, CPU)
    verdict = verdict_of(batch, [5, 3, 0])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        METHODS["cpu", "minimal"](batch, verdict)
    assert [event.name for event in profile.events()] == ["specdec_fast::realign_step_"]


@pytest.mark.parametrize(
    ("n_accepted", "columns"),
    [
        # one row moves; the rows that accepted most stay
        ([5, 3, 5], {"minimal": 9 + 3, "packed": 3 * 9 + 13, "naive": 3 * 14, "gather": 3 * 45, "roll": 45}),
        ([4, 4, 4], {"minimal": 0, "packed": 3 * 13, "naive": 3 * 13, "gather": 3 * 45, "roll": 0}),
    ],
)
def test_columns_written(n_accepted, columns):
    batch = Batch(TINY, CPU)
    verdict = verdict_of(batch, n_accepted)
    written = {key: realign.columns_written(method, TINY, [verdict]).item() for key, method in METHODS.items()}
    assert written == {key: columns[key[1]] for key in METHODS}
    assert realign.valid_columns(TINY, [verdict]).item() == 3 * 9 + sum(n_accepted)


@pytest.mark.parametrize(("rows", "share"), [(8, 0.64), (32, 0.74)])
def test_share_of_bytes_moved(rows, share):
    case = Case(rows, 512)
    verdicts = Batch(Case(rows, 512, layers=0), CPU).verdicts(np.random.default_rng(1), 200)
    moved = realign.columns_written(METHODS["cpu", "minimal"], case, verdicts).sum()
    assert moved / realign.valid_columns(case, verdicts).sum() == pytest.approx(share, abs=0.02)


def test_lag_approaches_its_limit():
    # the larger of two dice of 0..5 lies 35/36 above their mean
    lags = [realign.acceptance_lag(Case(rows, 512), np.random.default_rng(0)) for rows in (2, 64)]
    assert [lag["lag"] for lag in lags] == pytest.approx([35 / 36, 2.5], abs=0.02)
    assert [lag["lag_limit"] for lag in lags] == pytest.approx([2.5, 2.5], abs=0.02)


def test_outputs(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(realign, "GATED", [replace(realign_methods.CENTRE, layers=1, heads=1, head_dim=4)])
    paths = {f"{kind}_path": tmp_path / "new" / f"out.{kind}" for kind in ("json", "csv", "png")}
    realign.main(quick=True, **paths)
    records = json.loads(paths["json_path"].read_text())
    assert isinstance(records, list)
    assert {(r["backend"], r["method"]) for r in records} >= {("reference", "minimal"), *realign.BASELINES}
    for record in records:
        assert set(FIELDS.split()) | {"device", "threads", "commit", "torch"} <= set(record)
        assert record["median_ms"] > 0 and record["naive_ms"] > 0
        assert record["method"] != "minimal" or 0 < record["bytes_moved"] < record["valid_bytes"]
        assert record["speedup_low"] <= record["speedup"] <= record["speedup_high"]
    with paths["csv_path"].open() as file:
        assert [row["ops"] for row in csv.DictReader(file)] == [str(r["ops"]) for r in records]
    assert paths["png_path"].read_bytes().startswith(b"\x89PNG")


def test_uniform_acceptance_has_no_floor(tiny):
    records = realign.measure(Case(2, 9, spread=0, layers=1), {"cpu": ops.realign_step_}, CPU, 7)
    assert records[0]["bytes_moved"] == 0
    assert all(r["over_floor"] is None for r in records)


def synthetic_times(monkeypatch, milliseconds):
    def time_in_turns(methods, *_):
        return {key: [milliseconds.get(key, 9.0) / 1000] * 7 for key in [*methods, realign.FLOOR]}

    monkeypatch.setattr(realign, "time_in_turns", time_in_turns)


@pytest.mark.parametrize(
    ("cpu", "passes"), [(1.0, True), (1.24, True), (1.26, False)], ids=["fast", "at the bound", "beyond the floor"]
)
def test_check_of_synthetic_times(tiny, monkeypatch, capsys, cpu, passes):
    synthetic_times(monkeypatch, {("cpu", "minimal"): cpu, realign.FLOOR: 1.0, realign.NAIVE: 4.0})
    monkeypatch.setattr(realign, "kernels", lambda device: {"cpu": ops.realign_step_})
    if passes:
        realign.main(check=True)
    else:
        with pytest.raises(typer.Exit) as stop:
            realign.main(check=True)
        assert stop.value.exit_code == 1
    assert ("every bound is kept" in capsys.readouterr().out) == passes


def sleeps(*args):
    time.sleep(0.01)
    ops.realign_step_(*args)


def reads_back(*args):
    ops.realign_step_(*args)
    args[8].tolist()


def dispatches_twice(*args):
    ops.realign_step_(*args)
    args[8].sum()


@pytest.mark.parametrize(
    ("kernel", "complaints"),
    [(sleeps, ["faster than naive", "the floor"]), (reads_back, ["host reads"]), (dispatches_twice, ["operators"])],
)
def test_check_fails_for_a_crippled_backend(tiny, monkeypatch, capsys, kernel, complaints):
    monkeypatch.setattr(realign, "kernels", lambda device: {"cpu": kernel})
    with pytest.raises(typer.Exit) as stop:
        realign.main(check=True)
    assert stop.value.exit_code == 1
    printed = capsys.readouterr().out
    assert all(text in printed for text in complaints)


def moves_too_much(*args):
    ops.realign_step_(*args[:-1], 1)


def forgets_the_mask(*args):
    ops.realign_step_(*args)
    args[13][0].zero_()


def loses_a_column(*args):
    ops.realign_step_(*args)
    args[0][-1][:, :, TINY.start + 3] = 0


@pytest.mark.parametrize("kernel", [moves_too_much, forgets_the_mask, loses_a_column])
def test_wrong_results_are_never_timed(tiny, monkeypatch, capsys, kernel):
    monkeypatch.setattr(realign, "kernels", lambda device: {"cpu": kernel})
    with pytest.raises(RuntimeError, match="cpu minimal differs from the reference"):
        realign.main(check=True)
    assert "ms" not in capsys.readouterr().out


def test_moving_too_many_bytes_is_a_failure():
    kept = {"speedup": 3.0, "speedup_high": 3.0, "over_floor": 1.0, "over_floor_low": 1.0, "ops": 1, "syncs": 0}
    assert realign.failures(kept | {"batch_size": 8, "share_moved": 0.75}) == []
    assert realign.failures(kept | {"batch_size": 32, "share_moved": 0.80}) == []
    (text,) = realign.failures(kept | {"batch_size": 8, "share_moved": 0.80})
    assert text == "B=8: 80% of valid bytes moved, allowed 75%"


def test_stream_methods_agree_and_count_rounds(tmp_path):
    target = save_tiny(tmp_path / "target")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "ab " * n}) + "\n" for n in (1, 5, 2)))
    bench = generate.Bench(str(target), 9, 1, str(prompts), "float32", "cpu", 9, stream.OPENINGS)
    ours, theirs = stream.exspec(bench, 2, 3)(), stream.eqspec(bench, 2, 3, "ragged")()
    assert len(bench.encoded) == len({tuple(ids) for ids in bench.encoded}) == 9
    assert ours[0] == theirs[0] and bench.verify(ours[0], 2)["mismatches"] == 0
    assert min(ours[1]) >= 2 and sum(theirs[1]) <= sum(map(len, theirs[0]))


def test_layouts_are_compared_on_equal_answers(tmp_path):
    target = save_tiny(tmp_path / "target")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "ab " * n}) + "\n" for n in (9, 1, 30, 5, 2, 12)))
    bench = generate.Bench(str(target), None, 1, str(prompts), "float32", "cpu", 6)
    uniform, mixed = (layouts.with_lengths(bench, lengths, 3) for lengths in ("uniform", "mixed"))
    assert uniform.encoded == [bench.encoded[i] for i in (1, 3, 4)]
    assert mixed.encoded == [bench.encoded[i] for i in (1, 2, 3)]
    cell = layouts.compare(mixed, "mixed", 3, {"n-gram": NgramDrafter()}, 2, 7)
    assert cell["prompt_tokens"] == list(map(len, mixed.encoded))
    assert all(record["mismatches"] == 0 for record in cell["methods"].values())
    assert all(0 < cell["methods"][f"{layout}, n-gram"]["outside_forwards"] < 1 for layout in layouts.LAYOUTS)
    assert list(cell["speedups"]) == [
        f"ragged, n-gram / {other}" for other in ("padded, n-gram", "greedy", "assisted, n-gram")
    ]
    layouts.show_cell(cell)


def test_forwards_of_a_layer_subset_are_timed_once(tmp_path, monkeypatch):
    target = generate.load(str(save_tiny(tmp_path / "target")), dtype="float32", device="cpu")[0]
    draft = SelfDrafter(target, [0]).model
    now = iter(range(100))
    monkeypatch.setattr(layouts, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    with layouts.forward_seconds(target, draft) as seconds:
        draft(torch.tensor([[5]]))
        target(torch.tensor([[5]]))
    assert len(seconds) == 2 and all(taken > 0 for taken in seconds)
    target(torch.tensor([[5]]))
    assert len(seconds) == 2
