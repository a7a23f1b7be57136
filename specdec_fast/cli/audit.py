"""``specdec-fast audit``."""

from __future__ import annotations

import contextlib
import traceback as tracebacks
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..errors import EndpointError, InputError, WriteError
from ..paths import writing
from ..prompts import Prompt, read
from . import display
from .diagnoses import Diagnoses, diagnosis_path
from .endpoint import EndpointJob
from .journal import Journal, Rows, Settings, check_writable, journal_path
from .options import with_options
from .rows import advance, decode_run
from .workload import Workload

if TYPE_CHECKING:
    from ..audit.candidates import Candidate
    from ..audit.compare import CandidateRow, Run
    from ..audit.probed import ProbedRun
    from ..audit.results import AuditReport, Failure, ProbeReport, RunAudit

JudgeDtype = Literal["float32", "same"]
_FOR_MODELS = (
    *("target", "draft", "candidate", "num_draft_tokens", "dtype", "judge_dtype", "device", "chat", "probe"),
    "traceback",
)
_FOR_SERVERS = ("endpoint_plain", "model", "logprobs", "timeout")
# spelled out, since the audit's own names load torch
_CANDIDATES = (
    "autoregressive, exspec, eqspec, eqspec-ragged, eqspec-padded, holes, rollback, expansion; faults: bsp, dsd, "
    "bonus-from-draft, padding-visible, rejected-kept, position-off-by-one, position-of-column, position-offset, "
    "holes-visible, lost-token, duplicated-token, rows-swapped, stale-draft"
)
_ANSWER = ("token_ids", "seconds", "drafted", "accepted")


@dataclass(frozen=True)
class Options:
    """The command line of one audit."""

    prompts: Annotated[str, typer.Option(metavar="FILE", help="A .txt, .jsonl or .json file, or - for stdin.")]
    target: Annotated[str, typer.Option(help="smollm2, a Hub id, a model directory or a .gguf file.")] = "smollm2"
    draft: Annotated[str, typer.Option(help="ngram, self:LAYERS, or a model.")] = "ngram"
    candidate: Annotated[
        list[str],
        typer.Option(help=f"A decoder by name ({_CANDIDATES}) or module:callable; may be given more than once."),
    ] = field(default_factory=lambda: ["eqspec"])
    batch_sizes: Annotated[str, typer.Option(metavar="N,N", help="Rows decoded together.")] = "1,4,8"
    num_draft_tokens: Annotated[int, typer.Option(min=1, help="Most drafts per row and round.")] = 5
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens per prompt.")] = 64
    dtype: Annotated[str, typer.Option(help="float32 for a verdict that means something.")] = "float32"
    judge_dtype: Annotated[
        JudgeDtype,
        typer.Option(help="Tell near-ties of a target in half precision by a float32 copy of it, or by the same one."),
    ] = "float32"
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto"
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Use the chat template.", show_default="if the tokenizer has one"),
    ] = None
    probe: Annotated[bool, typer.Option("--probe", help="Check positions, masks and KV entries in every forward.")] = (
        False
    )
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where a candidate failed.")] = False
    endpoint: Annotated[str | None, typer.Option(metavar="URL", help="Audit a completions server instead.")] = None
    endpoint_plain: Annotated[
        str | None, typer.Option(metavar="URL", help="The same model served without speculation: the oracle.")
    ] = None
    model: Annotated[str | None, typer.Option(metavar="NAME", help="The server's name of the model.")] = None
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds to wait for an answer of the server.")] = 300
    logprobs: Annotated[bool, typer.Option(help="Ask the server for logprobs, to tell near-ties.")] = True
    report: Annotated[Path | None, typer.Option(metavar="DIR", help="Write report.html and audit.json here.")] = None
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the findings here.")] = None
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted audit stopped.")] = False

    @property
    def runs(self) -> list[Run]:
        from ..audit.compare import Run

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
        """The command line as the findings repeat it."""
        unused = _FOR_MODELS if self.endpoint else ("endpoint", *_FOR_SERVERS)
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(self).items()
            if name not in unused
        }

    @property
    def rows_path(self) -> Path | None:
        """The file that keeps finished rows."""
        if self.report:
            return self.report / "rows.jsonl"
        return self.json and self.json.with_name(f"{self.json.name}.rows.jsonl")

    @property
    def outputs(self) -> list[Path]:
        """Files written in the end."""
        report = [self.report / "audit.json", self.report / "report.html"] if self.report else []
        return [self.json, *report] if self.json else report


