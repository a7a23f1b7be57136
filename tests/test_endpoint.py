"""``specdec-fast audit --endpoint`` against servers on loopback that are right, wrong or broken."""

import json
import signal

import pytest
import torch
from completions_server import MODEL, CompletionsServer
from tiny_dirs import EOS_IDS, make_tokenizer
from tiny_models import greedy_oracle, make_model, make_prompts

from specdec_fast.audit.completions import CompletionsClient
from specdec_fast.cli import main
from specdec_fast.cli.journal import Journal
from specdec_fast.errors import EndpointError, InputError

NEW_TOKENS = 8
PROMPTS = make_prompts([5, 17, 9, 3], seed=3)
KEY = "sk-tiny-secret"


@pytest.fixture(scope="module")
def model():
    return make_model("llama", seed=0, dtype=torch.float32)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    tokenizer = make_tokenizer()
    path.write_text("".join(json.dumps({"prompt": tokenizer.decode(ids)}) + "\n" for ids in PROMPTS))
    return path


@pytest.fixture
def audit(prompts, tmp_path, capsys):
    """Runs an audit and returns its exit status, findings and output."""

    def run(url, *options):
        path = tmp_path / "audit.json"
        command = ["audit", f"--prompts={prompts}", f"--endpoint={url}", f"--model={MODEL}", f"--json={path}"]
        status = main([*command, "--batch-sizes=1,3", f"--max-new-tokens={NEW_TOKENS}", *options])
        shown = capsys.readouterr()
        found = json.loads(path.read_text()) if status in (0, 1) else None
        return status, found, shown.out + shown.err

    return run


def mismatches(found):
    return {run["batch_size"]: run["mismatches"] for run in found["runs"]}


def test_a_correct_server_is_equivalent_and_its_text_is_the_models_own(model, audit, tmp_path):
    server = CompletionsServer(model)
    with server.serve() as url:
        status, found, shown = audit(url)
    assert status == 0 and found["unit"] == "token ids" and "NOT" not in shown
    assert [(run["candidate"], run["batch_size"]) for run in found["runs"]] == [("endpoint", 1), ("endpoint", 3)]
    for prompt, ids in zip(found["prompts"], PROMPTS, strict=True):
        assert prompt["oracle_ids"] == greedy_oracle(model, ids, NEW_TOKENS, EOS_IDS)
        assert prompt["num_tokens"] == len(ids)
    assert all(0 <= run["noise"] < 1e-3 for run in found["runs"])
    assert all(request["temperature"] == 0 and request["model"] == MODEL for request in server.requests)


def test_the_key_is_sent_and_shown_nowhere(model, audit, tmp_path):
    server = CompletionsServer(model)
    with server.serve() as url:
        _, _, shown = audit(url)
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    for status in (401, 200):
        with CompletionsServer(model, answer=(status, {"error": {"message": f"bad key: {KEY}"}})).serve() as url:
            shown += audit(url)[2]
    assert "answered 401: bad key: ***" in shown and "there are no choices in bad key: ***" in shown
    written = "".join(path.read_text(encoding="utf-8") for path in tmp_path.rglob("*") if path.is_file())
    assert "endpoint" in written and KEY not in written + shown


def test_requests_that_overlap_are_found_wrong(model, audit):
    with CompletionsServer(model, overlap="lost token").serve() as url:
        status, found, shown = audit(url)
    assert status == 1 and shown.count("NOT equivalent") == 1
    assert mismatches(found)[1] == 0 and mismatches(found)[3] > 0
    row = next(row for row in found["runs"][1]["rows"] if not row["exact"])
    oracle = found["prompts"][row["index"]]
    at = row["first_divergence"]
    assert row["token_ids"][:at] == oracle["oracle_ids"][:at] and row["text"] != oracle["oracle_text"]


@pytest.mark.parametrize(("always", "expected"), [(False, 0), (True, 1)])
def test_speculation_against_a_server_without(model, audit, always, expected):
    plain, fast = (
        CompletionsServer(model),
        CompletionsServer(model, overlap="lost token" if always else None, always=always),
    )
    with plain.serve() as plain_url, fast.serve() as url:
        status, found, _ = audit(url, f"--endpoint-plain={plain_url}")
    assert status == expected
    assert all((run["mismatches"] > 0) == always for run in found["runs"])
    assert found["settings"]["endpoint_plain"] == plain_url


