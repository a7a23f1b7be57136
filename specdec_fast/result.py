"""Results of a decoder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from .scheduler import Record

FinishReason = Literal["eos", "length", "cancelled", "error"]
STAGES = ("draft", "verify", "accept", "commit")
_LONGEST = 60


def _brief(value: Any) -> str:
    """``repr`` with few digits; of tensors and long lists, their size."""
    if isinstance(value, torch.Tensor):
        return f"<{value.dtype} {tuple(value.shape)}>"
    if isinstance(value, float):
        return repr(round(value, 3))
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_brief(item)}" for key, item in value.items()) + "}"
    text = repr(value)
    return f"<{len(value)} items>" if isinstance(value, list) and len(text) > _LONGEST else text


class _Brief:
    """A dataclass whose ``repr`` does not grow with the text."""

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={_brief(value)}" for name, value in vars(self).items())
        return f"{type(self).__name__}({shown})"


@dataclass(repr=False)
class RowResult(_Brief):
    """One finished row.

    Attributes:
        index: row of ``input_ids``.
        prompt_length: real prompt tokens, padding excluded.
        token_ids: new tokens; the EOS that ended the row is included.
        finish_reason: ``"eos"`` or ``"length"``; of a request also ``"cancelled"`` or ``"error"``.
        rounds: verify calls this row took part in.
        drafted: draft tokens the target verified for this row.
        accepted: draft tokens the target accepted.
    """

    index: int
    prompt_length: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(repr=False)
class RequestRecord(_Brief, Record):
    """The way of a request through EXSPEC, in rounds of its scheduler and seconds of its run; ``None`` where it did not
    get that far.

    Attributes:
        queued_at, started_at, first_token_at, ended_at: the rounds of the same names in seconds.
    """

    queued_at: float = 0.0
    started_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None


@dataclass(repr=False)
class RequestResult(RowResult):
    """One request of EXSPEC that has ended; ``index`` counts the prompts.

    Attributes:
        error: why it ended early, or ``None``. What it had gained until then is kept.
        record: its rounds and times.
    """

    error: str | None = None
    record: RequestRecord = field(default_factory=RequestRecord)


@dataclass(repr=False)
class GenerationStats(_Brief):
    """Counters of one or more ``generate`` calls; ``a + b`` merges two runs and drops their logs of single rounds.

    Attributes:
        tokens: new tokens of all rows, the EOS of a row included.
        seconds: wall time.
        rounds: verify calls.
        drafted: draft tokens verified.
        accepted: draft tokens accepted.
        row_rounds: rows summed over rounds.
        accepted_by_round: per round, one ``(row, drafted, accepted)`` per active row.
        stage_seconds: seconds in ``draft``, ``verify`` (prefill included), ``accept``, ``commit``.
        bytes_moved: KV bytes relocated to keep rows aligned (realign, compaction, growth, row removal).
        host_reads: device-to-host copies made inside the rounds.
    """

    tokens: int = 0
    seconds: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    row_rounds: int = 0
    accepted_by_round: list[list[tuple[int, int, int]]] = field(default_factory=list)
    stage_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    bytes_moved: int = 0
    host_reads: int = 0

    def __add__(self, other: GenerationStats) -> GenerationStats:
        return GenerationStats(
            tokens=self.tokens + other.tokens,
            seconds=self.seconds + other.seconds,
            rounds=self.rounds + other.rounds,
            drafted=self.drafted + other.drafted,
            accepted=self.accepted + other.accepted,
            row_rounds=self.row_rounds + other.row_rounds,
            stage_seconds={s: self.stage_seconds[s] + other.stage_seconds[s] for s in STAGES},
            bytes_moved=self.bytes_moved + other.bytes_moved,
            host_reads=self.host_reads + other.host_reads,
        )

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def mean_accepted(self) -> float:
        """Accepted draft tokens per row and round."""
        return self.accepted / self.row_rounds if self.row_rounds else 0.0

    @property
    def host_syncs_per_round(self) -> float:
        return self.host_reads / self.rounds if self.rounds else 0.0


@dataclass(repr=False)
class GenerationResult(_Brief):
    """Output of a decoder.

    Attributes:
        sequences: ``[B, P + N]`` int64, as ``transformers`` ``generate`` returns them: the left-padded
            prompt as given, then the new tokens, right-padded with the pad id.
        rows: per-row results in input order.
        stats: counters of the call.
    """

    sequences: torch.Tensor
    rows: list[RowResult]
    stats: GenerationStats

    @property
    def lengths(self) -> list[int]:
        """Content length of each row: real tokens, prompt included."""
        return [row.prompt_length + len(row.token_ids) for row in self.rows]

    @property
    def finish_reasons(self) -> list[FinishReason]:
        return [row.finish_reason for row in self.rows]
