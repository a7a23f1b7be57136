"""``specdec-fast audit``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import EndpointError, InputError
from ..journal import Journal, Rows, Settings, check_writable, journal_path
from ..prompts import Prompt, read
from . import display
from .endpoint import EndpointJob
from .rows import decode_run
from .workload import Workload

if TYPE_CHECKING:
    from ..audit.results import AuditReport, RunAudit
    from ..audit.runner import Run

_FOR_MODELS = ("target", "draft", "candidate", "num_draft_tokens", "dtype", "device", "chat")
_FOR_SERVERS = ("endpoint_plain", "model", "logprobs", "timeout")


@dataclass(frozen=True)
class Options:
    """The command line of one audit."""

    prompts: str
    target: str
    draft: str
    candidate: list[str]
    batch_sizes: str
    num_draft_tokens: int
    max_new_tokens: int
    dtype: str
    device: str
    chat: bool | None
    endpoint: str | None
    endpoint_plain: str | None
    model: str | None
    timeout: float
    logprobs: bool
    report: Path | None
    json: Path | None
    resume: bool

    @property
    def runs(self) -> list[Run]:
        from ..audit.runner import Run

        try:
            sizes = [int(size) for size in self.batch_sizes.split(",")]
        except ValueError:
            sizes = [0]
        if min(sizes) < 1:
            raise InputError(f"--batch-sizes {self.batch_sizes}: need integers of at least 1, such as 1,4,8")
        if self.endpoint:
            from ..audit.endpoint import ORACLE

            return [ORACLE, *(Run("endpoint", size) for size in dict.fromkeys(sizes))]
        return [Run(name, size) for name in dict.fromkeys(self.candidate) for size in dict.fromkeys(sizes)]

    @property
    def shown(self) -> Settings:
        """What the findings say of the command line."""
        unused = _FOR_MODELS if self.endpoint else ("endpoint", *_FOR_SERVERS)
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(self).items()
            if name not in unused
        }

    @property
    def rows_path(self) -> Path | None:
        """Where finished rows are kept."""
        if self.report:
            return self.report / "rows.jsonl"
        return self.json and self.json.with_name(f"{self.json.name}.rows.jsonl")


def audit(
    context: typer.Context,
    prompts: Annotated[str, typer.Option(metavar="FILE", help="A .txt or .jsonl file, or - for stdin.")],
    target: Annotated[str, typer.Option(help="smollm2, a Hub id, a model directory or a .gguf file.")] = "smollm2",
    draft: Annotated[str, typer.Option(help="ngram, self:LAYERS, or a model.")] = "ngram",
    candidate: Annotated[
        list[str],
        typer.Option(help="A decoder by name or module:callable; may be given more than once."),
    ] = ["eqspec"],  # noqa: B006
    batch_sizes: Annotated[str, typer.Option(metavar="N,N", help="Rows decoded together.")] = "1,4,8",
    num_draft_tokens: Annotated[int, typer.Option(min=1, help="Most drafts per row and round.")] = 5,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens per prompt.")] = 64,
    dtype: Annotated[str, typer.Option(help="float32 for a verdict that means something.")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Use the chat template.", show_default="if the tokenizer has one"),
    ] = None,
    endpoint: Annotated[str | None, typer.Option(metavar="URL", help="Audit a completions server instead.")] = None,
    endpoint_plain: Annotated[
        str | None, typer.Option(metavar="URL", help="The same model served without speculation: the oracle.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="The server's name of the model.")] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds to wait for an answer of the server.")] = 300,
    logprobs: Annotated[bool, typer.Option(help="Ask the server for logprobs, to tell near-ties.")] = True,
    report: Annotated[Path | None, typer.Option(metavar="DIR", help="Write an HTML report here.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the findings here.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted audit stopped.")] = False,
) -> None:
    """Is a batch decoder output-equivalent to its target, and if not, what broke?"""
    options = Options(**{name: value for name, value in locals().items() if name != "context"})
    _check_names(context, options)
    runs = options.runs
    prompt_list = read(prompts)
    with _open_rows(options, prompt_list, runs) as rows:
        screen = display.open_display()
        try:
            job = EndpointJob if endpoint else _Job
            findings = job(options, prompt_list, runs, rows, screen).run()
        except (KeyboardInterrupt, EndpointError) as stop:
            screen.close()
            screen.message(_describe_stop(options, rows))
            if isinstance(stop, EndpointError):
                raise
            raise typer.Exit(130) from None
        finally:
            screen.close()
    if json:
        findings.write_json(json)
    display.print_audit(findings)
    raise typer.Exit(0 if findings.equivalent else 1)


def _check_names(context: typer.Context, options: Options) -> None:
    for name in _FOR_MODELS if options.endpoint else _FOR_SERVERS:
        source = context.get_parameter_source(name)
        if source and source.name == "COMMANDLINE":
            reason = "does not go with" if options.endpoint else "needs"
            raise InputError(f"--{name.replace('_', '-')} {reason} --endpoint")
    if options.endpoint and not options.model:
        raise InputError("--endpoint needs --model: the server's name of the model")


def _open_rows(options: Options, prompts: list[Prompt], runs: list[Run]) -> Rows:
    total = len(prompts) * len(runs)
    settings = {"runs": [str(run) for run in runs]} | _row_settings(options)
    if options.json:
        check_writable(options.json)
    if options.report:
        options.report.mkdir(parents=True, exist_ok=True)
    path = options.rows_path
    if path is None:
        if options.resume:
            raise InputError("--resume needs --report or --json")
        return Rows(total)
    if Path(options.prompts).resolve() in (path.resolve(), journal_path(path), options.json and options.json.resolve()):
        raise InputError(f"{options.prompts} is the prompts file; choose another place to write")
    return Journal(path, prompts * len(runs), settings, resume=options.resume)


def _row_settings(options: Options) -> Settings:
    if options.endpoint:
        return {
            "endpoint": options.endpoint,
            "endpoint_plain": options.endpoint_plain,
            "model": options.model,
            "logprobs": options.logprobs,
            "max_new_tokens": options.max_new_tokens,
        }
    from ..models import resolve_device, resolve_dtype

    device = resolve_device(options.device)
    return {
        "target": options.target,
        "draft": options.draft,
        "num_draft_tokens": options.num_draft_tokens,
        "max_new_tokens": options.max_new_tokens,
        "dtype": str(resolve_dtype(options.dtype, device)).removeprefix("torch."),
        "device": device.type,
        "chat": options.chat,
    }


def _describe_stop(options: Options, rows: Rows) -> str:
    done = f"stopped: {len(rows.rows)} of {rows.total} rows are done"
    if not rows.rows:
        return done
    kept = "kept; add --resume to go on" if options.rows_path else "lost; --report or --json would keep them"
    return f"{done} and {kept}"


class _Job:
    """A loaded target and what is asked about its decoders."""

    def __init__(self, options: Options, prompts: list[Prompt], runs: list[Run], rows: Rows, screen: display.Display):
        from ..audit.candidates import Setting
        from ..audit.oracle import Oracle
        from ..paths import cache_folder

        self.prompts, self.runs, self.rows, self.screen = prompts, runs, rows, screen
        self.work = Workload(
            prompts,
            target=options.target,
            dtype=options.dtype,
            device=options.device,
            chat=options.chat,
            max_new_tokens=options.max_new_tokens,
            message=screen.message,
        )
        drafter = self.work.drafter(options.draft)
        self.setting = Setting(self.work.target, drafter, options.num_draft_tokens, **self.work.limits)
        self.oracle = Oracle(self.work.target, **self.work.limits, cache_dir=cache_folder() / "oracle")
        self.settings = options.shown

    def run(self) -> AuditReport:
        from ..audit.candidates import resolve

        # first, so that a name that is wrong ends the audit before any work
        candidates = {run.candidate: resolve(run.candidate, self.setting) for run in self.runs}
        self._decode_oracle()
        for number, run in enumerate(self.runs):
            self._decode(number, run, candidates[run.candidate])
        self.rows.finish()
        return self._report()

    def _decode_oracle(self) -> None:
        self.screen.begin("oracle", 0, len(self.prompts))
        for prompt in self.work.encoded:
            self.oracle.decode(prompt)
            self.screen.advance()
        self.screen.end_of_batch()

    def _decode(self, number: int, run: Run, candidate: Any) -> None:
        from ..audit.runner import padded

        answer = padded(candidate, self.setting)
        decode_run(number, run, self.work.encoded, answer, self.work.record, self.rows, self.screen)

    def _report(self) -> AuditReport:
        from ..audit.results import AuditReport, PromptAudit
        from ..audit.runner import Answer, Judge

        tokenizer = self.work.tokenizer
        judge = Judge(self.oracle, self.work.encoded, tokenizer.all_special_ids)
        prompts = []
        for prompt, ids in zip(self.prompts, self.work.encoded, strict=True):
            oracle_ids = self.oracle.decode(ids).token_ids
            prompts.append(PromptAudit(prompt.index, prompt.text, len(ids), oracle_ids, tokenizer.decode(oracle_ids)))
        runs: list[RunAudit] = []
        for number, run in enumerate(self.runs):
            records = [self.rows.rows[number * len(prompts) + index] for index in range(len(prompts))]
            answers = [
                Answer(record["token_ids"], record["seconds"], tokenizer.decode(record["token_ids"]))
                for record in records
            ]
            runs.append(judge.run(run, answers))
        return AuditReport(self.settings, prompts, runs)
