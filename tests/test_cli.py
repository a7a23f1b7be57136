"""The command line, end to end on tiny models."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from full_disk import fill_after, full_disk
from safetensors.torch import save_file
from tiny_dirs import EOS_IDS, make_tokenizer, save_pair, save_tiny
from tiny_models import DRAFT_NOISE, greedy_oracle, make_draft, make_prompts
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM
from typer.main import get_command

from specdec_fast import __version__
from specdec_fast.audit.candidates import NAMES
from specdec_fast.audit.equivalence import EquivalenceCheck
from specdec_fast.audit.oracle import OracleRow
from specdec_fast.cli import app, main
from specdec_fast.cli.display import print_check
from specdec_fast.cli.journal import Journal
from specdec_fast.operators import backends

ROOT = Path(__file__).parents[1]
NEW_TOKENS = 24
KEYS = ["index", "prompt", "text", "token_ids", "num_tokens", "finish_reason", "rounds", "drafted", "accepted"]
STATS = [
    *("tokens", "seconds", "tokens_per_second", "rounds", "drafted", "accepted", "mean_accepted", "stage_seconds"),
    *("bytes_moved", "host_syncs_per_round", "exact_match", "partial_match", "near_ties", "resumed_rows"),
    "layout",
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target, a draft for it, and models that do not fit."""
    root = tmp_path_factory.mktemp("models")
    save_tiny(root / "target")
    save_tiny(root / "plain", chat=False)
    target = AutoModelForCausalLM.from_pretrained(root / "target")
    save_pair(root / "draft", make_draft(target, DRAFT_NOISE["llama"], seed=1))
    save_tiny(root / "other-tokenizer", reverse=True)
    config = MambaConfig(vocab_size=97, hidden_size=16, state_size=4, num_hidden_layers=2)
    save_pair(root / "state-space", MambaForCausalLM(config))
    shutil.copytree(root / "draft", root / "head-only")
    head = {"lm_head.weight": target.lm_head.weight.data}
    save_file(head, root / "head-only" / "model.safetensors", {"format": "pt"})
    return root


