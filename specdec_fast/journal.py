"""Finished rows on disk at once: a run that is killed loses none of them and can be resumed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Self

from .errors import InputError
from .prompts import Prompt

Row = dict[str, Any]
Settings = dict[str, Any]


class Rows:
    """Finished rows in memory, by prompt index.

    Attributes:
        rows: the rows so far.
        resumed: how many of them an earlier run recorded.
    """

    def __init__(self, total: int):
        self.total = total
        self.rows: dict[int, Row] = {}
        self.resumed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def complete(self) -> bool:
        """Every prompt has its row."""
        return len(self.rows) == self.total

    def append(self, row: Row) -> None:
        """Keep a finished row, unless its index has one."""
        self.rows.setdefault(row["index"], row)

    def finish(self) -> None:
        """All rows are there."""


class Journal(Rows):
    """Finished rows in ``OUT.jsonl.journal``: a header with the run's settings, then a line per row.

    As a context manager it closes the file, and removes it if it holds no row. ``finish`` turns it into the output.

    Args:
        output: the file to write in the end.
        prompts: all prompts of the run.
        settings: whatever changes the rows; a resumed run must have the same.
        resume: keep the rows of an earlier run.

    Raises:
        InputError: ``output`` cannot be written; there is a journal but no ``resume``; the journal belongs to
            other settings; or there is only an output that is not these prompts'.

    Example:
        >>> with Journal(Path("out.jsonl"), prompts, {"batch_size": 8}, resume=False) as journal:
        ...     journal.append({"index": 0, "prompt": "hello", "text": "world"})
        ...     journal.finish()
    """

    def __init__(self, output: Path, prompts: Sequence[Prompt], settings: Settings, *, resume: bool):
        super().__init__(len(prompts))
        check_writable(output)
        self.output = output.resolve()
        self.path = self.output.with_name(f"{self.output.name}.journal")
        self._file: IO[str] | None = None
        header = {**settings, "prompts": len(prompts), "prompts_sha256": _digest(prompts)}
        if self.path.exists():
            self._take_up(header, resume)
        elif resume and self.output.exists():
            self._read_output(prompts)
        self.resumed = len(self.rows)
        if not self.complete or self.path.exists():
            self._open(header)

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()
            if not self.rows:
                self.path.unlink()

    def append(self, row: Row) -> None:
        """Record a finished row, unless its index has one; a process killed right after does not lose it."""
        if row["index"] not in self.rows:
            super().append(row)
            self._write_line(row)

    def finish(self) -> None:
        """Write the output, sorted by index and in one step, and remove the journal."""
        if self._file is None:
            return
        temporary = self.output.with_name(f"{self.output.name}.tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(f"{_dump(self.rows[index])}\n" for index in sorted(self.rows))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.output)
        self._file.close()
        self._file = None
        self.path.unlink()

    def _take_up(self, header: Settings, resume: bool) -> None:
        # a line that a kill cut short has no newline
        lines = self.path.read_bytes().split(b"\n")[:-1]
        records = [_parse(line, f"{self.path} line {number}") for number, line in enumerate(lines, 1)]
        found, rows = (records[0], records[1:]) if records else (header, [])
        if not resume:
            raise InputError(f"{self.path} holds {len(rows)} finished rows: pass --resume or delete it")
        different = [key for key in header | found if header.get(key) != found.get(key)]
        if different:
            changes = "; ".join(f"{key} was {found.get(key)!r}, is {header.get(key)!r}" for key in different)
            raise InputError(f"{self.path} was written with other settings: {changes}")
        for number, row in enumerate(rows, 2):
            if row.get("index") not in range(self.total):
                raise InputError(f"{self.path} line {number} is corrupt: no prompt has its index")
            self.rows.setdefault(row["index"], row)
        os.truncate(self.path, sum(len(line) + 1 for line in lines))

    def _read_output(self, prompts: Sequence[Prompt]) -> None:
        lines = self.output.read_bytes().splitlines()
        rows = [_parse(line, f"{self.output} line {number}") for number, line in enumerate(lines, 1)]
        wanted = [(prompt.index, prompt.text) for prompt in prompts]
        if [(row.get("index"), row.get("prompt")) for row in rows] != wanted:
            raise InputError(
                f"{self.output} is not the output of these prompts, and no journal is there to resume from"
            )
        self.rows = {row["index"]: row for row in rows}

    def _open(self, header: Settings) -> None:
        try:
            self._file = self.path.open("a", encoding="utf-8")
            if self._file.tell() == 0:
                self._write_line(header)
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror}") from error

    def _write_line(self, record: Row) -> None:
        assert self._file is not None
        self._file.write(f"{_dump(record)}\n")
        self._file.flush()


def check_writable(path: Path) -> None:
    """Raise ``InputError`` if ``path`` cannot be written as a file."""
    folder = path.parent
    if not folder.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {folder}")
    if path.exists() and not path.is_file():
        raise InputError(f"cannot write {path}: it is no regular file")
    if not os.access(folder, os.W_OK):
        raise InputError(f"cannot write {path}: no permission to write in {folder}")


def _digest(prompts: Sequence[Prompt]) -> str:
    return hashlib.sha256(_dump([[prompt.text, prompt.messages] for prompt in prompts]).encode()).hexdigest()


def _dump(record: Any) -> str:
    return json.dumps(record, ensure_ascii=False)


def _parse(line: bytes, where: str) -> Any:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where} is corrupt: {error}; delete the file to start over") from error
    if not isinstance(record, dict):
        raise InputError(f"{where} is corrupt: it is no JSON object; delete the file to start over")
    return record
