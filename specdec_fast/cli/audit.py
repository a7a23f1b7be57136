"""``specdec-fast audit``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError
from ..journal import Journal, Rows, check_writable, journal_path
from ..prompts import Prompt, read
from . import display
from .rows import decode_run
from .workload import Workload

if TYPE_CHECKING:
    from ..audit.results import AuditReport, RunAudit
    from ..audit.runner import Run


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
        return [Run(name, size) for name in dict.fromkeys(self.candidate) for size in dict.fromkeys(sizes)]

    @property
    def rows_path(self) -> Path | None:
        """Where finished rows are kept."""
        if self.report:
            return self.report / "rows.jsonl"
        return self.json and self.json.with_name(f"{self.json.name}.rows.jsonl")


def audit(
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
    report: Annotated[Path | None, typer.Option(metavar="DIR", help="Write an HTML report here.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the findings here.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted audit stopped.")] = False,
) -> None:
    """Is a batch decoder output-equivalent to its target, and if not, what broke?"""
    options = Options(**locals())
    runs = options.runs
    prompt_list = read(prompts)
    with _open_rows(options, prompt_list, runs) as rows:
        screen = display.open_display()
        try:
            findings = _Job(options, prompt_list, runs, rows, screen).run()
        except KeyboardInterrupt:
            screen.close()
            kept = "kept; add --resume to go on" if options.rows_path else "lost; --report or --json would keep them"
            screen.message(f"stopped: {len(rows.rows)} of {rows.total} rows are done and {kept}")
            raise typer.Exit(130) from None
        finally:
            screen.close()
    if json:
        findings.write_json(json)
    display.print_audit(findings)
    raise typer.Exit(0 if findings.equivalent else 1)


def _open_rows(options: Options, prompts: list[Prompt], runs: list[Run]) -> Rows:
    from ..models import resolve_device, resolve_dtype

    total = len(prompts) * len(runs)
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, device)
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
    settings = {
        "runs": [str(run) for run in runs],
        "target": options.target,
        "draft": options.draft,
        "num_draft_tokens": options.num_draft_tokens,
        "max_new_tokens": options.max_new_tokens,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
        "chat": options.chat,
    }
    return Journal(path, prompts * len(runs), settings, resume=options.resume)


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
        self.settings = {
            key: str(value) if isinstance(value, Path) else value for key, value in asdict(options).items()
        }

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
