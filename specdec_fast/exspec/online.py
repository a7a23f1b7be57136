"""Requests from any thread, answers as futures and as streams of tokens."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import count
from typing import Any, Self

from ..errors import InputError, RequestError
from ..result import GenerationStats, RequestResult
from .engine import Engine
from .request import parsed


class Answer:
    """The answer to a request; iterating over it yields its new tokens as they are committed.

    An iteration ends as :meth:`result` does: it raises what that raises.

    Attributes:
        future: done when the request has ended. Cancelling it ends the request.
    """

    def __init__(self) -> None:
        self.future: Future[RequestResult] = Future()
        self._tokens: list[int] = []
        self._changed = threading.Condition()
        self.future.add_done_callback(lambda _: self._extend([]))

    def result(self, timeout: float | None = None) -> RequestResult:
        """Wait for the end.

        Raises:
            RequestError: the request failed.
            CancelledError: it was cancelled.
            TimeoutError: it has not ended within ``timeout`` seconds.
        """
        return self.future.result(timeout)

    def cancel(self) -> bool:
        """End the request; false if it has ended already."""
        return self.future.cancel()

    @property
    def token_ids(self) -> list[int]:
        """New tokens so far."""
        with self._changed:
            return list(self._tokens)

    def __iter__(self) -> Iterator[int]:
        seen = 0
        while new := self._after(seen):
            seen += len(new)
            yield from new
        self.future.result()

    def _after(self, seen: int) -> list[int]:
        """Tokens beyond the first ``seen``, as soon as there are some; none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._tokens) > seen or self.future.done())
            return self._tokens[seen:]

    def _extend(self, tokens: list[int]) -> None:
        with self._changed:
            self._tokens += tokens
            self._changed.notify_all()

    def _grow_to(self, token_ids: list[int]) -> None:
        # only the session's thread changes the tokens
        if len(token_ids) > len(self._tokens):
            self._extend(token_ids[len(self._tokens) :])

    def _end(self, result: RequestResult) -> None:
        self._grow_to(result.token_ids)
        if result.error is None:
            self._settle(lambda: self.future.set_result(result))
        else:
            self._fail(RequestError(result.error, result))

    def _fail(self, error: BaseException) -> None:
        self._settle(lambda: self.future.set_exception(error))

    def _settle(self, end: Callable[[], None]) -> None:
        # whoever holds the future may have ended it
        is_open = not self.future.done() or self.future.cancelled()
        if is_open and self.future.set_running_or_notify_cancel():
            end()


class Session:
    """A run of EXSPEC in a thread of its own; all methods may be called from any thread.

    As a context manager it waits for what was submitted when it is left, or cancels it when an exception leaves it.
    While it is open, its models are its own: another thread that calls one of them may meet the attention of the ragged
    layout, which raises.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._ids = count()
        self._answers: dict[int, Answer] = {}
        self._inbox: deque[Callable[[], Any]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._failure: BaseException | None = None
        # a thread that computes while the interpreter goes away would abort it
        atexit.register(self._stop)
        self._thread = threading.Thread(target=self._serve, name="exspec", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(cancel=kind is not None)

    @property
    def stats(self) -> GenerationStats:
        """Running counters."""
        return self._engine.stats

    def submit(self, prompt: Any) -> Answer:
        """Queue a prompt, given as to :meth:`~specdec_fast.EXSpec.generate`.

        Returns:
            Its answer, which also tells what is wrong with the prompt.

        Raises:
            InputError: the session is closed, or was ended by an error, which is the cause.
        """
        answer = Answer()
        # now, as the caller may change it afterwards
        given = parsed(prompt, self._engine.limits)
        with self._changed:
            error = self._failure
            if error is not None:
                raise InputError(f"the session was ended by {error!r}; it takes no more prompts") from error
            if self._closed:
                raise InputError("the session is closed; it takes no more prompts")
            id, queued_at = next(self._ids), self._engine.now()
            self._answers[id] = answer
            self._send(lambda: self._engine.submit(id, given, queued_at))
        answer.future.add_done_callback(lambda future: self._cancel(id) if future.cancelled() else None)
        return answer

    def close(self, *, cancel: bool = False) -> None:
        """Take no more prompts and wait for the rest, which ``cancel`` ends at once."""
        with self._changed:
            self._closed = True
            waiting = list(self._answers.values())
            self._changed.notify_all()
        if cancel:
            for answer in waiting:
                answer.cancel()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _stop(self) -> None:
        self.close(cancel=True)

    def _cancel(self, id: int) -> None:
        with self._changed:
            self._send(lambda: self._engine.cancel(id))

    def _send(self, command: Callable[[], Any]) -> None:
        self._inbox.append(command)
        self._changed.notify_all()

    def _serve(self) -> None:
        try:
            while self._obey():
                self._engine.step()
                self._deliver()
        except BaseException as error:
            self._fail(error)
        finally:
            atexit.unregister(self._stop)

    def _obey(self) -> bool:
        """Wait for work and run the commands received; false when closed and idle."""
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._engine.rows or self._closed)
            commands = list(self._inbox)
            self._inbox.clear()
            if not commands and not self._engine.rows:
                return False
        if commands:
            self._engine.check_target()
        for command in commands:
            command()
        return True

    def _deliver(self) -> None:
        for id in self._engine.scheduler.active:
            self._answers[id]._grow_to(self._engine.rows[id].result.token_ids)
        while self._engine.ended:
            result = self._engine.ended.popleft()
            with self._changed:
                answer = self._answers.pop(result.index)
            answer._end(result)

    def _fail(self, error: BaseException) -> None:
        """End the run; all waiting answers raise ``error``."""
        with self._changed:
            self._failure = error
            waiting = list(self._answers.values())
            self._answers.clear()
        for answer in waiting:
            answer._fail(error)
