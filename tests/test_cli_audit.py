"""``specdec-fast audit``, end to end on a tiny model."""

import json
import signal

import pytest
import torch
from full_disk import fill_after, full_disk
from tiny_dirs import make_tokenizer, save_pair, save_tiny
from tiny_models import DRAFT_NOISE, make_draft, make_prompts
from transformers import AutoModelForCausalLM

from specdec_fast.audit.oracle import Oracle
from specdec_fast.cli import main
from specdec_fast.cli.info import environment
from specdec_fast.cli.journal import Journal

NUM_PROMPTS = 7


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    save_tiny(root / "target")
    target = AutoModelForCausalLM.from_pretrained(root / "target")
    save_pair(root / "draft", make_draft(target, DRAFT_NOISE["llama"], seed=1))
    return root


@pytest.fixture
def command(models, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_FAST_CACHE", str(tmp_path / "cache"))
    tokenizer = make_tokenizer()
    texts = [tokenizer.decode(ids) for ids in make_prompts([5, 1, 17, 9, 3, 12, 30], seed=3)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    options = {"prompts": prompts, "target": models / "target", "draft": models / "draft", "max-new-tokens": 12}
    return ["audit", "--batch-sizes=1,3", *(f"--{name}={value}" for name, value in options.items())]


def test_verdicts_and_exit_status(command, tmp_path, capsys):
    path = tmp_path / "audit.json"
    assert main([*command, "--candidate=eqspec", "--candidate=autoregressive"]) == 0
    assert "NOT" not in capsys.readouterr().out
    assert main([*command, "--candidate=eqspec", "--candidate=bsp", f"--json={path}"]) == 1
    shown = capsys.readouterr()
    assert shown.out.count("NOT equivalent") == 2 and "oracle 7/7" in shown.err and "bsp, B=3 7/7" in shown.err
    found = json.loads(path.read_text())
    assert found["equivalent"] is False
    assert [(run["candidate"], run["batch_size"]) for run in found["runs"]] == [
        *(("eqspec", 1), ("eqspec", 3), ("bsp", 1), ("bsp", 3))
    ]
    exact, bsp = found["runs"][1], found["runs"][3]
    assert exact["mismatches"] == 0 and bsp["mismatches"] > 0
    for prompt, row in zip(found["prompts"], exact["rows"], strict=True):
        assert row["token_ids"] == prompt["oracle_ids"] and row["text"] == prompt["oracle_text"]
    row = next(row for row in bsp["rows"] if not row["exact"])
    oracle = found["prompts"][row["index"]]["oracle_ids"]
    assert row["token_ids"][: row["first_divergence"]] == oracle[: row["first_divergence"]]


def test_the_probe_names_the_first_violation_by_prompt(command, tmp_path, capsys):
    path = tmp_path / "audit.json"
    options = ["--probe", "--candidate=eqspec", "--candidate=position-offset", "--candidate=rejected-kept"]
    assert main([*command, "--batch-sizes=3", *options, f"--json={path}"]) == 1
    shown = capsys.readouterr().out
    assert "eqspec, B=3, probe: no violation" in shown and "BROKEN invariant" in shown and "probed" in shown
    clean, offset, kept = json.loads(path.read_text())["runs"]
    assert clean["probe"]["violation"] is None and clean["probe"]["checked"] > 3
    assert clean["probe"]["accepted"] == clean["probe"]["accepted_alone"]
    assert clean["tokens_per_second"] is None, "a rate under a probe means nothing"
    assert offset["mismatches"] == 0 and offset["probe"]["violation"]["kind"] == "wrong_position"
    found = kept["probe"]["violation"]
    assert found["kind"] == "kept_rejected_token" and 0 <= found["row"] < NUM_PROMPTS
    assert {suspect["name"] for suspect in kept["diagnosis"]} >= {"kv_cache"}


def test_the_oracle_is_decoded_once(command, monkeypatch):
    seen, decode = [], Oracle._decode
    monkeypatch.setattr(Oracle, "_decode", lambda self, ids: seen.append(ids) or decode(self, ids))
    for _ in range(2):
        assert main(command) == 0
        assert len(seen) == NUM_PROMPTS


def test_a_report_is_a_page_and_its_data(command, tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    command = [*command, "--candidate=eqspec", "--candidate=bsp", f"--report={folder}", f"--json={tmp_path / 'a.json'}"]
    assert main(command) == 1
    assert f"wrote {folder / 'report.html'}" in capsys.readouterr().err
    assert (folder / "audit.json").read_text() == (tmp_path / "a.json").read_text()
    found = json.loads((folder / "audit.json").read_text())
    assert found["settings"]["environment"]["torch"] == torch.__version__
    for run in found["runs"]:
        for row, prompt in zip(run["rows"], found["prompts"], strict=True):
            assert (row["span"] is None) == row["exact"]
            if row["span"]:
                assert row["text"][: row["span"][0]] == prompt["oracle_text"][: row["oracle_span"][0]]
    html = (folder / "report.html").read_text(encoding="utf-8")
    assert "<h1>Not output-equivalent</h1>" in html and torch.__version__ in html
    assert html.count('<section class="card run"') == 4


def test_the_environment_names_the_build_of_torch(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.13.0+other")
    assert environment(torch.device("cpu"))["torch"] == "2.13.0+other"


@pytest.mark.parametrize("option", ["--json", "--report"])
def test_an_interrupted_audit_resumes_without_losing_a_row(command, tmp_path, monkeypatch, capsys, option):
    command = [*command, f"{option}={tmp_path / 'found'}", "--candidate=eqspec", "--candidate=dsd"]
    append = Journal.append

    def interrupted(self, row):
        append(self, row)
        if len(self.rows) == 16:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Journal, "append", interrupted)
    assert main(command) == 130
    assert "stopped: 16 of 28 rows are done and kept" in capsys.readouterr().err
    assert main(command) == 2
    assert "holds 16 finished rows: pass --resume" in capsys.readouterr().err
    kept = []
    monkeypatch.setattr(Journal, "append", lambda self, row: kept.append(row["index"]) or append(self, row))
    assert main([*command, "--resume"]) == 1
    assert len(kept) == 12 and min(kept) >= 14
    assert main([*command, "--resume", "--max-new-tokens=5"]) == 2
    assert "max_new_tokens was 12, is 5" in capsys.readouterr().err


def test_a_probed_audit_is_not_resumed(command, tmp_path, capsys):
    command = [*command, "--batch-sizes=3", "--candidate=position-offset", f"--json={tmp_path / 'found'}"]
    assert main([*command, "--probe"]) == 1
    assert main([*command, "--probe", "--resume"]) == 2
    assert "a probed audit cannot be resumed" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 2
    assert "probe was True, is False" in capsys.readouterr().err


def test_a_candidate_that_fails_loses_no_finished_row(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fails_late.py").write_text(
        "import torch\n"
        "def decode(input_ids, attention_mask, max_new_tokens):\n"
        "    if len(input_ids) == 1:\n"
        "        raise SystemExit('too few rows')\n"
        "    return torch.cat([input_ids, input_ids[:, -1:]], 1)\n"
    )
    assert main([*command, "--batch-sizes=3", "--candidate=fails_late:decode", f"--json={tmp_path / 'found'}"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "error: candidate fails_late:decode failed: SystemExit: too few rows"
    assert len((tmp_path / "found.rows.jsonl.journal").read_text().splitlines()) == 1 + 6


def test_a_candidate_that_fails_does_not_end_the_others(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fails_at_once.py").write_text(
        "def decode(input_ids, attention_mask, max_new_tokens):\n    return {}['the draft']\n"
    )
    path = tmp_path / "report"
    command = [*command, "--batch-sizes=3", "--candidate=fails_at_once:decode", "--candidate=eqspec"]
    assert main([*command, f"--report={path}"]) == 2
    shown = capsys.readouterr()
    told = "candidate fails_at_once:decode failed: KeyError: 'the draft'"
    assert shown.err.splitlines()[-1] == f"error: {told}"
    assert "stopped: 7 of 14 rows are done and kept; add --resume to go on" in shown.err
    assert "eqspec" in shown.out and "Traceback" not in shown.err
    found = json.loads((path / "audit.json").read_text())
    assert not found["passed"] and [(run["candidate"], run["mismatches"]) for run in found["runs"]] == [("eqspec", 0)]
    (failure,) = found["failures"]
    assert failure["error"] == told and "fails_at_once.py" in failure["traceback"]
    assert told in (path / "report.html").read_text().replace("&#39;", "'")
    assert main([*command, "--traceback"]) == 2
    assert 'fails_at_once.py", line 2, in decode' in capsys.readouterr().err


def test_a_resumed_audit_does_not_diagnose_again(command, tmp_path, monkeypatch, capsys):
    command = [*command, "--batch-sizes=3", "--candidate=bsp", f"--json={tmp_path / 'found.json'}"]
    assert main(command) == 1
    shown = capsys.readouterr().err
    before = json.loads((tmp_path / "found.json").read_text())
    assert before["runs"][0]["diagnosis"]

    def fail(*_):
        raise AssertionError("it was diagnosed before")

    with monkeypatch.context() as patch:
        patch.setattr("specdec_fast.audit.decoding.diagnose", fail)
        assert main([*command, "--resume"]) == 1
    assert "diagnosis" in shown and "diagnosis" not in capsys.readouterr().err
    assert json.loads((tmp_path / "found.json").read_text())["runs"] == before["runs"]
    path = tmp_path / "found.json.rows.jsonl.diagnosis"
    for damaged in ("{", "[]", '{"bsp, B=3": {"of": 1}}', '{"bsp, B=3": []}'):
        path.write_text(damaged)
        assert main([*command, "--resume"]) == 1
        assert json.loads((tmp_path / "found.json").read_text())["runs"] == before["runs"]


def test_progress_is_told_on_a_pipe(command, capsys):
    assert main([*command, "--batch-sizes=3", "--candidate=bsp"]) == 1
    lines = capsys.readouterr().err.splitlines()
    for task, total in (("oracle", 7), ("bsp, B=3", 7)):
        assert [f"{task} {done}/{total}" for done in range(1, total + 1)] == [
            x for x in lines if x.startswith(f"{task} ")
        ]
    steps = [line for line in lines if line.startswith("bsp, B=3, diagnosis ")]
    done, total = zip(*(map(int, line.split()[-1].split("/")) for line in steps), strict=True)
    assert len(steps) >= 5 and list(done) == sorted(set(done)) and {done[-1]} == set(total)


def test_an_audit_in_half_precision_says_how_weak_it_is(command, tmp_path, capsys):
    path = tmp_path / "audit.json"
    main([*command, "--batch-sizes=3", "--dtype=bfloat16", f"--json={path}"])
    (run,) = json.loads(path.read_text())["runs"]
    assert run["weakness"] in capsys.readouterr().out.replace("\n", " ") and run["tied"] > 0.01
    main([*command, "--batch-sizes=3", "--dtype=bfloat16", "--judge-dtype=same", f"--json={path}"])
    (same,) = json.loads(path.read_text())["runs"]
    assert same["noise"] != run["noise"]
    assert [row["token_ids"] for row in same["rows"]] == [row["token_ids"] for row in run["rows"]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--candidate=nothing"], "unknown candidate 'nothing'"),
        (["--batch-sizes=1,x"], "need integers of at least 1"),
        (["--batch-sizes=0"], "need integers of at least 1"),
        (["--resume"], "--resume needs --report or --json"),
        (["--json=/no/such/folder/a.json"], "there is no folder"),
        (["--prompts=/no/such/file.txt"], "cannot read prompts"),
        (["--max-new-tokens=900"], "is too long"),
    ],
)
def test_bad_arguments(command, capsys, changes, message):
    assert main([*command, *changes]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_results_do_not_overwrite_the_prompts(command, tmp_path, capsys):
    before = (tmp_path / "prompts.jsonl").read_text()
    assert main([*command, f"--json={tmp_path / 'prompts.jsonl'}"]) == 2
    assert "is the prompts file" in capsys.readouterr().err
    assert (tmp_path / "prompts.jsonl").read_text() == before


@pytest.mark.parametrize("name", ["report.html", "rows.jsonl", "audit.json"])
def test_results_do_not_overwrite_each_other(command, tmp_path, capsys, name):
    assert main([*command, f"--report={tmp_path}", f"--json={tmp_path / name}"]) == 2
    assert f"is a file of --report {tmp_path}" in capsys.readouterr().err


def test_a_full_disk_is_named_and_what_is_kept_goes_on(command, tmp_path, monkeypatch, capsys):
    found = tmp_path / "found"
    command += ["--candidate=eqspec", f"--json={found}"]
    with monkeypatch.context() as patch:
        fill_after(patch, 6)
        assert main(command) == 2
    said = capsys.readouterr().err
    assert "no verdict" not in said, "no candidate failed"
    *_, kept, error = said.splitlines()
    assert kept == "stopped: 5 of 14 rows are done and kept; add --resume to go on"
    assert error.endswith("found.rows.jsonl.journal: No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.write_text", full_disk)
        assert main([*command, "--resume"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"error: cannot write {found}: No space left on device"
    assert main([*command, "--resume"]) == 0
