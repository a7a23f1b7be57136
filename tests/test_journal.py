"""The journal: nothing finished is lost, nothing foreign is taken up."""

import json

import pytest

from specdec_fast.errors import InputError
from specdec_fast.journal import Journal, Rows, check_writable
from specdec_fast.prompts import Prompt

PROMPTS = [Prompt(i, f"prompt {i} \u2028") for i in range(3)]
SETTINGS = {"target": "smollm2", "batch_size": 2, "chat": None}


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.jsonl"


def start(out, prompts=PROMPTS, settings=SETTINGS, resume=False):
    return Journal(out, prompts, settings, resume=resume)


def row(index, text="text"):
    return {"index": index, "prompt": PROMPTS[index].text, "text": text}


def journal_of(out):
    return out.with_name("out.jsonl.journal")


def interrupted(out, *indices):
    with start(out) as journal:
        for index in indices:
            journal.append(row(index))
    return journal_of(out)


def test_output_is_sorted_and_the_journal_goes(out):
    with start(out) as journal:
        for index in (2, 0, 1):
            journal.append(row(index))
            assert not out.exists()
        assert journal.complete
        journal.finish()
    assert [json.loads(line) for line in out.read_bytes().splitlines()] == [row(0), row(1), row(2)]
    assert [path.name for path in out.parent.iterdir()] == ["out.jsonl"]


def test_a_row_is_on_disk_when_append_returns(out):
    journal = start(out)
    journal.append(row(1))
    header, recorded = journal_of(out).read_text().split("\n")[:2]
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


@pytest.mark.parametrize(
    ("line", "message"), [(b"nonsense", "line 2 is corrupt"), (b'{"index": 9}', "line 2 is corrupt")]
)
def test_corrupt_lines_are_named(out, line, message):
    path = interrupted(out, 0)
    header, recorded = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([header, line, recorded, b""]))
    with pytest.raises(InputError, match=message):
        start(out, resume=True)


def test_a_complete_output_leaves_nothing_to_do(out):
    interrupted(out, 0, 1, 2)
    with start(out, resume=True) as journal:
        assert journal.complete
        journal.finish()
    before = out.read_bytes()
    with start(out, resume=True) as journal:
        assert journal.complete and journal.resumed == 3
        journal.finish()
    assert out.read_bytes() == before and not journal_of(out).exists()


def test_an_output_of_other_prompts_is_not_resumed(out):
    out.write_text(json.dumps(row(0)) + "\n")
    with pytest.raises(InputError, match="not the output of these prompts"):
        start(out, resume=True)
    assert out.exists()


def test_a_run_without_rows_leaves_no_journal(out):
    with pytest.raises(RuntimeError), start(out):
        raise RuntimeError
    assert not journal_of(out).exists()


def test_unwritable_places(tmp_path):
    with pytest.raises(InputError, match="there is no folder"):
        check_writable(tmp_path / "none" / "out.jsonl")
    with pytest.raises(InputError, match="no regular file"):
        check_writable(tmp_path)
    with pytest.raises(InputError, match="cannot write"):
        start(tmp_path.__class__("/proc/out.jsonl"))


def test_rows_in_memory():
    with Rows(2) as rows:
        rows.append(row(1, "first"))
        rows.append(row(1, "second"))
        assert rows.rows == {1: row(1, "first")} and not rows.complete
        rows.append(row(0))
        assert rows.complete
