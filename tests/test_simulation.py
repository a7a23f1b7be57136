"""The simulation's counts, and its findings about the policies."""

import json
import math
import random
import time
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from benchmarks import grouping, grouping_report
from benchmarks.grouping import Case
from benchmarks.simulation import POLICIES, CostModel, Job, Traffic, percentile, simulate
from specdec_fast.scheduler import Scheduler

FIELDS = (
    "policy layout batch_size window lengths grouping_rate realigns bytes_moved verify_calls mean_batch p50_rounds "
    "p99_rounds"
)


@pytest.fixture(scope="module")
def measured():
    """Records of simulations, each run once."""
    records = {}

    def get(policy, batch_size, window, lengths="random"):
        case = Case(policy, batch_size, window, lengths)
        if case not in records:
            records[case] = case.record(case.run())
        return records[case]

    return get


def test_the_same_rows_whatever_the_policy():
    traffic = Traffic(max_new_tokens=40)
    traces = []
    for policy in POLICIES.values():
        scheduler = Scheduler(batch_size=4, policy=policy, max_columns=traffic.max_columns, prefill_tokens=1000)
        traces.append(simulate(scheduler, traffic.jobs(60), traffic))
    jobs = list(traffic.jobs(60))
    for trace in traces:
        assert len(trace.records) == 60
        assert trace.tokens == sum(job.new_tokens for job in jobs)
    # alone in a batch, a row's rounds depend on its luck only
    alone = [simulate(Scheduler(batch_size=1), [job], traffic).rounds_of_rows[0] for job in jobs]
    for trace in traces:
        assert sorted(record.rounds for record in trace.records) == sorted(alone)


def test_acceptance_is_geometric():
    job = Job(prompt_length=1, new_tokens=30_000, max_new_tokens=40_000, rate=0.7, seed=5)
    scheduler = Scheduler(batch_size=1)
    trace = simulate(scheduler, [job])
    # 1 + r + ... + r^K tokens a round
    expected = (1 - 0.7**6) / 0.3
    assert trace.tokens / trace.verify_calls == pytest.approx(expected, rel=0.02)


def test_time_and_latency_by_hand():
    cost = CostModel(draft_step=0.1, token=0.01, column=1.0)
    job = Job(prompt_length=10, new_tokens=8, max_new_tokens=8, rate=1.0, seed=0)
    jobs = [job, replace(job, arrival=100.0)]
    ragged = simulate(Scheduler(batch_size=1), jobs, cost=cost)
    # a prompt of 10 tokens, a verify of 1 + 5, a verify of 1
    each = (1 + 0.1) + (1 + 0.5 + 0.06) + (1 + 0.01)
    assert ragged.latencies == pytest.approx([each, each])
    assert ragged.time == pytest.approx(100 + each)
    padded = simulate(Scheduler(batch_size=1, layout="padded"), jobs[:1], cost=cost)
    # gathers the prompt, and with it the first, 5 accepted and the bonus
    assert padded.latencies == pytest.approx([each + 10 + 16])
    assert (ragged.rounds_of_rows, padded.rounds_of_rows) == ([3, 3], [3])


def test_traffic():
    traffic = Traffic((5, 9), max_new_tokens=50, mean_new_tokens=20, rate=0.6)
    jobs = list(traffic.jobs(4000, seed=1, arrival_rate=0.5))
    assert {job.prompt_length for job in jobs} == set(range(5, 10))
    mean = sum((1 - 1 / 20) ** n for n in range(50))
    assert sum(job.new_tokens for job in jobs) / 4000 == pytest.approx(mean, rel=0.05)
    assert sum(job.rate for job in jobs) / 4000 == pytest.approx(0.6, rel=0.02)
    assert jobs[-1].arrival / 4000 == pytest.approx(2, rel=0.06)
    assert jobs == list(traffic.jobs(4000, seed=1, arrival_rate=0.5))
    assert {job.new_tokens for job in replace(traffic, mean_new_tokens=math.inf).jobs(5)} == {50}


def test_conversations_take_their_turns():
    traffic = Traffic((5, 9), max_new_tokens=10, turns=3, think_time=4.0, added_tokens=7)
    scheduler = Scheduler(batch_size=2, max_columns=traffic.max_columns)
    trace = simulate(scheduler, traffic.jobs(20, arrival_rate=0.1), traffic)
    assert len(trace.records) == 60
    job = next(traffic.jobs(1))
    following = traffic.next_turn(job, now=50.0)
    assert following.prompt_length == job.prompt_length + job.new_tokens + 7
    assert following.arrival > 50
    assert following.turns == job.turns - 1 == 1