@with_options(Options)
def audit(context: typer.Context, options: Options) -> None:
    """Is a batch decoder output-equivalent to its target, and if not, what broke?"""
    _check_names(context, options)
    runs = options.runs
    prompt_list = read(options.prompts)
    with _open_rows(options, prompt_list, runs) as rows:
        screen = display.open_display()
        try:
            job = EndpointJob if options.endpoint else _Job
            findings = job(options, prompt_list, runs, rows, screen).run()
        except (KeyboardInterrupt, EndpointError, WriteError) as stop:
            screen.close()
            screen.message(_describe_stop(options, rows))
            if isinstance(stop, KeyboardInterrupt):
                raise typer.Exit(130) from None
            raise
        finally:
            screen.close()
        if findings.failures and not rows.complete:
            screen.message(_describe_stop(options, rows))
    if options.json:
        with writing(options.json):
            findings.write_json(options.json)
    if folder := options.report:
        from ..audit.html import write_html

        with writing(folder):
            findings.write_json(folder / "audit.json")
            write_html(findings, folder / "report.html")
        screen.message(f"wrote {folder / 'report.html'}")
    display.print_audit(findings)
    if findings.failures:
        raise InputError("; ".join(dict.fromkeys(failure.error for failure in findings.failures)))
    raise typer.Exit(0 if findings.passed else 1)


def _check_names(context: typer.Context, options: Options) -> None:
    for name in _FOR_MODELS if options.endpoint else _FOR_SERVERS:
        source = context.get_parameter_source(name)
        if source and source.name == "COMMANDLINE":
            reason = "does not go with" if options.endpoint else "needs"
            raise InputError(f"--{name.replace('_', '-')} {reason} --endpoint")
    if options.endpoint and not options.model:
        raise InputError("--endpoint needs --model: the server's name of the model")
    if options.probe and options.resume:
        raise InputError("--resume does not go with --probe: a probed audit cannot be resumed, no probe saw its rows")


def _open_rows(options: Options, prompts: list[Prompt], runs: list[Run]) -> Rows:
    total = len(prompts) * len(runs)
    settings = {"runs": [str(run) for run in runs]} | _row_settings(options)
    if options.report:
        options.report.mkdir(parents=True, exist_ok=True)
    outputs = [check_writable(output) for output in options.outputs]
    path = options.rows_path
    if path is None:
        if options.resume:
            raise InputError("--resume needs --report or --json")
        return Rows(total)
    written = [*outputs, path.resolve(), journal_path(path), diagnosis_path(path).resolve()]
    if Path(options.prompts).resolve() in written:
        raise InputError(f"{options.prompts} is the prompts file; choose another place to write")
    if len(set(written)) < len(written):
        raise InputError(f"--json {options.json} is a file of --report {options.report}; choose another place to write")
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
        "probe": options.probe,
    }


def _describe_stop(options: Options, rows: Rows) -> str:
    done = f"stopped: {len(rows.rows)} of {rows.total} rows are done"
    if not rows.rows:
        return done
    if not options.rows_path:
        return f"{done} and lost; --report or --json would keep them"
    return f"{done} and kept; {'a probed audit cannot be resumed' if options.probe else 'add --resume to go on'}"


