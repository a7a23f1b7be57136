"""The audit of a served model: concurrent requests, or speculation, against one request at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from ..errors import EndpointError
from ..prompts import Prompt
from .compare import CandidateRow, Comparison, Run
from .completions import Completion, CompletionsClient, Fields
from .oracle import OracleRow
from .results import AuditReport, PromptAudit, Unit

if TYPE_CHECKING:
    from .decoding import AnswerBatch, Finish

Row = dict[str, Any]
ORACLE = Run("one at a time", 1)


def together(client: CompletionsClient, fields: Fields) -> AnswerBatch:
    """One request per prompt of a batch, all at once; those that succeed are handed over before an error is raised."""

    def answer(prompts: Sequence[str], finish: Finish) -> None:
        outcomes: SimpleQueue[tuple[int, Completion | Exception]] = SimpleQueue()

        def ask(place: int) -> None:
            try:
                outcomes.put((place, client.complete(prompts[place], **fields)))
            except Exception as error:
                outcomes.put((place, error))

        for place in range(len(prompts)):
            # daemons, so that an interruption does not wait for the server
            threading.Thread(target=ask, args=(place,), daemon=True).start()
        failure = None
        for _ in prompts:
            place, outcome = outcomes.get()
            if isinstance(outcome, Exception):
                failure = failure or outcome
            else:
                finish(place, _row(outcome))
        if failure:
            raise failure

    return answer


def alone(client: CompletionsClient, fields: Fields) -> AnswerBatch:
    """One request after the other, each with the noise of its logprobs: the oracle."""

    def answer(prompts: Sequence[str], finish: Finish) -> None:
        for place, prompt in enumerate(prompts):
            completion = client.complete(prompt, **fields)
            finish(place, _row(completion) | {"noise": measure_noise(client, fields, completion)})

    return answer


def measure_noise(client: CompletionsClient, fields: Fields, completion: Completion) -> float | None:
    """Largest difference of the two largest logprobs between decoding a text and reading it in one forward.

    None unless the server returns token ids and logprobs, and logprobs of a prompt too (``echo``).
    """
    if not (completion.prompt_ids and completion.token_ids and completion.top):
        return None
    text = completion.prompt_ids + completion.token_ids[:-1]
    try:
        read = client.complete(text, **fields | {"echo": True, "max_tokens": 1})
    except EndpointError as error:
        if error.status is None:
            raise
        return None
    if read.top is None or len(read.top) != len(text) + 1 or len(completion.top) != len(completion.token_ids):
        return None
    pairs = zip(completion.top, read.top[-len(completion.top) :], strict=True)
    return max((abs(a - b) for decoded, at_once in pairs for a, b in zip(decoded, at_once, strict=False)), default=None)


def judge(settings: Row, prompts: Sequence[Prompt], runs: Sequence[Run], rows: Sequence[Row]) -> AuditReport:
    """The verdict on all rows; the first of ``runs`` is the oracle.

    Args:
        settings: of the audit, for the report.
        prompts: what was asked.
        runs: in order.
        rows: what :func:`alone` and :func:`together` handed over, with their ``seconds``: run by run, a row per prompt.
    """
    unit = _finest_unit(rows)
    per_run = [rows[first : first + len(prompts)] for first in range(0, len(rows), len(prompts))]
    oracle = _Recorded(per_run[0], unit)
    audits = [
        PromptAudit(prompt.index, prompt.text, row["num_prompt_tokens"], _units(row, unit), _text(row, unit))
        for prompt, row in zip(prompts, per_run[0], strict=True)
    ]
    comparison = Comparison(oracle, range(len(prompts)), to_text=None if unit == "token ids" else "".join)
    answers = [
        [CandidateRow(_units(row, unit), row["seconds"], text=row["text"]) for row in rows] for rows in per_run[1:]
    ]
    found = [comparison.run(run, answered) for run, answered in zip(runs[1:], answers, strict=True)]
    return AuditReport(settings, audits, found, unit=unit)


class _Recorded:
    """Answers that are there already, by the index of their prompt."""

    def __init__(self, rows: Sequence[Row], unit: Unit):
        self._rows = [OracleRow(_units(row, unit), _gaps(row, unit), row["noise"]) for row in rows]

    def decode(self, index: int, /) -> OracleRow:
        return self._rows[index]


def _row(completion: Completion) -> Row:
    token_ids, tokens = completion.token_ids or [], completion.tokens or []
    return {
        "text": completion.text,
        "token_ids": token_ids,
        "tokens": tokens,
        "num_tokens": completion.num_tokens or len(token_ids or tokens),
        "num_prompt_tokens": completion.num_prompt_tokens,
        "finish_reason": completion.finish_reason,
        "gaps": [top[0] - top[1] if len(top) == 2 else None for top in completion.top or ()],
        "rounds": 0,
        "drafted": 0,
        "accepted": 0,
    }


def _finest_unit(rows: Iterable[Row]) -> Unit:
    """The unit that can be compared in all rows; an empty text may have no tokens."""
    with_text = [row for row in rows if row["text"]]
    if all(row["token_ids"] for row in with_text):
        return "token ids"
    return "tokens" if all(row["tokens"] for row in with_text) else "characters"


def _units(row: Row, unit: Unit) -> list[Any]:
    if unit == "characters":
        return list(row["text"])
    return row["token_ids"] if unit == "token ids" else row["tokens"]


def _text(row: Row, unit: Unit) -> str:
    return row["text"] if unit == "token ids" else "".join(_units(row, unit))


def _gaps(row: Row, unit: Unit) -> list[float | None]:
    units = len(_units(row, unit))
    known = [] if unit == "characters" else row["gaps"]
    return (known + [None] * units)[:units]
