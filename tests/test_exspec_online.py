"""Requests from any thread, one at a time to their end."""

import os
import subprocess
import sys
import threading
from collections import UserDict
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
import torch
from observers import observe
from test_exspec import LENGTHS, NEW_TOKENS, FailingDrafter, drafter_of
from tiny_models import greedy_oracle, make_model, make_prompts

from specdec_fast import EXSpec, NgramDrafter
from specdec_fast.errors import InputError, RequestError

WAIT = 60


@pytest.fixture(scope="module")
def model():
    return make_model("llama", seed=1)


@pytest.fixture
def gate(model):
    """Holds the target's forwards back until it is set."""
    event = threading.Event()
    handle = observe(model, lambda *_: event.wait(WAIT))
    yield event
    event.set()
    handle.remove()


def serve(model, drafter=None, **options):
    return EXSpec(model, drafter or NgramDrafter(), batch_size=3, **options).serve(
        max_new_tokens=NEW_TOKENS, eos_token_id=[]
    )


def test_every_thread_gets_its_answers(model):
    prompts = make_prompts(LENGTHS, 1)
    want = [greedy_oracle(model, prompt, NEW_TOKENS) for prompt in prompts]
    got, streamed = {}, {}

    def ask(first):
        for index in range(first, len(prompts), 4):
            answer = session.submit(prompts[index])
            streamed[index] = list(answer)
            got[index] = answer.result(0)

    with serve(model, drafter_of(model)) as session:
        threads = [threading.Thread(target=ask, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
    assert [got[i].token_ids for i in range(len(prompts))] == want
    assert [streamed[i] for i in range(len(prompts))] == want
    assert len({row.index for row in got.values()}) == len(prompts)
    assert session.stats.tokens == sum(map(len, want))
    assert all(0 <= r.record.queued_at <= r.record.started_at <= r.record.ended_at for r in got.values())


def test_tokens_come_before_the_end(model):
    want = greedy_oracle(model, [5, 6], 400)
    with serve(model) as session:
        answer = session.submit({"input_ids": [5, 6], "max_new_tokens": 400})
        tokens = iter(answer)
        first = [next(tokens) for _ in range(3)]
        assert not answer.future.done()
        assert first + list(tokens) == want == answer.token_ids
        assert list(answer) == answer.token_ids


def test_what_is_wrong_with_a_request_is_its_own(model):
    prompts = make_prompts([4] * 5, 2)
    wanted = [greedy_oracle(model, prompt, NEW_TOKENS) for prompt in prompts]
    with serve(model, FailingDrafter(NgramDrafter(), {1}, "raise")) as session:
        answers = [session.submit(prompt) for prompt in [*prompts, [], "text", [5] * 600]]
        for index, (answer, want) in enumerate(zip(answers[:5], wanted, strict=True)):
            if index == 1:
                with pytest.raises(RequestError, match="RuntimeError while drafting: no luck") as caught:
                    answer.result(WAIT)
                assert caught.value.result.token_ids == want[:1] == answer.token_ids
            else:
                assert answer.result(WAIT).token_ids == want
        for answer, reason in zip(answers[5:], ("empty prompt", "of type str", "outgrows"), strict=True):
            with pytest.raises(RequestError, match=reason):
                answer.result(WAIT)
            with pytest.raises(RequestError, match=reason):
                list(answer)


def test_cancelling_ends_one_request(model, gate):
    prompts = make_prompts([4] * 8, 3)
    gate.set()
    want = [greedy_oracle(model, prompt, NEW_TOKENS) for prompt in prompts]
    gate.clear()
    with serve(model) as session:
        answers = [session.submit(prompt) for prompt in prompts]
        # one that waits, and later one that is running
        assert answers[7].cancel() and answers[7].future.cancelled()
        gate.set()
        running = iter(answers[0])
        got = next(running)
        gate.clear()
        assert answers[0].cancel() or answers[0].future.done()
        gate.set()
        for index in range(1, 7):
            assert answers[index].result(WAIT).token_ids == want[index]
    with pytest.raises(CancelledError):
        answers[7].result(0)
    assert answers[7].token_ids == []
    if answers[0].future.cancelled():
        assert got == want[0][0]
        with pytest.raises(CancelledError):
            list(running)
    assert not answers[1].cancel()
    assert not session._engine.rows and not session._answers


def test_closing_waits_or_cancels(model, gate):
    session = serve(model)
    answers = [session.submit([5, 6]) for _ in range(5)]
    gate.set()
    session.close()
    assert all(answer.result(0).token_ids for answer in answers)
    with pytest.raises(InputError, match="session is closed"):
        session.submit([5])
    gate.clear()
    session = serve(model)
    answers = [session.submit([5, 6]) for _ in range(5)]
    threading.Timer(0.05, gate.set).start()
    session.close(cancel=True)
    assert all(answer.future.cancelled() for answer in answers)


def test_an_exception_in_the_block_does_not_wait(model):
    answers = []

    def fail_in_the_block():
        with serve(model) as session:
            answers.append(session.submit({"input_ids": [5, 6], "max_new_tokens": 500}))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_the_block()
    assert answers[0].future.cancelled()


def test_a_failing_target_is_told_to_everyone(model, gate):
    with serve(model) as session:
        gate.set()
        assert session.submit([5, 6]).result(WAIT)
        gate.clear()
        handle = observe(model, lambda *_: 1 / 0)
        answers = [session.submit([5, 6]) for _ in range(5)]
        gate.set()
        for answer in answers:
            with pytest.raises(ZeroDivisionError):
                answer.result(WAIT)
        handle.remove()
        with pytest.raises(InputError, match="was ended by ZeroDivisionError") as caught:
            session.submit([5])
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_what_is_submitted_may_change_afterwards(model, gate):
    prompts = make_prompts([4] * 8, 3)
    gate.set()
    want = [greedy_oracle(model, prompt, NEW_TOKENS) for prompt in prompts]
    gate.clear()
    with serve(model) as session:
        buffer, answers = [0] * 4, []
        for prompt in prompts:
            buffer[:] = prompt
            answers.append(session.submit(buffer))
        gate.set()
        assert [answer.result(WAIT).token_ids for answer in answers] == want


def test_one_bad_request_is_its_own(model, gate):
    class Unreadable(UserDict):
        def __getitem__(self, key):
            raise ZeroDivisionError

    with serve(model) as session:
        bad = [
            session.submit(torch.empty(3, dtype=torch.int64, device="meta")),
            session.submit(Unreadable(input_ids=[5])),
        ]
        ended = session.submit([5, 6])
        ended.future.set_result("mine")
        good = session.submit([5, 6])
        gate.set()
        for answer in bad:
            with pytest.raises(RequestError, match="a prompt cannot be read"):
                answer.result(WAIT)
        assert good.result(WAIT).token_ids == greedy_oracle(model, [5, 6], NEW_TOKENS)
    assert ended.result(0) == "mine"


LEFT_OPEN = """
import time
from tiny_models import make_model
from specdec_fast import EXSpec, NgramDrafter
session = EXSpec(make_model("llama", seed=1), NgramDrafter(), batch_size=2).serve(max_new_tokens=400, eos_token_id=[])
session.submit([5, 6, 7])
time.sleep(0.2)
"""


def test_a_session_that_is_left_open_ends_with_the_process():
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", LEFT_OPEN], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
