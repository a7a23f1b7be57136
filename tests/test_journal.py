"""The journal: nothing finished is lost, nothing foreign is taken up."""

import json
import resource

import pytest

from specdec_fast.cli.journal import Journal, Rows, check_writable
from specdec_fast.errors import InputError
from specdec_fast.prompts import Prompt

PROMPTS = [Prompt(i, f"prompt {i} \u2028") for i in range(3)]
SETTINGS = {"target": "smollm2", "batch_size": 2, "chat": None}


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.jsonl"


def start(out, prompts=PROMPTS, settings=SETTINGS, resume=False):
    return Journal(out, prompts, settings, resume=resume)


def row(index, text="text"):
    counters = {"rounds": 2, "drafted": 3, "accepted": 1}
    tokens = {"token_ids": [5, 2], "num_tokens": 2, "finish_reason": "eos"}
    return {"index": index, "prompt": PROMPTS[index].text, "text": text, **tokens, **counters}


def finished(out, settings=SETTINGS):
    with start(out, settings=settings) as journal:
        for index in range(3):
            journal.append(row(index))
        journal.finish()
    return out


def journal_of(out):
    return out.with_name("out.jsonl.journal")


def interrupted(out, *indices):
    with start(out) as journal:
        for index in indices:
            journal.append(row(index))
    return journal_of(out)


def test_output_is_sorted_and_the_journal_keeps_its_header(out):
    with start(out) as journal:
        for index in (2, 0, 1):
            journal.append(row(index))
            assert not out.exists()
        assert journal.complete
        journal.finish()
    assert [json.loads(line) for line in out.read_bytes().splitlines()] == [row(0), row(1), row(2)]
    (header,) = journal_of(out).read_bytes().splitlines()
    assert json.loads(header).items() >= SETTINGS.items()
    assert {path.name for path in out.parent.iterdir()} == {"out.jsonl", "out.jsonl.journal"}


def test_a_row_is_on_disk_when_append_returns(out):
    journal = start(out)
    journal.append(row(1))
    header, recorded = journal_of(out).read_text(encoding="utf-8").split("\n")[:2]
    assert json.loads(header)["batch_size"] == 2 and json.loads(recorded) == row(1)


def test_resume_keeps_rows_and_ignores_their_repetition(out):
    interrupted(out, 1)
    with start(out, resume=True) as journal:
        assert journal.resumed == 1 and list(journal.rows) == [1] and not journal.complete
        journal.append(row(1, "computed again"))
        journal.append(row(0))
    with start(out, resume=True) as journal:
        assert journal.rows == {1: row(1), 0: row(0)} and journal.resumed == 2


def test_resume_without_anything_starts_from_nothing(out):
    with start(out, resume=True) as journal:
        assert journal.resumed == 0 and journal_of(out).exists()


@pytest.mark.parametrize("cut", [1, 10, 20])
def test_a_line_cut_short_is_dropped(out, cut):
    path = interrupted(out, 0, 1)
    path.write_bytes(path.read_bytes()[:-cut])
    with start(out, resume=True) as journal:
        assert list(journal.rows) == [0]
        journal.append(row(1))
        journal.append(row(2))
    assert [json.loads(line)["index"] for line in path.read_bytes().splitlines()[1:]] == [0, 1, 2]


def test_a_header_cut_short_holds_no_rows(out):
    path = interrupted(out, 0)
    path.write_bytes(path.read_bytes()[:12])
    with start(out, resume=True) as journal:
        assert not journal.rows
        journal.append(row(0))
    with start(out, resume=True) as journal:
        assert journal.resumed == 1


def test_a_journal_is_not_overwritten(out):
    path = interrupted(out, 0, 2)
    with pytest.raises(InputError, match=r"holds 2 finished rows: pass --resume or delete it"):
        start(out)
    assert len(path.read_bytes().splitlines()) == 3


def test_other_settings_are_named_with_both_values(out):
    interrupted(out, 0)
    with pytest.raises(InputError, match=r"batch_size was 2, is 4; chat was None, is True$"):
        start(out, settings=SETTINGS | {"batch_size": 4, "chat": True}, resume=True)
    with pytest.raises(InputError, match="prompts_sha256 was"):
        start(out, prompts=[Prompt(i, "other") for i in range(3)], resume=True)


CORRUPT = [
    (b"nonsense", "Expecting value"),
    (b"[1]", "no JSON object"),
    (b'{"a": ' * 100_000, "recursion"),
    (b'{"index": "\\ud800"}', "surrogate"),
    ({"index": 9}, "no prompt has its index"),
    ({"index": 0.0}, "index must be of type int"),
    ({"index": True}, "index must be of type int"),
    ({"prompt": "another"}, "another prompt 0"),
    ({"token_ids": None}, "token_ids must be of type list"),
    ({"token_ids": [1, "2"]}, "token_ids must be integers"),
    ({"finish_reason": None}, "finish_reason must be of type str"),
]


