"""Runs of an audit whose rows are kept as they finish."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..journal import Row, Rows
from .display import Display

if TYPE_CHECKING:
    from ..audit.compare import Run
    from ..audit.runner import AnswerBatch


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
    from ..audit.runner import in_batches

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