class _Job:
    """A loaded target and what is asked about its decoders."""

    def __init__(self, options: Options, prompts: list[Prompt], runs: list[Run], rows: Rows, screen: display.Display):
        from ..audit.decoding import Judge
        from ..audit.oracle import Oracle
        from ..audit.setting import Setting
        from ..paths import cache_folder
        from .info import environment

        self.prompts, self.runs, self.rows, self.screen = prompts, runs, rows, screen
        self.work = Workload(prompts, options, screen.message)
        drafter = self.work.drafter(options.draft)
        self.setting = Setting(self.work.target, drafter, options.num_draft_tokens, **self.work.limits)
        self.oracle = Oracle(
            self.work.target,
            **self.work.limits,
            cache_dir=cache_folder() / "oracle",
            float32_judge=options.judge_dtype == "float32",
        )
        self.judge = Judge(
            self.setting,
            self.oracle,
            self.work.encoded,
            self.work.tokenizer.all_special_ids,
            self.work.tokenizer.decode,
        )
        self.settings = options.shown | {"environment": environment(self.work.target.device)}
        self.options = options
        self.diagnoses = Diagnoses(options.rows_path, resume=options.resume)

    def run(self) -> AuditReport:
        from ..audit.candidates import resolve

        # first, so that a name that is wrong ends the audit before any work
        candidates = {run.candidate: resolve(run.candidate, self.setting) for run in self.runs}
        self._decode_oracle()
        findings, failures = [], []
        for number, run in enumerate(self.runs):
            try:
                findings.append(self._audit(number, run, candidates[run.candidate]))
            except WriteError:
                raise
            except InputError as error:
                failures.append(self._fail(run, error))
        if self.rows.complete:
            self.rows.finish()
        return self._report(findings, failures)

    def _fail(self, run: Run, error: InputError) -> Failure:
        from ..audit.results import Failure

        told = str(error) if run.candidate in str(error) else f"candidate {run.candidate} failed: {error}"
        trace = "".join(tracebacks.format_exception(error.__cause__ or error))
        self.screen.message(f"{run} has no verdict: {told}")
        if self.options.traceback:
            self.screen.message(trace)
        return Failure(run.candidate, run.batch_size, told, trace)

    def _decode_oracle(self) -> None:
        self.screen.begin("oracle", 0, len(self.prompts))
        for done, prompt in enumerate(self.work.encoded, 1):
            self.oracle.decode(prompt)
            advance(self.screen, done, len(self.prompts))
        self.screen.end_of_batch()

    def _audit(self, number: int, run: Run, candidate: Candidate) -> RunAudit:
        from ..audit.compare import CandidateRow

        probe = self._decode(number, run, candidate)
        records = [self.rows.rows[number * len(self.prompts) + index] for index in range(len(self.prompts))]
        answers = [CandidateRow(**{key: record[key] for key in _ANSWER}) for record in records]
        report = probe.report(self.judge.replay, self.work.encoded, answers) if probe else None
        return self._judge(run, candidate, answers, report)

    def _judge(
        self, run: Run, candidate: Candidate, answers: Sequence[CandidateRow], probe: ProbeReport | None
    ) -> RunAudit:
        known = self.diagnoses.find(run, answers)

        def on_step(done: int, total: int) -> None:
            if done:
                advance(self.screen, done, total)
            else:
                self.screen.begin(f"{run}, diagnosis", 0, total)

        found = self.judge.run(run, candidate, answers, probe, known, on_step)
        if found.diagnosis and known is None:
            self.screen.end_of_batch()
            self.diagnoses.keep(run, answers, found.diagnosis)
        return found

    def _decode(self, number: int, run: Run, candidate: Candidate) -> ProbedRun | None:
        from ..audit.decoding import padded
        from ..audit.probed import ProbedRun

        with ProbedRun(self.setting) if self.options.probe else contextlib.nullcontext() as probed:
            answer, begin = padded(candidate, self.setting), probed.target.begin if probed else None
            decode_run(number, run, self.work.encoded, answer, self.work.record, self.rows, self.screen, begin)
        return probed

    def _report(self, findings: list[RunAudit], failures: list[Failure]) -> AuditReport:
        from ..audit.results import AuditReport, PromptAudit

        prompts = []
        for prompt, ids in zip(self.prompts, self.work.encoded, strict=True):
            oracle_ids = self.oracle.decode(ids).token_ids
            text = self.work.tokenizer.decode(oracle_ids)
            prompts.append(PromptAudit(prompt.index, prompt.text, len(ids), oracle_ids, text))
        return AuditReport(self.settings, prompts, findings, failures=failures)
