"""The scheduler: a pool of sequences, a window of active ones, a plan for each round."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from ..errors import InputError
from .padded import KeptPaper, Paper, PerBatch, SameEnd
from .plan import Plan
from .policy import Limits, Policy
from .ragged import ByAge
from .rows import End, Outcome, Record, Request, Row

_POLICIES: dict[str, dict[str, type[Policy]]] = {
    "ragged": {"age": ByAge},
    "padded": {"same-end": SameEnd, "paper": Paper, "paper-kept": KeptPaper, "per-batch": PerBatch},
}
POLICIES = {layout: tuple(policies) for layout, policies in _POLICIES.items()}


@dataclass
class Counters:
    """Sums over the rounds reported so far.

    Attributes:
        rounds: plans.
        verify_calls: plans with a verify.
        grouped: verify calls of plans that are ``grouped``.
        seats: rows summed over verify calls.
        prompt_tokens: tokens prefilled.
        columns_moved: KV columns moved, gathers included.
    """

    rounds: int = 0
    verify_calls: int = 0
    grouped: int = 0
    seats: int = 0
    prompt_tokens: int = 0
    columns_moved: int = 0

    def add(self, plan: Plan) -> None:
        self.rounds += 1
        self.verify_calls += bool(plan.verify)
        self.grouped += bool(plan.verify) and plan.grouped
        self.seats += len(plan.verify)
        self.prompt_tokens += sum(chunk.stop - chunk.start for chunk in plan.chunks)
        self.columns_moved += plan.columns_moved


class Scheduler:
    """Decides which rows run in each round. It holds no tokens and no tensors, and is not thread-safe.

    A decoder alternates :meth:`next_batch` and :meth:`report`; :meth:`submit`, :meth:`cancel` and :meth:`fail` may come
    at any time between two calls.

    Args:
        batch_size: most rows of a verify (B).
        window: most rows in the window (W), at least ``batch_size``; ``None`` is 4 ``batch_size``.
        layout: ``"ragged"`` or ``"padded"``.
        policy: one of ``POLICIES[layout]``; ``None`` is the first of them.
        num_draft_tokens: most drafts per row and round (K).
        max_wait_rounds: every row in the window takes part at least once in so many rounds; ``None`` is
            32 times the rounds that serving the whole window takes.
        prefill_tokens: prompt tokens that may ride along with a round, ragged layout.
        max_columns: longest content a row may reach, prompt and new tokens; the padded layout needs it.
        budget_columns: KV columns all rows together may take; the window shrinks to keep it.
        slack: widest lead of a row over its batch's right edge, policy ``same-end`` only: 0 keeps one right edge for
            all; ``None`` is half of ``num_draft_tokens``, rounded up.

    Attributes:
        counters: sums over the rounds.
        limits: the numbers in force, after the budget.

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
        policy: str | None = None,
        num_draft_tokens: int = 5,
        max_wait_rounds: int | None = None,
        prefill_tokens: int = 512,
        max_columns: int | None = None,
        budget_columns: int | None = None,
        slack: int | None = None,
    ):
        if layout not in _POLICIES:
            raise InputError(f"layout={layout!r}: supported are {', '.join(_POLICIES)}")
        policy = POLICIES[layout][0] if policy is None else policy
        if policy not in _POLICIES[layout]:
            raise InputError(f"policy={policy!r}: layout {layout} supports {', '.join(POLICIES[layout])}")
        _require("batch_size", batch_size, 1)
        window = 4 * batch_size if window is None else window
        _require("window", window, batch_size)
        turns = -(-window // batch_size)
        max_wait_rounds = 32 * turns if max_wait_rounds is None else max_wait_rounds
        _require("max_wait_rounds", max_wait_rounds, turns)
        _require("num_draft_tokens", num_draft_tokens, 1)
        _require("prefill_tokens", prefill_tokens, 1)
        slack = -(-num_draft_tokens // 2) if slack is None else slack
        _require("slack", slack, 0, num_draft_tokens)
        if max_columns is not None or layout == "padded":
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
            slack,
        )
        kind = _POLICIES[layout][policy]
        self.layout = layout
        self.limits = kind.within_budget(limits)
        self.counters = Counters()
        self._policy = kind(self.limits)
        self._source: Iterator[Request] = iter(())
        # id -> request, round it came in; first come, first served
        self._queue: dict[int, tuple[Request, int]] = {}
        self._rows: dict[int, Row] = {}
        # kept over a source that raises
        self._refused: list[tuple[int, str]] = []
        self._plan: Plan | None = None
        self._round = 0

    @property
    def uses_pool(self) -> bool:
        """Rows wait outside of the lanes of the padded layout."""
        return self._policy.uses_pool

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
        self._queue[request.id] = (request, self._round)

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

    def report(self, outcomes: Mapping[int, Outcome]) -> list[Record]:
        """Record an outcome for each row of the last plan's ``limits``; cancelled rows may be left out.

        Returns:
            The rows that finished.

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
        for seat in plan.verify:
            if seat.row in self._rows:
                self._rows[seat.row].end += outcomes[seat.row].accepted + 1
        self._plan = None
        self.counters.add(plan)
        finished = [id for id in plan.limits if id in self._rows and outcomes[id].finished]
        return [self._remove(id).record("finished", plan.round) for id in finished]

    def cancel(self, id: int) -> Record | None:
        """Drop a request at any stage; ``None`` if it has ended or was never seen."""
        return self._drop(id, "cancelled")

    def fail(self, id: int) -> Record | None:
        """As :meth:`cancel`, for a row that cannot continue."""
        return self._drop(id, "failed")

    def _admit(self) -> None:
        while (request := self._first_in_line()) and self._policy.wants(list(self._rows.values()), request):
            _, queued = self._queue.pop(request.id)
            self._rows[request.id] = Row(request, queued, last_round=self._round - 1)

    def _first_in_line(self) -> Request | None:
        while not self._queue:
            request = next(self._source, None)
            if request is None:
                return None
            try:
                self.submit(request)
            except InputError as error:
                self._refused.append((request.id, str(error)))
        return next(iter(self._queue.values()))[0]

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

    def _drop(self, id: int, end: End) -> Record | None:
        if id in self._rows:
            return self._remove(id).record(end, self._round)
        if id in self._queue:
            return Row(*self._queue.pop(id), last_round=self._round).record(end, self._round)
        return None

    def _remove(self, id: int) -> Row:
        row = self._rows.pop(id)
        self._policy.release(row)
        return row


def _require(name: str, value: int | None, least: int, most: int | None = None) -> None:
    if not isinstance(value, int) or value < least or (most is not None and value > most):
        limit = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise InputError(f"{name}={value!r}: need an integer {limit}")
