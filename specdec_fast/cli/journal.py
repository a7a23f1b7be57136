"""Finished rows on disk at once: a run that is killed loses none of them and can be resumed."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Self

from ..errors import InputError
from ..paths import writing
from ..prompts import Prompt

Row = dict[str, Any]
Settings = dict[str, Any]
_ROW = {
    "index": int,
    "prompt": str,
    "text": str,
    "token_ids": list,
    "num_tokens": int,
    "finish_reason": str,
    "rounds": int,
    "drafted": int,
    "accepted": int,
}


class Rows:
    """Finished rows in memory, by prompt index.

    Attributes:
        rows: the rows so far.
        resumed: how many of them an earlier run recorded.
        finished: all rows are where they shall be.
    """

    def __init__(self, total: int):
        self.total = total
        self.rows: dict[int, Row] = {}
        self.resumed = 0
        self.finished = False

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
        self.finished = True


class Journal(Rows):
    """Finished rows in ``OUT.jsonl.journal``: a header with the run's settings, then a line per row.

    ``finish`` moves the rows to the output and leaves the header, for a later run to compare its settings with. As a
    context manager it closes the file, and removes it if nothing was recorded. One journal serves one run at a time.

    Args:
        output: the file to write in the end.
        prompts: all prompts of the run.
        settings: whatever changes the rows; a resumed run must have the same.
        resume: keep the rows of an earlier run.

    Raises:
        InputError: ``output`` cannot be written; another run has the journal; it holds rows but no ``resume``; it
            belongs to other settings or is corrupt; or there is only an output, which says nothing of its settings.

    Example:
        >>> with Journal(Path("out.jsonl"), prompts, {"batch_size": 8}, resume=False) as journal:
        ...     journal.append({"index": 0, "prompt": "hello", ...})
        ...     journal.finish()
    """

    def __init__(self, output: Path, prompts: Sequence[Prompt], settings: Settings, *, resume: bool):
        super().__init__(len(prompts))
        self.output = check_writable(output)
        self.path = journal_path(output)
        self._prompts = prompts
        self._header = {**settings, "prompts": len(prompts), "prompts_sha256": _digest(prompts)}
        self._begun = False
        self._file = _open_locked(self.path)
        try:
            self._take_up(resume)
        except BaseException:
            self._close()
            raise
        self.resumed = len(self.rows)

    def __exit__(self, *_: object) -> None:
        self._close()

    def append(self, row: Row) -> None:
        """Record a finished row, unless its index has one; a process killed right after does not lose it."""
        if row["index"] in self.rows:
            return
        with writing(self.path):
            if not self._begun:
                # not before, so that a run without rows leaves the record of an earlier one
                self._file.truncate(0)
                self._write(row_line(self._header))
                self._begun = True
            self._write(row_line(row))
        super().append(row)

    def finish(self) -> None:
        """Write the output, sorted by index and in one step, and reduce the journal to its header."""
        if self.finished:
            return
        _replace(self.output, [self.rows[index] for index in sorted(self.rows)])
        _replace(self.path, [self._header | {"finished": True}])
        self._file.close()
        super().finish()

    def _write(self, line: bytes) -> None:
        while line:
            line = line[self._file.write(line) :]

    def _take_up(self, resume: bool) -> None:
        self._file.seek(0)
        # a line that a kill cut short has no newline
        lines = self._file.read().split(b"\n")[:-1]
        if not lines:
            if resume and self.output.exists():
                raise InputError(f"{self.output} has no journal to resume from: leave out --resume to write it anew")
            return
        header, *rows = _parse(self.path, lines)
        if "prompts_sha256" not in header:
            raise _corrupt(self.path, 1, "it is no header of a journal")
        finished = header.pop("finished", False)
        if not resume:
            if rows:
                raise InputError(f"{self.path} holds {len(rows)} finished rows: pass --resume or delete it")
            return
        if finished and not self.output.exists():
            return
        self._compare(header)
        if finished:
            rows = _parse(self.output, self.output.read_bytes().splitlines())
            self._keep(self.output, 1, rows)
            if not self.complete:
                raise InputError(f"{self.output} has rows of {len(self.rows)} of the {self.total} prompts only")
        else:
            self._keep(self.path, 2, rows)
            self._file.truncate(sum(len(line) + 1 for line in lines))
        self._begun, self.finished = True, finished

    def _compare(self, found: Settings) -> None:
        header = self._header
        different = [key for key in header | found if header.get(key) != found.get(key)]
        if different:
            changes = "; ".join(f"{key} was {found.get(key)!r}, is {header.get(key)!r}" for key in different)
            raise InputError(f"{self.path} was written with other settings: {changes}")

    def _keep(self, path: Path, first: int, rows: list[Row]) -> None:
        for number, row in enumerate(rows, first):
            for key, kind in _ROW.items():
                if type(row.get(key)) is not kind:
                    raise _corrupt(path, number, f"{key} must be of type {kind.__name__}")
            if any(type(token) is not int for token in row["token_ids"]):
                raise _corrupt(path, number, "token_ids must be integers")
            if row["index"] not in range(self.total):
                raise _corrupt(path, number, "no prompt has its index")
            if row["prompt"] != self._prompts[row["index"]].text:
                raise _corrupt(path, number, f"it is of another prompt {row['index']}")
            self.rows.setdefault(row["index"], row)

    def _close(self) -> None:
        if not self._file.closed:
            if os.fstat(self._file.fileno()).st_size == 0:
                self.path.unlink()
            self._file.close()


def check_writable(path: Path) -> Path:
    """Follow the symbolic links of ``path``; ``InputError`` if it cannot be written as a file."""
    real = Path(os.path.realpath(path))
    if real.is_symlink():
        raise InputError(f"cannot write {path}: its symbolic links form a loop")
    folder = real.parent
    if not folder.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {folder}")
    if real.exists() and not real.is_file():
        raise InputError(f"cannot write {path}: it is no regular file")
    if not os.access(folder, os.W_OK):
        raise InputError(f"cannot write {path}: no permission to write in {folder}")
    return real


def journal_path(output: Path) -> Path:
    """The journal of ``output``."""
    real = Path(os.path.realpath(output))
    return real.with_name(f"{real.name}.journal")


def _open_locked(path: Path) -> FileIO:
    with writing(path):
        # unbuffered, so that a full disk is noticed at the row that it cuts short, and not again at the end
        file = path.open("ab+", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # the run that held it may have put another file there, or none
        in_use = not os.path.samestat(os.fstat(file.fileno()), path.stat())
    except (BlockingIOError, FileNotFoundError):
        in_use = True
    if in_use:
        file.close()
        raise InputError(f"{path} is in use by another run")
    return file


def _replace(path: Path, records: list[Row]) -> None:
    """Write a JSONL file in one step."""
    # neither the name of anyone's output nor longer than the journal's
    temporary = path.with_name(f".specdec-{secrets.token_hex(4)}.tmp")
    try:
        with writing(path):
            with temporary.open("xb") as file:
                file.writelines(map(row_line, records))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _digest(prompts: Sequence[Prompt]) -> str:
    # escaped, since the early messages of a chat may hold surrogates
    return hashlib.sha256(json.dumps([_identity(prompt) for prompt in prompts]).encode()).hexdigest()


def _identity(prompt: Prompt) -> list[Any]:
    more = [prompt.token_ids, prompt.fields] if prompt.token_ids or prompt.fields else []
    return [prompt.text, prompt.messages, *more]


def row_line(record: Row) -> bytes:
    """A row as its line of a JSONL file."""
    return f"{json.dumps(record, ensure_ascii=False)}\n".encode()


def _parse(path: Path, lines: list[bytes]) -> list[Row]:
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            row_line(record)  # a surrogate could not be written again
        except (ValueError, RecursionError) as error:
            raise _corrupt(path, number, str(error)) from error
        if not isinstance(record, dict):
            raise _corrupt(path, number, "it is no JSON object")
        records.append(record)
    return records


def _corrupt(path: Path, number: int, reason: str) -> InputError:
    return InputError(f"{path} line {number} is corrupt: {reason}; delete the file to start over")