@pytest.mark.parametrize(
    ("changes", "options", "near_ties"),
    [
        ({"noise": 10.0}, (), True),
        ({"noise": 10.0, "logprobs": "chat"}, (), True),
        ({"noise": 0.0}, (), False),
        ({"echo": False}, (), None),
        ({"logprobs": None}, (), None),
        ({}, ("--no-logprobs",), None),
    ],
)
def test_near_ties_are_judged_by_the_servers_own_noise_or_not_at_all(model, audit, changes, options, near_ties):
    plain, fast = CompletionsServer(model, **changes), CompletionsServer(model, overlap="swap", always=True)
    with plain.serve() as plain_url, fast.serve() as url:
        status, found, shown = audit(url, f"--endpoint-plain={plain_url}", *options)
    assert status == (0 if near_ties else 1)
    swapped = [row for run in found["runs"] for row in run["rows"]]
    assert {row["near_tie"] for row in swapped} == {near_ties}
    assert (", 4 unknown" in shown) == (near_ties is None)
    if options:
        assert not any("logprobs" in request for request in plain.requests + fast.requests)


@pytest.mark.parametrize(
    ("changes", "unit"),
    [
        ({"token_ids": False}, "tokens"),
        ({"token_ids": False, "logprobs": "chat"}, "token ids"),
        ({"token_ids": False, "logprobs": None}, "characters"),
        ({"refused": ("return_token_ids", "logprobs", "seed")}, "characters"),
    ],
)
def test_it_compares_what_the_server_returns(model, audit, changes, unit):
    with CompletionsServer(model, **changes).serve() as url:
        status, found, shown = audit(url)
    assert (status, found["unit"]) == (0, unit)
    assert (f"compared by {unit}" in shown) == (unit != "token ids")
    assert all(f"the server refuses {name}" in shown for name in changes.get("refused", ()))
    first = found["prompts"][0]
    if unit == "characters":
        assert "".join(first["oracle_ids"]) == first["oracle_text"]
    plain, fast = (
        CompletionsServer(model, **changes),
        CompletionsServer(model, overlap="lost token", always=True, **changes),
    )
    with plain.serve() as plain_url, fast.serve() as url:
        status, found, _ = audit(url, f"--endpoint-plain={plain_url}")
    assert (status, found["unit"]) == (1, unit) and all(mismatches(found).values())


@pytest.mark.parametrize(
    ("changes", "unit"), [({}, "token ids"), ({"token_ids": False, "logprobs": None}, "characters")]
)
def test_the_page_says_what_is_unknown(model, audit, tmp_path, changes, unit):
    plain = CompletionsServer(model, echo=False, **changes)
    fast = CompletionsServer(model, overlap="swap", always=True, **changes)
    with plain.serve() as plain_url, fast.serve() as url:
        status, found, _ = audit(url, f"--endpoint-plain={plain_url}", f"--report={tmp_path / 'report'}")
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert status == 1 and "8 of which may be near-ties for all that the server says" in page and "4 unknown" in page
    assert f"audit of {MODEL}" in page and plain_url in page and KEY not in page
    assert ("compared by <b>characters</b>" in page) == ("characters/s" in page) == (unit == "characters")
    for row, prompt in zip(found["runs"][0]["rows"], found["prompts"], strict=True):
        at = row["first_divergence"]
        assert row["span"] == (None if unit == "token ids" else [at, at + 1])
        assert row["text"] != prompt["oracle_text"]


def test_an_interrupted_audit_resumes_without_losing_a_row(model, audit, monkeypatch):
    append = Journal.append

    def interrupted(self, row):
        append(self, row)
        if len(self.rows) == 9:
            signal.raise_signal(signal.SIGINT)

    with CompletionsServer(model).serve() as url:
        monkeypatch.setattr(Journal, "append", interrupted)
        status, _, shown = audit(url)
        assert status == 130 and "stopped: 9 of 12 rows are done and kept" in shown
        kept = []
        monkeypatch.setattr(Journal, "append", lambda self, row: kept.append(row["index"]) or append(self, row))
        status, found, _ = audit(url, "--resume", "--timeout=60")
        assert status == 0 and len(kept) == 3 and min(kept) >= 8
        assert audit(url, "--resume", "--no-logprobs")[0] == 2
    # all is there: the server is needed no more
    assert audit(url, "--resume")[1]["runs"] == found["runs"]


