"""The audit's score: every fault found and named by the probe, no correct decoder accused."""

import json

import pytest
import typer

from benchmarks.audit_confusion import main


def score(tmp_path, **options):
    path = tmp_path / "score.json"
    with pytest.raises(typer.Exit) as ended:
        main(**{"seed": 1, "quick": False, "json_path": path} | options)
    assert ended.value.exit_code == 0, json.loads(path.read_text())["records"]
    return json.loads(path.read_text())


def test_a_few_runs(tmp_path):
    found = score(tmp_path, runs=12)
    assert set(found["probe"]) == {"runs", "faulty", "detected", "right_diagnosis", "clean", "false_alarms"}
    assert found["probe"]["faulty"] > 4 and found["probe"]["clean"] > 4
    assert found["outputs"]["detected"] == found["outputs"]["faulty"] > 4


@pytest.mark.slow
def test_six_hundred_runs(tmp_path):
    found = score(tmp_path, runs=600, seed=2)
    assert found["probe"]["detected"] == found["probe"]["right_diagnosis"] == found["probe"]["faulty"] > 200
    assert found["outputs"]["false_alarms"] == 0