@pytest.fixture
def prompts(tmp_path):
    tokenizer = make_tokenizer()
    texts = [tokenizer.decode(ids) for ids in make_prompts([5, 1, 17, 9, 3, 12, 30, 2, 8, 4], seed=3)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def command(models, prompts, tmp_path):
    """Arguments of a run into ``out.jsonl``."""
    paths = {
        "prompts": prompts,
        "target": models / "target",
        "draft": models / "draft",
        "output": tmp_path / "out.jsonl",
    }
    numbers = {
        "batch-size": 4,
        "num-draft-tokens": 3,
        "max-new-tokens": NEW_TOKENS,
        "dtype": "float32",
        "device": "cpu",
    }
    return ["generate", *(part for name, value in (paths | numbers).items() for part in (f"--{name}", str(value)))]


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def tokens_of(path):
    return [row["token_ids"] for row in read_rows(path)]


def test_rows_equal_the_target_alone(models, command, tmp_path, capsys):
    stats = tmp_path / "stats.json"
    assert main([*command, "--stats", str(stats)]) == 0
    shown = capsys.readouterr()
    rows = read_rows(tmp_path / "out.jsonl")
    model = AutoModelForCausalLM.from_pretrained(models / "target", dtype=torch.float32)
    tokenizer = make_tokenizer()
    for index, row in enumerate(rows):
        chat = [{"role": "user", "content": row["prompt"]}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert list(row) == KEYS and row["index"] == index
        assert row["token_ids"] == greedy_oracle(model, ids, NEW_TOKENS, EOS_IDS)
        assert row["num_tokens"] == len(row["token_ids"])
        assert row["text"] == tokenizer.decode(row["token_ids"], skip_special_tokens=True)
        assert row["finish_reason"] == ("eos" if row["token_ids"][-1] in EOS_IDS else "length")
    assert {row["finish_reason"] for row in rows} == {"eos", "length"}
    record = json.loads(stats.read_text())
    assert list(record) == STATS and list(record["stage_seconds"]) == ["draft", "verify", "accept", "commit"]
    assert record["tokens"] == sum(row["num_tokens"] for row in rows)
    assert record["drafted"] == sum(row["drafted"] for row in rows)
    assert 0 < record["accepted"] == sum(row["accepted"] for row in rows) < record["drafted"]
    assert record["exact_match"] is None and record["resumed_rows"] == 0
    assert "10 prompts" in shown.out and "tokens/s" in shown.out
    assert "generating 10/10" in shown.err and "\r" not in shown.err
    assert {path.name for path in tmp_path.iterdir()} == {
        *("prompts.jsonl", "out.jsonl", "out.jsonl.journal", "stats.json")
    }


@pytest.mark.parametrize(
    "other", [["--draft", "ngram"], ["--draft", "self:~1"], ["--method", "autoregressive"], ["--layout", "padded"]]
)
def test_every_way_gives_the_same_text(command, tmp_path, other):
    assert main(command) == 0
    expected = tokens_of(tmp_path / "out.jsonl")
    (tmp_path / "out.jsonl").unlink()
    assert main([*command, *other]) == 0
    assert tokens_of(tmp_path / "out.jsonl") == expected


def test_the_ragged_layout_gives_the_same_text_and_moves_nothing(command, tmp_path, capsys):
    out, stats = tmp_path / "out.jsonl", tmp_path / "stats.json"
    records = {}
    for layout in ("padded", "ragged"):
        out.unlink(missing_ok=True)
        assert main([*command, "--layout", layout, "--stats", str(stats)]) == 0
        records[layout] = json.loads(stats.read_text()) | {"rows": read_rows(out)}
        assert records[layout]["layout"] == layout
    assert records["ragged"]["rows"] == records["padded"]["rows"]
    assert records["ragged"]["bytes_moved"] == 0 < records["padded"]["bytes_moved"]
    capsys.readouterr()
    assert_refused([*command, "--resume"], capsys, "layout was 'ragged', is 'auto'")


def test_answers_are_shown_without_an_output(models, tmp_path, monkeypatch, capsys):
    (tmp_path / "p.txt").write_text("[bold]abc\n")
    assert (
        main(["generate", "--prompts", str(tmp_path / "p.txt"), "--target", str(models / "plain"), "--dtype=float32"])
        == 0
    )
    assert "[bold]abc" in capsys.readouterr().out


def test_a_terminal_that_is_not_utf_8_shows_escapes(models, tmp_path):
    (tmp_path / "p.txt").write_text("abc\u2028é\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "specdec_fast", "generate", "--prompts", tmp_path / "p.txt"]
        + ["--target", models / "plain", "--dtype=float32", "--max-new-tokens=2"],
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "\\xe9" in done.stdout, done.stderr


def test_check_passes_and_finds_a_planted_difference(command, tmp_path, capsys):
    out, stats = tmp_path / "out.jsonl", tmp_path / "stats.json"
    assert main([*command, "--check", "--stats", str(stats)]) == 0
    assert "100.0% exact match" in capsys.readouterr().out
    record = json.loads(stats.read_text())
    assert (record["exact_match"], record["partial_match"], record["near_ties"]) == (1.0, 1.0, 0)
    rows = read_rows(out)
    rows[7]["token_ids"][1] = 3 + rows[7]["token_ids"][1] % 90
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([*command, "--resume", "--check"]) == 1
    assert "prompt 7: MISMATCH at token 1" in capsys.readouterr().out


def test_exspec_gives_the_same_text_and_says_how_each_prompt_went(command, tmp_path, capsys):
    assert main(command) == 0
    expected = tokens_of(tmp_path / "out.jsonl")
    (tmp_path / "out.jsonl").unlink()
    stats = tmp_path / "stats.json"
    assert main([*command, "--method", "exspec", "--window", "8", "--check", "--stats", str(stats)]) == 0
    rows, record = read_rows(tmp_path / "out.jsonl"), json.loads(stats.read_text())
    assert [row["token_ids"] for row in rows] == expected and all(list(row) == KEYS for row in rows)
    assert list(record) == [*STATS, "requests"] and record["exact_match"] == 1
    assert sorted(request["index"] for request in record["requests"]) == list(range(10))
    assert all(0 < request["first_token_at"] <= request["ended_at"] for request in record["requests"])
    shown = capsys.readouterr()
    assert "100.0% exact match" in shown.out and "generating 10/10" in shown.err
    assert main([*command, "--resume", "--method", "exspec", "--window", "4"]) == 2
    assert "window was 8, is 4" in capsys.readouterr().err


def test_exspec_ends_a_prompt_that_does_not_fit_alone(command, tmp_path, capsys):
    exspec = [*command, "--method", "exspec", "--max-new-tokens", "490"]
    assert main(exspec) == 1
    rows = read_rows(tmp_path / "out.jsonl")
    failed = [row["index"] for row in rows if "error" in row]
    assert failed == [6] and rows[6]["finish_reason"] == "error" and rows[6]["token_ids"] == []
    assert "33 tokens; with max_new_tokens=490 it outgrows the most of 512" in rows[6]["error"]
    assert f"prompt 6 failed: {rows[6]['error']}" in capsys.readouterr().err
    assert main([*exspec, "--resume"]) == 1
    assert "nothing to do" in capsys.readouterr().err


def test_a_killed_exspec_run_loses_no_finished_row(command, tmp_path):
    out = tmp_path / "out.jsonl"
    exspec = [*command, "--method", "exspec", "--batch-size", "2"]
    assert main(exspec) == 0
    unbroken = tokens_of(out)
    out.unlink()
    assert killed(exspec, after=6).returncode == -signal.SIGKILL
    recorded = [json.loads(line) for line in (tmp_path / "out.jsonl.journal").read_text().splitlines()[1:]]
    assert len(recorded) == 6
    stats = tmp_path / "stats.json"
    assert main([*exspec, "--resume", "--stats", str(stats)]) == 0
    assert tokens_of(out) == unbroken
    record = json.loads(stats.read_text())
    assert record["resumed_rows"] == 6
    assert sorted(r["index"] for r in record["requests"] + recorded) == list(range(10))


def killed(command, after):
    """Run ``command`` in a process that kills itself right after it recorded ``after`` rows."""
    script = f"""
        import os, signal, sys
        import torch
        from specdec_fast.cli import main
        from specdec_fast.cli.journal import Journal

        torch.set_num_threads(1)
        append = Journal.append

        def append_and_die(self, row):
            append(self, row)
            if len(self.rows) == {after}:
                os.kill(os.getpid(), signal.SIGKILL)

        Journal.append = append_and_die
        main(sys.argv[1:])
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", textwrap.dedent(script), *command], env=environment, check=False)


def test_a_killed_run_resumes_to_the_same_file(command, tmp_path, capsys):
    out, journal = tmp_path / "out.jsonl", tmp_path / "out.jsonl.journal"
    assert main(command) == 0
    unbroken = out.read_bytes()
    out.unlink()
    assert killed(command, after=6).returncode == -signal.SIGKILL
    recorded = journal.read_bytes()
    assert not out.exists() and len(recorded.splitlines()) == 7
    journal.write_bytes(recorded + b'{"index": 9, "pro')
    assert main(command) == 2
    assert "holds 6 finished rows: pass --resume or delete it" in capsys.readouterr().err
    assert main([*command, "--resume", "--num-draft-tokens", "2"]) == 2
    assert "num_draft_tokens was 3, is 2" in capsys.readouterr().err
    stats = tmp_path / "stats.json"
    assert main([*command, "--resume", "--stats", str(stats)]) == 0
    assert out.read_bytes() == unbroken and len(journal.read_bytes().splitlines()) == 1
    record = json.loads(stats.read_text())
    # the first batch is complete, the second is decoded anew
    assert record["resumed_rows"] == 6
    assert record["tokens"] == sum(row["num_tokens"] for row in read_rows(out)[4:])
    capsys.readouterr()
    stats.unlink()
    assert main([*command, "--resume", "--stats", str(stats)]) == 0
    assert "nothing to do" in capsys.readouterr().err and out.read_bytes() == unbroken
    record = json.loads(stats.read_text())
    assert list(record) == STATS and record["resumed_rows"] == 10 and record["tokens"] == record["drafted"] == 0
    assert_refused([*command, "--resume", "--max-new-tokens", "3"], capsys, "max_new_tokens was 24, is 3")


def interrupt_after(monkeypatch, count):
    append = Journal.append

    def append_and_interrupt(self, row):
        append(self, row)
        if len(self.rows) == count:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Journal, "append", append_and_interrupt)


def test_ctrl_c_says_how_to_go_on(command, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        interrupt_after(patch, 5)
        assert main(command) == 130
    assert "stopped: 5 of 10 prompts are done and kept; run the same command with --resume" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0
    assert len(tokens_of(tmp_path / "out.jsonl")) == 10


def test_ctrl_c_before_the_first_row_promises_nothing(command, monkeypatch, capsys):
    monkeypatch.setattr(Journal, "append", lambda self, row: signal.raise_signal(signal.SIGINT))
    assert main(command) == 130
    assert capsys.readouterr().err.endswith("stopped: 0 of 10 prompts are done\n")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--num-draft-tokens": "0"}, "--num-draft-tokens"),
        ({"--batch-size": "0"}, "--batch-size"),
        ({"--batch-size": "four"}, "--batch-size"),
        ({"--max-new-tokens": "0"}, "--max-new-tokens"),
        ({"--method": "magic"}, "--method"),
        ({"--layout": "sparse"}, "--layout"),
        ({"--unknown": "1"}, "--unknown"),
        ({"--dtype": "int8"}, "unknown dtype int8"),
        ({"--device": "tpu"}, "unknown device tpu"),
        ({"--target": "no-such-organisation/model"}, "cannot load the config of no-such-organisation/model"),
        ({"--target": "state-space"}, "state"),
        ({"--draft": "no-such-organisation/model"}, "cannot load the config of no-such-organisation/model"),
        ({"--draft": "other-tokenizer"}, "tokenizer is not the target's"),
        ({"--draft": "state-space"}, "state"),
        ({"--draft": "head-only"}, "its files lack 29 tensors"),
        ({"--target": "~no-such-user/model"}, "no model at ~no-such-user/model"),
        ({"--target": "b\udcff"}, "--target is not UTF-8"),
        ({"--draft": "b\udcff"}, "--draft is not UTF-8"),
        ({"--device": "b\udcff"}, "unknown device b\\udcff"),
        ({"--draft": "self:"}, "layers"),
        ({"--draft": "self:7"}, "layers"),
        ({"--draft": "self:²"}, "neither an index nor a range"),
        ({"--draft": "self:0-999999999"}, "not within the model's layers"),
        ({"--draft": "self:0-99999999999"}, "neither an index nor a range"),
        ({"--window": "8"}, "--window needs --method exspec"),
        ({"--method": "exspec", "--window": "2"}, "window=2: need an integer of at least 4"),
        ({"--method": "autoregressive", "--layout": "ragged"}, "--layout needs --method eqspec or exspec"),
        ({"--prompts": "/no/such/file.txt"}, "cannot read prompts"),
        ({"--output": "/no/such/folder/out.jsonl"}, "there is no folder"),
        ({"--output": "/proc/out.jsonl"}, "cannot write"),
        ({"--output": ""}, "it is no regular file"),
        ({"--stats": "/no/such/folder/stats.json"}, "there is no folder"),
        ({"--max-new-tokens": "500"}, "prompt 2 is too long: 20 tokens and 500 new"),
    ],
)
def test_bad_arguments(models, command, tmp_path, capsys, changes, message):
    for option, value in changes.items():
        command += [option, str(models / value) if (models / value).is_dir() else value]
    assert_refused(command, capsys, message)
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"], "nothing is left behind"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", "", "has no prompts"),
        ("p.jsonl", '{"prompt": " "}\n', "line 1: prompt is empty"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt"\n', "line 2 is not valid JSON"),
    ],
)
def test_bad_prompts(command, tmp_path, capsys, name, content, message):
    (tmp_path / name).write_text(content)
    assert_refused([*command, "--prompts", str(tmp_path / name)], capsys, message)


def test_combinations_that_make_no_sense(models, command, prompts, tmp_path, capsys):
    assert_refused(["generate", "--prompts", str(prompts), "--resume"], capsys, "--resume needs --output")
    assert_refused([*command, "--output", str(prompts)], capsys, "is the prompts file")
    assert_refused([*command, "--stats", str(tmp_path / "out.jsonl")], capsys, "must be different files")
    assert_refused([*command, "--stats", str(tmp_path / "out.jsonl.journal")], capsys, "must be different files")
    journal = tmp_path / "out.jsonl.journal"
    journal.symlink_to(prompts)
    assert_refused(command, capsys, "is the prompts file")
    journal.unlink()
    (tmp_path / "loop").symlink_to("loop")
    for option in ("--output", "--stats"):
        assert_refused([*command, option, str(tmp_path / "loop")], capsys, "form a loop")
    assert_refused([*command, "--target", str(models / "plain"), "--chat"], capsys, "no chat template")
    assert_refused([], capsys, "Missing command")


def assert_refused(arguments, capsys, message):
    assert main(arguments) == 2
    *progress, last = capsys.readouterr().err.splitlines()
    assert last.startswith("error: ") and message in last
    assert all(line.startswith(("loading ", "warning: the generation config ")) for line in progress)


def test_what_a_record_brings_along_comes_back(command, tmp_path):
    chat = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    records = [
        {"id": 7, "prompt": "abc", "meta": {"k": [1.5, None]}, "text": "mine", "index": "x"},
        {"custom_id": "r", "body": {"model": "m", "messages": chat, "temperature": 0}},
        {"input_ids": [5, 9, 30], "labels": [1]},
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main([*command, "--prompts", str(tmp_path / "p.jsonl"), "--check"]) == 0
    first, batch, ids = read_rows(tmp_path / "out.jsonl")
    assert list(first) == [*KEYS, "id", "meta", "input_fields"] and first["prompt"] == "abc" and first["index"] == 0
    assert (first["id"], first["meta"]) == (7, {"k": [1.5, None]})
    assert first["input_fields"] == {"text": "mine", "index": "x"}
    assert list(batch) == [*KEYS, "messages", "custom_id", "body"] and batch["messages"] == chat
    assert batch["body"] == {"model": "m", "temperature": 0}
    assert list(ids) == [*KEYS, "labels"] and ids["prompt"] == "[5, 9, 30]"
    assert main([*command, "--prompts", str(tmp_path / "p.jsonl"), "--resume"]) == 0
    records[0]["id"] = 8
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main([*command, "--prompts", str(tmp_path / "p.jsonl"), "--resume"]) == 2


@pytest.mark.parametrize("method", ["eqspec", "exspec"])
def test_rows_on_standard_output_are_in_order_and_alone_there(command, tmp_path, capsys, method):
    assert main([*command, "--method", method]) == 0
    expected = (tmp_path / "out.jsonl").read_text()
    (tmp_path / "out.jsonl").unlink()
    capsys.readouterr()
    before = {path.name for path in tmp_path.iterdir()}
    assert main([*command, "--method", method, "--output", "-", "--check"]) == 0
    shown = capsys.readouterr()
    untimed = [[row["index"], row["token_ids"]] for row in map(json.loads, shown.out.splitlines())]
    assert untimed == [[row["index"], row["token_ids"]] for row in map(json.loads, expected.splitlines())]
    assert "10 prompts" in shown.err and "100.0% exact match" in shown.err
    assert {path.name for path in tmp_path.iterdir()} == before, "no journal, and no file called -"
    assert_refused([*command, "--output", "-", "--resume"], capsys, "--resume needs --output")


@pytest.mark.parametrize("method", ["eqspec", "exspec"])
def test_skip_errors_goes_past_bad_lines_and_records_them(command, prompts, tmp_path, capsys, method):
    command = [*command, "--method", method]
    assert main(command) == 0
    expected = tokens_of(tmp_path / "out.jsonl")
    lines = prompts.read_text().splitlines()
    bad = ["{", json.dumps({"prompt": "a", "id": 3, "max_tokens": 5}), json.dumps({"prompt": "a" * 600})]
    prompts.write_text("\n".join([bad[0], *lines[:2], "", *bad[1:], *lines[2:]]))
    capsys.readouterr()
    assert_refused(command, capsys, "line 1 is not valid JSON")
    (tmp_path / "out.jsonl").unlink()
    assert main([*command, "--skip-errors", "--check"]) == 1
    rows = read_rows(tmp_path / "out.jsonl")
    assert [row["index"] for row in rows if "error" in row] == [0, 3, 4]
    assert [row["token_ids"] for row in rows if "error" not in row] == expected
    assert [rows[index]["finish_reason"] for index in (0, 3, 4)] == ["error"] * 3
    assert rows[0]["prompt"] == "{" and "not valid JSON" in rows[0]["error"]
    assert rows[3]["id"] == 3 and "max_tokens 5 is not served" in rows[3]["error"]
    assert "603 tokens" in rows[4]["error"]
    assert "prompt 3 failed: " in capsys.readouterr().err
    assert main([*command, "--skip-errors", "--resume"]) == 1
    assert "nothing to do" in capsys.readouterr().err


def shell(line, *arguments):
    """Run a line of bash in which ``"$@"`` is the command line with ``arguments``."""
    command = ["bash", "-c", line, "bash", sys.executable, "-m", "specdec_fast", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("buffered", ["env -u PYTHONUNBUFFERED", "env PYTHONUNBUFFERED=1"])
def test_a_reader_that_has_gone_ends_the_run_as_sigpipe_would_and_loses_nothing(buffered, command, tmp_path):
    for arguments in (["--version"], [*command, "--stats", str(tmp_path / "stats.json")]):
        done = shell(buffered + ' "$@" | true; exit ${PIPESTATUS[0]}', *arguments)
        assert done.returncode == 128 + signal.SIGPIPE and "Traceback" not in done.stderr, done.stderr
        assert "BrokenPipe" not in done.stderr
    assert len(tokens_of(tmp_path / "out.jsonl")) == 10 and (tmp_path / "stats.json").exists()


def test_standard_output_that_cannot_be_written_is_an_error(command, tmp_path):
    closed = shell('"$@" >&-', *command)
    assert closed.returncode == 2 and not (tmp_path / "out.jsonl").exists()
    assert closed.stderr == "error: standard output is closed; send it to a file, /dev/null for instance\n"
    full = shell('env -u PYTHONUNBUFFERED "$@" >/dev/full', "--version")
    assert full.returncode == 2
    assert full.stderr == "error: cannot write standard output: No space left on device\n"
    assert shell('"$@" 2>&-', "--version").stdout.startswith("specdec-fast ")


def test_a_full_disk_is_named_with_what_is_kept_and_how_to_go_on(command, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        fill_after(patch, 6)
        assert main(command) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: cannot write ") and "out.jsonl.journal: No space left on device; " in error
    assert error.endswith("stopped: 5 of 10 prompts are done and kept; run the same command with --resume to go on")
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full_disk)
        assert main([*command, "--resume"]) == 2
    assert "out.jsonl: No space left on device; stopped: 10 of 10 prompts are done and kept" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0 and len(tokens_of(tmp_path / "out.jsonl")) == 10


def test_every_command_knows_h_and_the_program_its_version(capsys):
    for arguments in ([], ["generate"], ["audit"], ["info"]):
        assert main([*arguments, "-h"]) == 0
        assert "Usage: specdec-fast" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"specdec-fast {__version__}\n"


def test_help_names_candidates():
    helps = {name: {p.name: p.help for p in command.params} for name, command in get_command(app).commands.items()}
    named = re.search(r"\((.*)\)", helps["audit"]["candidate"]).group(1).replace("faults: ", "")
    assert set(re.split("[,;] ", named)) == set(NAMES)


def test_the_shell_completes_options(monkeypatch, capsys):
    monkeypatch.setenv("_SPECDEC_FAST_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "specdec-fast generate --skip")
    monkeypatch.setenv("COMP_CWORD", "2")
    with pytest.raises(SystemExit, match="0"):
        main([])
    assert capsys.readouterr().out.split() == ["--skip-errors"]


def test_info_names_every_backend_and_why_it_cannot_run(capsys):
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    assert "transformers" in shown
    for backend in backends.available():
        line = next(line for line in reversed(shown.splitlines()) if line.split()[0] == backend.name)
        assert ("available" in line) == backend.available and backend.reason in line


def test_help_loads_no_framework():
    script = "import sys; from specdec_fast.cli import main; main(['--help']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True)


def test_module_entry_point_has_no_traceback():
    done = subprocess.run(
        [sys.executable, "-m", "specdec_fast", "generate"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: Missing option '--prompts'.\n"


def test_a_check_says_which_prompts_it_has_not_seen(capsys):
    check = EquivalenceCheck(SimpleNamespace(decode=lambda _: OracleRow([7, 8], [1.0, 1.0], 0.0)))
    print_check(check.report(), 2)
    assert capsys.readouterr().out == "check: none of 2 prompts has a text to compare\n"
    check.add(0, [5], [7, 8])
    print_check(check.report(), 2)
    assert (
        "100.0% exact match" in (shown := capsys.readouterr().out) and "(of 1 of 2 prompts, the rest failed)" in shown
    )
    assert "near-ties (less than" not in shown
    print_check(check.report(), 1)
    assert "the rest failed" not in capsys.readouterr().out


def test_a_check_says_how_close_its_near_ties_are(capsys):
    check = EquivalenceCheck(SimpleNamespace(decode=lambda _: OracleRow([7, 8], [1.0, 5.0], 1.1)))
    check.add(0, [5], [7, 8])
    print_check(check.report(), 1)
    shown = capsys.readouterr().out
    assert "0 near-ties (less than 2.2 logits apart), 0 mismatches" in shown
    assert "weak verdict: tokens less than 2.2 logits apart pass as near-ties, and 50% of" in shown