def test_what_finished_beside_a_failure_is_kept(model, audit, monkeypatch):
    server = CompletionsServer(model)
    respond, second = server.respond, make_tokenizer().decode(PROMPTS[1])

    def fail_once(path, request, headers):
        fails = [request["prompt"] for request in server.requests].count(
            second
        ) == 2  # asked by the oracle and at batch size 1
        answer = respond(path, request, headers)
        return (500, {"error": {"message": "out of memory"}}) if fails and request["prompt"] == second else answer

    monkeypatch.setattr(server, "respond", fail_once)
    with server.serve() as url:
        status, _, shown = audit(url)
        assert status == 2 and "answered 500: out of memory" in shown
        assert "stopped: 10 of 12 rows are done and kept; add --resume" in shown
        assert audit(url, "--resume")[0] == 0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((500, {"error": {"message": "out of memory"}}), "answered 500: out of memory"),
        ((503, b"<html>busy</html>"), "answered 503: <html>busy</html>"),
        ((500, b""), "answered 500: Internal Server Error"),
        ((302, b""), "answered 302: Found"),
        ((200, None), "closed connection without response"),
        ((200, b"<html>"), "answered without JSON: <html>"),
        ((200, b"\xff\xfe"), "answered without JSON"),
        ((200, []), "there are no choices in []"),
        ((200, {"object": "error", "message": "no such lora"}), "there are no choices in no such lora"),
        ((200, {"choices": []}), "its list of choices is empty"),
        ((200, {"choices": [{"message": {"content": "hi"}}]}), "there is no text in"),
        ((200, {"choices": [{"text": "hi", "token_ids": ["5"]}]}), "are malformed"),
        ((200, {"choices": [{"text": "hi", "logprobs": {"tokens": [5]}}]}), "are malformed"),
        ((200, {"choices": [{"text": "hi", "logprobs": {"content": [{"id": 5}]}}]}), "are malformed"),
        ((200, {"choices": [{"text": "hi", "logprobs": 3}]}), "are malformed"),
        ((200, b'{"choices": [{"text": "\\ud800"}]}'), "surrogates not allowed"),
    ],
)
def test_answers_that_are_no_completion(model, audit, answer, message):
    with CompletionsServer(model, answer=answer).serve() as url:
        status, _, shown = audit(url)
    assert status == 2 and message in shown.splitlines()[-1] and f"{url}/v1/completions" in shown


def test_a_failure_is_no_refusal_of_a_field(model, audit):
    with CompletionsServer(model, refused=("logprobs",), refusal=503).serve() as url:
        status, _, shown = audit(url)
    assert status == 2 and "answered 503: extra field logprobs is not permitted" in shown


def test_a_model_the_server_does_not_have(model, audit):
    with CompletionsServer(model).serve() as url:
        status, _, shown = audit(url, "--model=other")
    assert status == 2 and "answered 404: The model `other` does not exist." in shown


def test_a_server_that_is_slow_or_not_there(model, audit):
    with CompletionsServer(model, delay=0.5).serve() as url:
        assert "no answer within 0.1 s" in audit(url, "--timeout=0.1")[2]
    status, _, shown = audit(url)
    assert status == 2 and f"cannot complete at {url}/v1/completions: " in shown and "refused" in shown


@pytest.mark.parametrize(
    ("url", "completions"),
    [
        ("http://host:8000", "http://host:8000/v1/completions"),
        ("http://host:8000/", "http://host:8000/v1/completions"),
        ("https://host/v1", "https://host/v1/completions"),
        ("https://host/api/v3/", "https://host/api/v3/completions"),
        ("host:8000", None),
        ("file:///etc/passwd", None),
        ("http://host:port", None),
        ("http://host/?api-key=3", None),
        ("http://user:secret@host", None),
    ],
)
def test_urls(url, completions):
    if completions:
        assert CompletionsClient(url, MODEL, max_tokens=1, timeout=1).url == completions
        return
    with pytest.raises(InputError) as raised:
        CompletionsClient(url, MODEL, max_tokens=1, timeout=1)
    assert "secret" not in str(raised.value) and not isinstance(raised.value, EndpointError)


def test_a_key_that_no_header_can_hold(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk\nsecret")
    with pytest.raises(InputError, match="OPENAI_API_KEY") as raised:
        CompletionsClient("http://host", MODEL, max_tokens=1, timeout=1)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--endpoint=http://host"], "--endpoint needs --model"),
        (["--endpoint=http://host", "--model=m", "--target=smollm2"], "--target does not go with --endpoint"),
        (["--endpoint=http://host", "--model=m", "--no-chat"], "--chat does not go with --endpoint"),
        (["--model=m"], "--model needs --endpoint"),
        (["--no-logprobs"], "--logprobs needs --endpoint"),
        (["--endpoint=ftp://host", "--model=m"], "an endpoint must be http"),
    ],
)
def test_options_that_do_not_go_together(prompts, capsys, options, message):
    assert main(["audit", f"--prompts={prompts}", *options]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_chat_is_no_plain_text(prompts, capsys):
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    assert main(["audit", f"--prompts={prompts}", "--endpoint=http://host", "--model=m"]) == 2
    assert "prompt 0 is a list of messages" in capsys.readouterr().err
