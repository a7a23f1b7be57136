"""Prompts of a file or of stdin."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import InputError
from .records import Prompt, checked, parse, returnable

SUFFIXES = (".txt", ".jsonl", ".json")
# a prompt from its index, beside the text that it is made of
Entry = tuple[str, Callable[[int], Prompt]]


def read(source: str, *, skip_errors: bool = False) -> list[Prompt]:
    """Read prompts from a ``.txt``, ``.jsonl`` or ``.json`` file, or from stdin (``-``).

    A ``.txt`` file holds a prompt a line, a ``.jsonl`` file a record a line, a ``.json`` file a list of records (or
    lines of them); :func:`~specdec_fast.prompts.records.parse` says what a record may be. Blank lines are skipped.
    Stdin is JSONL if its first line is a JSON object, and may be a JSON list of objects.

    Args:
        source: a path, or ``-``.
        skip_errors: a bad line becomes a prompt with an ``error`` instead of ending the reading.

    Raises:
        InputError: the source cannot be read, has no prompts, or a line is bad (named by number).
    """
    name = "stdin" if source == "-" else source
    suffix = Path(source).suffix.lower()
    if suffix and suffix not in SUFFIXES:
        raise InputError(f"prompts must be a {', '.join(SUFFIXES)} file or - for stdin, not {source}")
    prompts: list[Prompt] = []
    for raw, load in _entries(_read_bytes(source, name), name, suffix):
        index = len(prompts)
        try:
            prompts.append(load(index))
        except InputError as error:
            if not skip_errors:
                raise
            prompts.append(Prompt(index, raw, fields=returnable(raw), error=str(error)))
    if not prompts:
        raise InputError(f"{name} has no prompts")
    return prompts


def _read_bytes(source: str, name: str) -> bytes:
    if source == "-" and sys.stdin is None:
        raise InputError("cannot read prompts from stdin: it is closed")
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read prompts from {name}: {error.strerror}") from error
    return data.removeprefix(b"\xef\xbb\xbf")


def _entries(data: bytes, name: str, suffix: str) -> Iterator[Entry]:
    if suffix in ("", ".json") and (items := _items(data, suffix)) is not None:
        for number, item in enumerate(items, 1):
            yield json.dumps(item), partial(_parse_item, item=item, where=f"{name} item {number}")
        return
    shown = [line.decode(errors="replace").strip() for line in data.split(b"\n")]
    lines = [(number, line) for number, line in enumerate(data.split(b"\n"), 1) if shown[number - 1]]
    is_json = suffix in (".jsonl", ".json") or (not suffix and bool(lines) and _is_object(lines[0][1]))
    parse_line = _parse_json_line if is_json else _parse_text_line
    for number, line in lines:
        yield shown[number - 1], partial(parse_line, line=line, where=f"{name} line {number}")


def _items(data: bytes, suffix: str) -> list[Any] | None:
    """Items of the JSON list ``data``; an object in a ``.json`` file is its only item."""
    if not data.lstrip().startswith((b"[", b"{")):
        return None
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        return [value] if suffix else None
    return value if suffix or all(isinstance(item, dict) for item in value) else None


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _parse_item(index: int, item: Any, where: str) -> Prompt:
    return Prompt(index, checked(item, where)) if isinstance(item, str) else parse(index, item, where)


def _parse_text_line(index: int, line: bytes, where: str) -> Prompt:
    return Prompt(index, checked(_decode(line, where).rstrip("\r"), where))


def _parse_json_line(index: int, line: bytes, where: str) -> Prompt:
    text = _decode(line, where)
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not valid JSON: {error}") from error
    return parse(index, record, where)


def _decode(line: bytes, where: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{where} is not UTF-8") from error