@pytest.mark.parametrize("change", CORRUPT, ids=[reason for _, reason in CORRUPT])
def test_corrupt_lines_are_named(out, change):
    line, reason = change
    if isinstance(line, dict):
        line = json.dumps(row(0) | line).encode()
    path = interrupted(out, 0)
    header, recorded = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([header, line, recorded, b""]))
    with pytest.raises(InputError, match=rf"journal line 2 is corrupt: .*{reason}"):
        start(out, resume=True)
    path.unlink()
    lines = finished(out).read_bytes().splitlines()
    out.write_bytes(b"\n".join([lines[1], line, lines[2]]))
    with pytest.raises(InputError, match=rf"jsonl line 2 is corrupt: .*{reason}"):
        start(out, resume=True)


@pytest.mark.parametrize("resume", [False, True])
def test_a_foreign_file_in_the_journal_s_place_stays(out, resume):
    journal_of(out).write_text('{"prompt": "mine"}\n')
    with pytest.raises(InputError, match="line 1 is corrupt: it is no header"):
        start(out, resume=resume)
    assert journal_of(out).read_text() == '{"prompt": "mine"}\n'


def test_a_complete_output_leaves_nothing_to_do(out):
    interrupted(out, 0, 1, 2)
    with start(out, resume=True) as journal:
        assert journal.complete and not out.exists()
        journal.finish()
    before = out.read_bytes()
    with start(out, resume=True) as journal:
        assert journal.complete and journal.resumed == 3
        journal.finish()
    assert out.read_bytes() == before


def test_a_complete_output_of_other_settings_is_not_resumed(out):
    finished(out)
    with pytest.raises(InputError, match=r"batch_size was 2, is 4$"):
        start(out, settings=SETTINGS | {"batch_size": 4}, resume=True)
    chats = [Prompt(p.index, p.text, [{"role": "system", "content": "\ud800"}]) for p in PROMPTS]
    with pytest.raises(InputError, match="prompts_sha256 was"):
        start(out, prompts=chats, resume=True)
    with start(out, resume=True) as journal:
        assert journal.complete


def test_a_complete_output_is_written_anew_without_resume(out):
    before = finished(out).read_bytes()
    with start(out, settings=SETTINGS | {"batch_size": 4}) as journal:
        assert not journal.rows
    with start(out, resume=True) as journal:
        assert journal.complete, "a run without rows changed nothing"
    with start(out, settings=SETTINGS | {"batch_size": 4}) as journal:
        journal.append(row(1, "new"))
    assert out.read_bytes() == before
    with start(out, settings=SETTINGS | {"batch_size": 4}, resume=True) as journal:
        assert journal.rows == {1: row(1, "new")}


def test_an_output_that_lost_rows_or_is_gone(out):
    lines = finished(out).read_bytes().splitlines(keepends=True)
    out.write_bytes(lines[0])
    with pytest.raises(InputError, match="rows of 1 of the 3 prompts"):
        start(out, resume=True)
    out.unlink()
    with start(out, settings={}, resume=True) as journal:
        assert not journal.rows


def test_an_output_without_a_journal_is_not_resumed(out):
    finished(out)
    journal_of(out).unlink()
    with pytest.raises(InputError, match="no journal to resume from"):
        start(out, resume=True)
    assert [path.name for path in out.parent.iterdir()] == ["out.jsonl"]


def test_one_run_at_a_time(out):
    with start(out) as journal:
        for resume in (False, True):
            with pytest.raises(InputError, match=r"jsonl\.journal is in use by another run"):
                start(out, resume=resume)
        journal.append(row(0))
    with start(out, resume=True) as journal:
        assert list(journal.rows) == [0]


def test_a_failed_write_leaves_the_rows_and_no_temporary_file(out, monkeypatch):
    def fail(descriptor):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail)
        with pytest.raises(OSError, match="disk full"):
            finished(out)
    assert [path.name for path in out.parent.iterdir()] == ["out.jsonl.journal"]
    with start(out, resume=True) as journal:
        assert journal.complete


def test_a_row_that_a_full_disk_cuts_short_is_named_and_not_kept(out):
    journal = start(out)
    journal.append(row(0))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (journal_of(out).stat().st_size + 20, limits[1]))
    try:
        with pytest.raises(InputError, match=r"cannot write .*out\.jsonl\.journal: File too large"), journal:
            journal.append(row(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(journal.rows) == [0]
    with start(out, resume=True) as journal:
        assert list(journal.rows) == [0]


def test_a_run_without_rows_leaves_no_journal(out):
    with pytest.raises(RuntimeError), start(out):
        raise RuntimeError
    assert not journal_of(out).exists()


def test_unwritable_places(tmp_path):
    with pytest.raises(InputError, match="there is no folder"):
        check_writable(tmp_path / "none" / "out.jsonl")
    with pytest.raises(InputError, match="no regular file"):
        check_writable(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError, match="form a loop"):
        check_writable(tmp_path / "loop")
    with pytest.raises(InputError, match="cannot write"):
        start(tmp_path.__class__("/proc/out.jsonl"))


def test_rows_in_memory():
    with Rows(2) as rows:
        rows.append(row(1, "first"))
        rows.append(row(1, "second"))
        assert rows.rows == {1: row(1, "first")} and not rows.complete
        rows.append(row(0))
        assert rows.complete
