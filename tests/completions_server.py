"""A completions server on loopback: a tiny model, real greedy decoding, and faults to be found."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from tiny_dirs import EOS_IDS, make_tokenizer
from tiny_models import greedy_oracle
from transformers import PreTrainedModel

# how long a faulty server waits for a second request; one that comes alone pays it in full
PATIENCE = 0.25
MODEL = "tiny"


@dataclass
class CompletionsServer:
    """A server with settings for tests.

    Attributes:
        model: decodes greedily.
        overlap: fault of requests that overlap: none, ``"lost token"`` (the prompt's first) or ``"swap"`` (of
            the token that leads by least, for the second best).
        always: every request has this fault.
        logprobs: ``"completions"`` or ``"chat"`` for the shape they come in, or None.
        token_ids: they are returned when asked for.
        echo: logprobs of a prompt are returned when asked for, off by ``noise``.
        refused: fields of a request that are an error, answered with the status ``refusal``.
        answer: sent in place of every completion: a status and a body, or None to hang up.
        delay: seconds before an answer.
        requests, headers: received so far.
    """

    model: PreTrainedModel
    overlap: str | None = None
    always: bool = False
    logprobs: str | None = "completions"
    token_ids: bool = True
    echo: bool = True
    noise: float = 0.0
    refused: tuple[str, ...] = ()
    refusal: int = 400
    answer: tuple[int, Any] | None = None
    delay: float = 0.0
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokenizer = make_tokenizer()
        self._changed = threading.Condition()
        self._decoding = threading.Lock()
        self._in_flight = 0

    @contextlib.contextmanager
    def serve(self) -> Iterator[str]:
        """Its URL."""
        handler = type("Handler", (_Handler,), {"owner": self})
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_port}"
            finally:
                server.shutdown()
                thread.join()

    def respond(self, path: str, request: dict[str, Any], headers: dict[str, str]) -> tuple[int, Any]:
        """Status and body."""
        with self._changed:
            self.requests.append(request)
            self.headers.append(headers)
        time.sleep(self.delay)
        if self.answer:
            return self.answer
        if path != "/v1/completions":
            return 404, {"detail": "Not Found"}
        if request["model"] != MODEL:
            return 404, {"error": {"message": f"The model `{request['model']}` does not exist."}}
        for name in self.refused:
            if name in request:
                return self.refusal, {"object": "error", "message": f"extra field {name} is not permitted"}
        faulty = self.always or (self._overlaps() if self.overlap and request["max_tokens"] > 1 else False)
        with self._decoding, torch.inference_mode():
            return 200, self._complete(request, faulty)

    def _overlaps(self) -> bool:
        with self._changed:
            self._in_flight += 1
            self._changed.notify_all()
            overlaps = self._changed.wait_for(lambda: self._in_flight > 1, PATIENCE)
            if overlaps:
                # the others must see it before this one leaves
                self._changed.wait(0.02)
            self._in_flight -= 1
            return overlaps

    def _complete(self, request: dict[str, Any], faulty: bool) -> dict[str, Any]:
        prompt = request["prompt"]
        ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        fault = self.overlap if faulty else None
        new = self._decode(ids[1:] if fault == "lost token" else ids, request["max_tokens"])
        if fault == "swap":
            new = self._swap(ids, new, request["max_tokens"])
        echoed = ids if request.get("echo") and self.echo else []
        choice = {
            "index": 0,
            "text": self.tokenizer.decode(echoed + new, skip_special_tokens=True),
            "logprobs": self._describe(ids, new, len(echoed), self.noise if echoed else 0.0),
            "finish_reason": "stop" if new[-1] in EOS_IDS else "length",
        }
        if "logprobs" not in request or not self.logprobs:
            choice["logprobs"] = None
        if request.get("return_token_ids") and self.token_ids:
            choice |= {"token_ids": new, "prompt_token_ids": ids}
        return {"choices": [choice], "usage": {"prompt_tokens": len(ids), "completion_tokens": len(new)}}

    def _decode(self, ids: list[int], count: int) -> list[int]:
        return greedy_oracle(self.model, ids, count, EOS_IDS)

    def _swap(self, ids: list[int], new: list[int], count: int) -> list[int]:
        best = self._scores(ids + new)[len(ids) - 1 : -1].topk(2)
        at = (best.values[:, 0] - best.values[:, 1]).argmin().item()
        start = [*new[:at], best.indices[at, 1].item()]
        if start[-1] in EOS_IDS or len(start) == count:
            return start
        return start + self._decode(ids + start, count - len(start))

    def _scores(self, ids: list[int]) -> torch.Tensor:
        logits = self.model(input_ids=torch.tensor([ids])).logits[0]
        return logits.double().log_softmax(-1)

    def _describe(self, ids: list[int], new: list[int], echoed: int, noise: float) -> dict[str, Any]:
        text = ids + new
        tokens = [self.tokenizer.decode([id]) for id in text]
        values, indices = self._scores(text)[:-1].topk(2)
        tops: list[dict[str, float] | None] = [None]
        for row_values, row_ids in zip((values + noise).tolist(), indices.tolist(), strict=True):
            tops.append({self.tokenizer.decode([id]): x for id, x in zip(row_ids, row_values, strict=True)})
        first = len(ids) - echoed
        if self.logprobs == "chat":
            entries = zip(text[first:], tokens[first:], tops[first:], strict=True)
            return {
                "content": [
                    {
                        "id": id,
                        "token": token,
                        "top_logprobs": [{"token": t, "logprob": x} for t, x in (top or {}).items()],
                    }
                    for id, token, top in entries
                ]
            }
        return {"tokens": tokens[first:], "top_logprobs": tops[first:]}


class _Handler(BaseHTTPRequestHandler):
    owner: CompletionsServer

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, body = self.owner.respond(self.path, request, dict(self.headers))
        if body is None:
            return
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", "/elsewhere")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Quiet."""
