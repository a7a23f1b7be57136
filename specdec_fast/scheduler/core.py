"""The scheduler: a pool of sequences, a window of active ones, a plan for each round."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain

from ..errors import InputError
from .padded import ByLength
from .plan import Plan
from .policy import Limits, Policy
from .ragged import ByAge
from .rows import End, Outcome, Request, Row

POLICIES: dict[str, type[Policy]] = {"ragged": ByAge, "padded": ByLength}
"""The choice of rows on each layout."""


class Scheduler:
    """Decides which rows run in each round. It holds no tokens and no tensors, and is not thread-safe.

    A decoder alternates :meth:`next_batch` and :meth:`report`; :meth:`submit`, :meth:`cancel` and :meth:`fail` may come
    at any time between two calls.

    Args:
        batch_size: most rows of a verify (B).
        window: most rows in the window (W), at least ``batch_size``; ``None`` is 4 ``batch_size``.
        layout: ``"ragged"`` or ``"padded"``.
        policy: a choice of rows; ``None`` is ``POLICIES[layout]``.
        num_draft_tokens: most drafts per row and round (K).
        max_wait_rounds: every row in the window takes part at least once in so many rounds; ``None`` is
            32 times the rounds that serving the whole window takes.
        prefill_tokens: prompt tokens that may ride along with a round; the padded layout runs prompts whole.
        max_columns: longest content a row may reach, prompt and new tokens.
        budget_columns: KV columns all rows together may take; the window shrinks to keep it.

    Attributes:
        limits: the numbers in force, after the budget.
        policy: the choice of rows in force.

    Raises:
        InputError: an argument out of range, or a budget too small for one row.

    Example:
        >>> scheduler = Scheduler(batch_size=2)
        >>> scheduler.feed(Request(i, prompt_length=10, max_new_tokens=20) for i in range(100))
        >>> while plan := scheduler.next_batch():
        ...     ended = scheduler.report({row: Outcome(accepted, finished) for ...})
    """

    def __init__(
        self,
        *,
        batch_size: int,
        window: int | None = None,
        layout: str = "ragged",
        policy: type[Policy] | None = None,
        num_draft_tokens: int = 5,
        max_wait_rounds: int | None = None,
        prefill_tokens: int = 512,
        max_columns: int | None = None,
        budget_columns: int | None = None,
    ):
        if layout not in POLICIES:
            raise InputError(f"layout={layout!r}: supported are {', '.join(POLICIES)}")
        _require("batch_size", batch_size, 1)
        window = 4 * batch_size if window is None else window
        _require("window", window, batch_size)
        turns = -(-window // batch_size)
        max_wait_rounds = 32 * turns if max_wait_rounds is None else max_wait_rounds
        _require("max_wait_rounds", max_wait_rounds, turns)
        _require("num_draft_tokens", num_draft_tokens, 1)
        _require("prefill_tokens", prefill_tokens, 1)
        if max_columns is not None:
            _require("max_columns", max_columns, 2)
        if budget_columns is not None:
            _require("budget_columns", budget_columns, 2)
        limits = Limits(
            batch_size,
            window,
            num_draft_tokens,
            max_wait_rounds,
            prefill_tokens,
            max_columns,
            budget_columns,
        )
        self.layout, self.policy = layout, policy or POLICIES[layout]
        self.limits = self.policy.within_budget(limits)
        self._policy = self.policy(self.limits)
        self._source: Iterator[Request] = iter(())
        # first come, first served
        self._queue: dict[int, Request] = {}
        self._rows: dict[int, Row] = {}
        # kept over a source that raises
        self._refused: list[tuple[int, str]] = []
        self._plan: Plan | None = None
        self._round = 0

    @property
    def active(self) -> list[int]:
        """Rows in the window, the oldest first."""
        return list(self._rows)

    @property
    def queued(self) -> list[int]:
        """Requests that wait for a place in the window."""
        return list(self._queue)

    def check(self, request: Request) -> None:
        """Raise ``InputError`` if ``request`` cannot be decoded within the limits."""
        limits = self.limits
        _require(f"prompt_length of request {request.id}", request.prompt_length, 1)
        _require(f"max_new_tokens of request {request.id}", request.max_new_tokens, 1)
        if request.id in self._queue or request.id in self._rows:
            raise InputError(f"request {request.id} has not ended; need an id that is not in use")
        most = min(limit for limit in (limits.max_columns, limits.budget_columns, request.columns) if limit is not None)
        if request.columns > most:
            raise InputError(
                f"request {request.id} may grow to {request.columns} tokens ({request.prompt_length} + "
                f"{request.max_new_tokens}); there is room for {most}"
            )

    def submit(self, request: Request) -> None:
        """Queue a request; ``InputError`` as by :meth:`check`."""
        self.check(request)
        request.record.queued = self._round
        self._queue[request.id] = request

    def feed(self, requests: Iterable[Request]) -> None:
        """Read requests from ``requests``, after those of earlier calls, one at a time as the window has room."""
        self._source = chain(self._source, requests)

    def next_batch(self) -> Plan:
        """The next round; a plan that is false when there is nothing to do.

        Raises:
            InputError: the last plan was not reported.
        """
        if self._plan is not None:
            raise InputError(f"round {self._plan.round} was not reported; next_batch needs its outcomes first")
        self._admit()
        refused = tuple(self._refused)
        self._refused.clear()
        if not self._rows:
            return Plan(self._round, refused=refused)
        plan = replace(self._policy.plan(list(self._rows.values()), self._round), refused=refused)
        for row in plan.rows:
            self._rows[row].serve(self._round)
        self._plan = plan
        self._round += 1
        return plan

    def report(self, outcomes: Mapping[int, Outcome]) -> list[Request]:
        """Record an outcome for each row of the last plan's ``limits``; cancelled rows may be left out.

        Returns:
            The requests that finished.

        Raises:
            InputError: there is no plan, or an outcome is missing, surplus or impossible; nothing is changed then.
        """
        plan = self._plan
        if plan is None:
            raise InputError("there is no round to report; call next_batch first")
        self._check_outcomes(plan, outcomes)
        for chunk in plan.chunks:
            if chunk.row in self._rows:
                self._rows[chunk.row].prefilled = chunk.stop
        for id, tokens in self._gains(plan, outcomes).items():
            self._rows[id].gain(tokens)
        self._plan = None
        finished = [id for id in plan.limits if id in self._rows and outcomes[id].finished]
        return [self._end(self._rows.pop(id).request, "finished", plan.round) for id in finished]

    def cancel(self, id: int) -> Request | None:
        """Drop a request at any stage; ``None`` if it has ended or was never seen."""
        return self._drop(id, "cancelled")

    def fail(self, id: int) -> Request | None:
        """As :meth:`cancel`, for a row that cannot continue."""
        return self._drop(id, "failed")

    def _admit(self) -> None:
        while (request := self._first_in_line()) and self._policy.wants(list(self._rows.values()), request):
            del self._queue[request.id]
            self._rows[request.id] = Row(request, last_round=self._round - 1)

    def _first_in_line(self) -> Request | None:
        while not self._queue:
            request = next(self._source, None)
            if request is None:
                return None
            try:
                self.submit(request)
            except InputError as error:
                self._refused.append((request.id, str(error)))
        return next(iter(self._queue.values()))

    def _check_outcomes(self, plan: Plan, outcomes: Mapping[int, Outcome]) -> None:
        missing = [id for id in plan.limits if id in self._rows and id not in outcomes]
        surplus = [id for id in outcomes if id not in plan.limits]
        if missing or surplus:
            raise InputError(f"outcomes of round {plan.round}: missing are {missing}, not in its limits are {surplus}")
        for id, outcome in outcomes.items():
            if not 0 <= outcome.accepted <= plan.limits[id]:
                raise InputError(f"row {id} accepted {outcome.accepted} drafts; its limit is {plan.limits[id]}")
        for id, tokens in self._gains(plan, outcomes).items():
            if tokens >= self._rows[id].remaining and not outcomes[id].finished:
                raise InputError(f"row {id} has reached its max_new_tokens; need it reported as finished")

    def _gains(self, plan: Plan, outcomes: Mapping[int, Outcome]) -> dict[int, int]:
        """Tokens each row has gained: the first one with its last chunk, accepted drafts and bonus with a verify."""
        gains = {id: 0 for id in plan.limits if id in self._rows}
        for chunk in plan.chunks:
            if chunk.row in gains:
                gains[chunk.row] += 1
        for seat in plan.verify:
            if seat.row in gains:
                gains[seat.row] += outcomes[seat.row].accepted + 1
        return gains

    def _drop(self, id: int, end: End) -> Request | None:
        request = self._rows.pop(id).request if id in self._rows else self._queue.pop(id, None)
        return request and self._end(request, end, self._round)

    @staticmethod
    def _end(request: Request, end: End, now: int) -> Request:
        request.record.end, request.record.ended = end, now
        return request


def _require(name: str, value: int | None, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise InputError(f"{name}={value!r}: need an integer of at least {least}")
