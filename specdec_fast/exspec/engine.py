"""Requests from their prompt to their end: the scheduler decides, an executor computes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..errors import InputError
from ..integrations import compat
from ..result import FinishReason, GenerationStats, RequestRecord, RequestResult
from ..scheduler import Request
from ..selfcheck import self_check
from .executor import Executor, Outcomes
from .request import Parsed, RequestRow, parsed

T = TypeVar("T")

if TYPE_CHECKING:
    from .decoder import EXSpec


class Engine:
    """The state of one run. Not thread-safe.

    Args:
        decoder: its settings.
        longest: tokens that no row will outgrow.
        max_new_tokens: new tokens of a prompt that does not say.
        eos_token_id: id or ids that end a row; ``None`` takes the model's.

    Attributes:
        rows: requests that have not ended.
        ended: results not taken yet, in the order of their end.
    """

    def __init__(self, decoder: EXSpec, longest: int, max_new_tokens: int, eos_token_id: int | Iterable[int] | None):
        self.limits = decoder.prompt_limits(max_new_tokens)
        self._decoder, self._longest = decoder, longest
        self.check_target()
        stop_ids = compat.eos_ids(decoder.target, eos_token_id)
        budget = decoder.budget_columns(longest)
        self.scheduler = decoder.scheduler(longest, budget)
        self.executor = Executor(decoder, self.scheduler.limits, longest, stop_ids)
        self.rows: dict[int, RequestRow] = {}
        self.ended: deque[RequestResult] = deque()
        self._began = time.perf_counter()

    @property
    def stats(self) -> GenerationStats:
        return self.executor.rounds.stats

    def check_target(self) -> None:
        """Refuse a target that is not what it was: for after a time in which a caller could change it."""
        self_check(self._decoder.target, self._decoder.layout, self._longest)

    def feed(self, prompts: Iterable[Any]) -> None:
        """Read ``prompts``, numbered from 0, as the window has room."""
        self.scheduler.feed(self._requests(prompts))

    def submit(self, id: int, prompt: Parsed, queued_at: float) -> None:
        """Queue one prompt; what is wrong with it shows in its result."""
        if request := self._accept(id, prompt, queued_at):
            try:
                self.scheduler.submit(request)
            except InputError as error:
                self._end(id, "error", str(error))

    def cancel(self, id: int) -> bool:
        """End a request at any stage; false if it has ended or is unknown."""
        if id not in self.rows:
            return False
        self.scheduler.cancel(id)
        self._end(id, "cancelled", "cancelled")
        return True

    # caches outlive a round, so a caller's inference mode must not mark them
    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self) -> bool:
        """Run one round; false when there was nothing to do."""
        plan = self.scheduler.next_batch()
        for id, reason in plan.refused:
            self._end(id, "error", reason)
        if not plan:
            return bool(plan.refused)
        now = self.now()
        for id in plan.rows:
            record = self.rows[id].result.record
            record.started_at = now if record.started_at is None else record.started_at
        outcomes = self.executor.run(plan, self.rows)
        for id in outcomes.rows:
            record = self.rows[id].result.record
            record.first_token_at = self.now() if record.first_token_at is None else record.first_token_at
        for id, error in outcomes.failed.items():
            self.scheduler.fail(id)
            self._end(id, "error", f"{type(error).__name__} while drafting: {error}")
        for ended in self.scheduler.report(outcomes.rows):
            self._end(ended.id, self.rows[ended.id].result.finish_reason)
        self._count(outcomes)
        return True

    def _requests(self, prompts: Iterable[Any]) -> Iterator[Request]:
        for id, prompt in enumerate(prompts):
            if request := self._accept(id, parsed(prompt, self.limits), self.now()):
                yield request

    def _accept(self, id: int, prompt: Parsed, queued_at: float) -> Request | None:
        row = self.rows[id] = RequestRow([], 0, RequestResult(id, 0, record=RequestRecord(queued_at=queued_at)))
        if isinstance(prompt, InputError):
            self._end(id, "error", str(prompt))
            return None
        row.text, row.remaining = prompt
        row.result.prompt_length = len(row.text)
        return Request(id, len(row.text), row.remaining, row.result.record)

    def _end(self, id: int, reason: FinishReason, error: str | None = None) -> None:
        self.executor.release(id)
        result = self.rows.pop(id).result
        result.finish_reason, result.error = reason, error
        result.record.ended_at = self.now()
        self.ended.append(result)

    def _count(self, outcomes: Outcomes) -> None:
        stats, rounds = self.stats, self.executor.rounds
        stats.host_reads += bool(outcomes.rows)
        stats.bytes_moved = rounds.batch.bytes_moved
        stats.stage_seconds = rounds.clock.seconds()
        stats.seconds = self.now()

    def now(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._began


class Stream(Iterator[RequestResult]):
    """Results of a run in the order of their end; rounds run as results are asked for.

    Attributes:
        stats: running counters; single rounds are not logged.
    """

    def __init__(self, engine: Engine, on_round: Callable[[GenerationStats], None] | None):
        self._engine, self._on_round = engine, on_round
        self._failed = False

    @property
    def stats(self) -> GenerationStats:
        return self._engine.stats

    @property
    def kv_bytes(self) -> int:
        """Bytes that KV caches take now."""
        return self._engine.executor.kv_bytes

    def cancel(self, index: int) -> bool:
        """End the request of prompt ``index`` now; false if it has ended or was not read yet."""
        return self._engine.cancel(index)

    def __next__(self) -> RequestResult:
        engine = self._engine
        if not (self._failed or engine.ended):
            self._guarded(engine.check_target)
        while not engine.ended:
            if self._failed or not (self._guarded(engine.step) or engine.ended):
                raise StopIteration
            if self._on_round:
                self._on_round(engine.stats)
        return engine.ended.popleft()

    def _guarded(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except BaseException:
            # as a generator, it is over after an error
            self._failed = True
            raise
