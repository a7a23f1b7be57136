"""Rows as they finish: of an audit, on standard output, and with what their prompt brought along."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..paths import writing
from ..prompts import Prompt
from .display import Display
from .journal import Row, Rows, row_line

if TYPE_CHECKING:
    from ..audit.compare import Run
    from ..audit.decoding import AnswerBatch


class PrintedRows(Rows):
    """Rows on standard output, a JSON line each, in the order of their prompts: a row waits for those before it."""

    def __init__(self, total: int):
        super().__init__(total)
        self._printed = 0

    def append(self, row: Row) -> None:
        super().append(row)
        with writing("standard output"):
            while self._printed in self.rows:
                sys.stdout.buffer.write(row_line(self.rows[self._printed]))
                self._printed += 1
            sys.stdout.buffer.flush()


def with_prompt(row: Row, prompt: Prompt) -> Row:
    """``row`` with the chat and other fields of its prompt's record; ``input_fields`` holds those it has itself."""
    chat = {"messages": prompt.messages} if prompt.messages else {}
    taken = {*row, "messages", "error", "input_fields"}
    more = {key: value for key, value in prompt.fields.items() if key not in taken}
    hidden = {key: value for key, value in prompt.fields.items() if key in taken}
    return row | chat | more | ({"input_fields": hidden} if hidden else {})


def failed_row(prompt: Prompt, error: str) -> Row:
    """The row of a prompt that cannot be continued."""
    row: Row = {"index": prompt.index, "prompt": prompt.text, "text": "", "token_ids": [], "num_tokens": 0}
    return row | {"finish_reason": "error", "rounds": 0, "drafted": 0, "accepted": 0, "error": error}


def advance(screen: Display, done: int, total: int) -> None:
    """Show that one more is done; where nothing moves on the screen, with a line for each tenth of a long task."""
    screen.advance()
    if done < total and done % -(-total // 10) == 0:
        screen.end_of_batch()


def decode_run(
    number: int,
    run: Run,
    prompts: Sequence[Any],
    answer: AnswerBatch,
    record: Callable[[int, Any], Row],
    rows: Rows,
    screen: Display,
    on_batch: Callable[[Sequence[Any], int], None] | None = None,
) -> None:
    """Decode what run ``number`` of an audit misses.

    Args:
        number: of the run; its rows have the indices ``number * len(prompts)`` and up.
        run: what it is.
        prompts: what ``answer`` takes.
        answer: continues a batch.
        record: a row as it is kept, from the index of its prompt and what ``answer`` handed over.
        rows: where it is kept.
        screen: shows the progress.
        on_batch: told the prompts of a batch and the index of the first, before it begins.
    """
    from ..audit.decoding import in_batches

    first = number * len(prompts)
    done = {index - first for index in rows.rows if first <= index < first + len(prompts)}

    def keep(index: int, row: Any, seconds: float) -> None:
        if index not in done:
            done.add(index)
            rows.append(record(index, row) | {"index": first + index, "seconds": seconds})
            advance(screen, len(done), len(prompts))

    screen.begin(str(run), len(done), len(prompts))
    in_batches(answer, prompts, run.batch_size, keep, done, on_batch)
    screen.end_of_batch()
