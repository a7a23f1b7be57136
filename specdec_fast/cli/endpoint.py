"""``specdec-fast audit --endpoint``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import InputError
from ..prompts import Prompt
from .display import Display
from .journal import Row, Rows
from .rows import decode_run

if TYPE_CHECKING:
    from ..audit.compare import Run
    from ..audit.results import AuditReport
    from .audit import Options


class EndpointJob:
    """A server, or two, and what is asked about them; the first of ``runs`` is the oracle."""

    def __init__(self, options: Options, prompts: list[Prompt], runs: list[Run], rows: Rows, screen: Display):
        from ..audit.completions import CompletionsClient

        other = next((prompt.index for prompt in prompts if not prompt.is_text), None)
        if other is not None:
            kind = "messages" if prompts[other].messages else "token ids"
            raise InputError(f"prompt {other} is a list of {kind}; a completions server takes plain text")
        assert options.endpoint and options.model
        self.options, self.prompts, self.runs, self.rows, self.screen = options, prompts, runs, rows, screen
        clients = [
            CompletionsClient(url, options.model, max_tokens=options.max_new_tokens, timeout=options.timeout)
            for url in (options.endpoint, options.endpoint_plain)
            if url
        ]
        self.clients, self.candidate, self.oracle = clients, clients[0], clients[-1]

    def run(self) -> AuditReport:
        from ..audit.endpoint import judge

        if not self.rows.complete:
            self._decode()
        self.rows.finish()
        ordered = [self.rows.rows[index] for index in range(self.rows.total)]
        return judge(self.options.shown, self.prompts, self.runs, ordered)

    def _decode(self) -> None:
        from ..audit.completions import OPTIONAL, negotiate
        from ..audit.endpoint import alone, together

        optional = {name: value for name, value in OPTIONAL.items() if self.options.logprobs or name != "logprobs"}
        fields = negotiate(self.clients, self.prompts[0].text, optional)
        refused = [f"the server refuses {name}" for name in optional if name not in fields]
        self.screen.message("; ".join([f"requests are greedy, with {', '.join(fields) or 'no more fields'}", *refused]))
        answers = [alone(self.oracle, fields), *[together(self.candidate, fields)] * (len(self.runs) - 1)]
        texts = [prompt.text for prompt in self.prompts]
        for number, (run, answer) in enumerate(zip(self.runs, answers, strict=True)):
            decode_run(number, run, texts, answer, self._record, self.rows, self.screen)

    def _record(self, index: int, row: Row) -> Row:
        return row | {"prompt": self.prompts[index].text}