def test_percentile():
    values = list(range(1, 101))
    random.Random(0).shuffle(values)
    assert [percentile(values, percent) for percent in (0, 50, 90, 99, 100)] == [1, 50, 90, 99, 100]
    assert percentile([3], 50) == 3


def test_thousands_of_rounds_a_second():
    traffic = Traffic()
    scheduler = Scheduler(batch_size=8, layout="padded", max_columns=traffic.max_columns)
    began = time.process_time()
    trace = simulate(scheduler, traffic.jobs(256), traffic)
    # about 10,000 a second on one slow core
    assert trace.rounds / (time.process_time() - began) > 1000


def test_grouping_rate_falls_with_the_batch_for_random_lengths_and_stays_for_identical_ones(measured):
    sizes = (1, 2, 4, 8)
    rates = {
        lengths: [measured("paper", size, 16, lengths)["grouping_rate"] for size in sizes]
        for lengths in ("random", "identical")
    }
    assert rates["random"][0] == 1
    assert rates["random"][1] < 0.1
    assert rates["random"][3] < 0.001
    assert all(rate > 0.4 for rate in rates["identical"])
    assert rates["identical"] == sorted(rates["identical"], reverse=True)


def test_a_wider_window_groups_more_identical_rows(measured):
    rates = [measured("paper", 4, window, "identical")["grouping_rate"] for window in (1, 4, 16)]
    assert rates == sorted(rates)
    assert rates[0] < 0.05 < rates[2] - rates[0]


@pytest.mark.parametrize("batch_size", [2, 8, 32])
def test_ragged_moves_nothing_and_saves_a_third_of_the_calls_with_stragglers(measured, batch_size):
    ragged, eqspec = measured("age", batch_size, 4), measured("per-batch", batch_size, 1)
    assert ragged["bytes_moved"] == ragged["realigns"] == 0
    assert ragged["grouping_rate"] == 1
    assert ragged["verify_calls"] < 0.72 * eqspec["verify_calls"]


@pytest.mark.parametrize("window", [1, 4, 16])
@pytest.mark.parametrize("batch_size", [1, 2, 8])
@pytest.mark.parametrize("lengths", ["random", "identical"])
def test_the_tail_is_that_of_eqspec(measured, lengths, batch_size, window):
    eqspec = measured("per-batch", batch_size, 1, lengths)
    assert measured("age", batch_size, window, lengths)["p99_rounds"] <= 1.5 * eqspec["p99_rounds"]


def test_the_published_policy_has_a_tail(measured):
    assert (
        measured("paper", 8, 4, "identical")["p99_rounds"] > 2 * measured("per-batch", 8, 1, "identical")["p99_rounds"]
    )


def test_online_rows_need_not_wait_for_a_batch_to_end():
    times = {}
    for case, rate in grouping.online():
        if case.policy in ("age", "per-batch") and case.arrivals == "poisson":
            trace = case.run(rate)
            times[case.policy] = [percentile(trace.latencies, percent) for percent in (50, 90, 99)]
    assert all(age < 0.7 * eqspec for age, eqspec in zip(times["age"], times["per-batch"], strict=True))


def test_benchmark_writes_its_records(tmp_path, monkeypatch):
    monkeypatch.setattr(grouping, "QUICK_SIZES", (1, 2))
    monkeypatch.setattr(grouping, "QUICK_WINDOWS", (1, 4))
    monkeypatch.setattr(grouping, "ONLINE_ROWS", 16)
    app = grouping.typer.Typer()
    app.command()(grouping.main)
    paths = [tmp_path / "out" / name for name in ("grouping.json", "grouping.png")]
    done = CliRunner().invoke(app, ["--quick", "--json", str(paths[0]), "--png", str(paths[1])])
    assert done.exit_code == 0, done.output
    records = json.loads(paths[0].read_text())
    assert all(set(FIELDS.split()) <= set(record) for record in records)
    assert {record["policy"] for record in records} == set(grouping.POLICIES)
    assert {record["arrivals"] for record in records} == {"offline", "poisson", "multi-turn"}
    assert paths[1].stat().st_size > 0
    assert ["age", "identical", "2", "8", "0.00"] in [line[:5] for line in grouping_report.ratios(records)]


def test_quotient():
    assert grouping_report.quotient(3, 2) == "1.50"
    assert grouping_report.quotient(3, 0) == "-"
