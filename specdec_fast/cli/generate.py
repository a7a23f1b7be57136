"""``specdec-fast generate``."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import InputError, WriteError
from ..paths import writing
from ..prompts import Prompt, pad_left, read
from . import display
from .journal import Journal, Rows, check_writable, journal_path
from .options import with_options
from .rows import PrintedRows, failed_row, with_prompt
from .workload import Workload

if TYPE_CHECKING:
    from ..audit.equivalence import Report
    from ..result import GenerationResult, GenerationStats, RowResult

Method = Literal["eqspec", "exspec", "autoregressive"]
Layout = Literal["padded", "ragged"]


@dataclass(frozen=True)
class Options:
    """The command line of one run."""

    prompts: Annotated[str, typer.Option(metavar="FILE", help="A .txt, .jsonl or .json file, or - for stdin.")]
    target: Annotated[str, typer.Option(help="smollm2, a Hub id, a model directory or a .gguf file.")] = "smollm2"
    draft: Annotated[
        str, typer.Option(help="ngram, self:LAYERS (self:0-13,15-29, or self:~14 for all but 14), or a model.")
    ] = "ngram"
    method: Annotated[
        Method, typer.Option(help="Batch by batch, or rows that join and leave; or transformers' own greedy decoding.")
    ] = "eqspec"
    layout: Annotated[
        Layout | None,
        typer.Option(help="Where rows keep their KV.", show_default="ragged on a CPU and for exspec, else padded"),
    ] = None
    window: Annotated[
        int | None,
        typer.Option(min=1, help="Rows decoded concurrently, exspec only.", show_default="4 times the batch size"),
    ] = None
    batch_size: Annotated[int, typer.Option(min=1, help="Rows decoded together.")] = 8
    num_draft_tokens: Annotated[int, typer.Option(min=1, help="Most drafts per row and round.")] = 5
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens per prompt.")] = 96
    dtype: Annotated[str, typer.Option(help="auto, float64, float32, bfloat16 or float16.")] = "auto"
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto"
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Use the chat template.", show_default="if the tokenizer has one"),
    ] = None
    output: Annotated[
        str | None,
        typer.Option(
            metavar="OUT.jsonl",
            help="Write rows here, not a table; - for stdout: a row as soon as it and all before it are done.",
        ),
    ] = None
    skip_errors: Annotated[
        bool, typer.Option("--skip-errors", help="Give a bad line a row with its error, and continue.")
    ] = False
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run stopped.")] = False
    check: Annotated[bool, typer.Option("--check", help="Compare with the target decoding each prompt alone.")] = False
    stats: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write counters and times here.")] = None

    @property
    def kv_layout(self) -> Layout | None:
        """Name of the KV layout; None if the decoder chooses it."""
        return self.layout or ("ragged" if self.method == "exspec" else None)

    @property
    def prints_rows(self) -> bool:
        """Rows go to standard output."""
        return self.output == "-"

    @property
    def file(self) -> Path | None:
        """The file that rows go to, if any."""
        return None if self.output is None or self.prints_rows else Path(self.output)


@with_options(Options)
def generate(context: typer.Context, options: Options) -> None:
    """Continue a file of prompts, in batches, by speculative decoding."""
    _check_names(options)
    _check_method(options)
    prompt_list = read(options.prompts, skip_errors=options.skip_errors)
    _check_paths(options)
    with _open_rows(options, prompt_list) as rows:
        screen = display.open_display()
        try:
            passed = _run(options, prompt_list, rows, screen)
        except KeyboardInterrupt:
            screen.close()
            screen.message(_describe_interruption(options, rows))
            raise typer.Exit(130) from None
        except WriteError as error:
            raise WriteError(f"{error}; {_describe_interruption(options, rows)}") from error
        finally:
            screen.close()
    raise typer.Exit(0 if passed else 1)


def _check_names(options: Options) -> None:
    for option in ("target", "draft"):
        try:
            getattr(options, option).encode()
        except UnicodeEncodeError as error:
            raise InputError(f"--{option} is not UTF-8") from error


def _check_method(options: Options) -> None:
    users = {"layout": ("eqspec", "exspec"), "window": ("exspec",)}
    for option, methods in users.items():
        if getattr(options, option) is not None and options.method not in methods:
            raise InputError(f"--{option} needs --method {' or '.join(methods)}")


def _check_paths(options: Options) -> None:
    if options.resume and options.file is None:
        raise InputError("--resume needs --output, and a file")
    written = [check_writable(path) for path in (options.file, options.stats) if path]
    if options.file:
        written.append(check_writable(journal_path(options.file)))
    for path in written:
        if path == Path(os.path.realpath(options.prompts)):
            raise InputError(f"{path} is the prompts file; choose another place to write")
    if len(set(written)) < len(written):
        raise InputError("--output, its journal and --stats must be different files")


def _open_rows(options: Options, prompts: list[Prompt]) -> Rows:
    from ..models import resolve_device, resolve_dtype

    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, device)
    if options.file is None:
        return PrintedRows(len(prompts)) if options.prints_rows else Rows(len(prompts))
    settings = {
        "method": options.method,
        "target": options.target,
        "batch_size": options.batch_size,
        "max_new_tokens": options.max_new_tokens,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
        "chat": options.chat,
    }
    if options.method != "autoregressive":
        keys = ("draft", "num_draft_tokens", "window")
        settings |= {key: getattr(options, key) for key in keys} | {"layout": options.kv_layout or "auto"}
    return Journal(options.file, prompts, settings, resume=options.resume)


def _run(options: Options, prompts: list[Prompt], rows: Rows, screen: display.Display) -> bool:
    """Decode what is missing, report, and say whether no prompt failed and the check passed."""
    if rows.complete and not options.check:
        from ..result import GenerationStats

        rows.finish()
        screen.message(f"nothing to do: {options.file} has a row for each of the {len(prompts)} prompts")
        _write_stats(options, GenerationStats(), None, rows, [], options.kv_layout)
        return not _any_failed(rows)
    job = _Job(options, prompts, rows, screen)
    stats = job.decode()
    rows.finish()
    report = job.check() if options.check else None
    screen.close()
    ordered = [rows.rows[index] for index in sorted(rows.rows)]
    # first, since the reader of a pipe may have closed it
    _write_stats(options, stats, report, rows, job.requests, job.layout)
    if options.output is None:
        display.print_answers(ordered)
    # rows alone are on standard output
    with contextlib.redirect_stdout(sys.stderr) if options.prints_rows else contextlib.nullcontext():
        display.print_summary(stats, len(ordered), rows.resumed)
        if report:
            display.print_check(report, len(ordered))
    return not _any_failed(rows) and (report is None or report.mismatches == 0)


def _any_failed(rows: Rows) -> bool:
    return any("error" in row for row in rows.rows.values())


class _Job:
    """A workload and the decoder that continues its prompts."""

    def __init__(self, options: Options, prompts: list[Prompt], rows: Rows, screen: display.Display):
        self.options, self.prompts, self.rows, self.screen = options, prompts, rows, screen
        # with exspec, a prompt that does not fit fails by itself
        check_lengths = options.method != "exspec"
        self.work = Workload(
            prompts, options, screen.message, check_lengths=check_lengths, skip_errors=options.skip_errors
        )
        self.requests: list[dict[str, Any]] = []
        self.layout: str | None = options.kv_layout

    def decode(self) -> GenerationStats:
        """Continue every prompt that misses its row; recorded rows stay as they are."""
        self.screen.begin("generating", len(self.rows.rows), len(self.prompts))
        return self._decode_stream() if self.options.method == "exspec" else self._decode_batches()

    def _decode_stream(self) -> GenerationStats:
        from .. import EXSpec

        options = self.options
        decoder = EXSpec(
            self.work.target,
            self.work.drafter(options.draft),
            num_draft_tokens=options.num_draft_tokens,
            batch_size=options.batch_size,
            window=options.window,
            layout=options.kv_layout,
        )
        self._record_errors()
        missing = [index for index in range(len(self.prompts)) if index not in self.rows.rows]
        limits = {key: self.work.limits[key] for key in ("max_new_tokens", "eos_token_id")}
        prompts = [self.work.encoded[index] for index in missing]
        stream = decoder.generate(prompts, on_round=self.screen.update, **limits)
        for count, row in enumerate(stream, 1):
            index = missing[row.index]
            self._record(index, row)
            self.requests.append({"index": index} | asdict(row.record))
            self.screen.advance()
            if row.error:
                self.screen.message(f"prompt {index} failed: {row.error}")
            if count % options.batch_size == 0 or count == len(missing):
                self.screen.end_of_batch(display.describe_rate(stream.stats))
        return stream.stats

    def _decode_batches(self) -> GenerationStats:
        """Whole batches of which a row is missing."""
        from ..result import GenerationStats

        generate, stats = self._decoder(), GenerationStats()
        self._record_errors()
        usable = [index for index in range(len(self.prompts)) if index not in self.work.errors]
        for first in range(0, len(usable), self.options.batch_size):
            indices = usable[first : first + self.options.batch_size]
            if any(index not in self.rows.rows for index in indices):
                stats += self._decode_batch(generate, indices, stats)
                self.screen.end_of_batch(display.describe_rate(stats))
        return stats

    def _record(self, index: int, row: RowResult) -> None:
        self.rows.append(with_prompt(self.work.record(index, row), self.prompts[index]))

    def _record_errors(self) -> None:
        for index in sorted(self.work.errors.keys() - self.rows.rows.keys()):
            prompt, error = self.prompts[index], self.work.errors[index]
            self.rows.append(with_prompt(failed_row(prompt, error), prompt))
            self.screen.advance()
            self.screen.message(f"prompt {index} failed: {error}")

    def check(self) -> Report:
        """Compare every row with the target's own greedy decoding of its prompt alone."""
        from ..audit.equivalence import EquivalenceCheck
        from ..audit.oracle import Oracle

        check = EquivalenceCheck(Oracle(self.work.target, **self.work.limits))
        self.screen.begin("checking", 0, len(self.prompts))
        for index, prompt_ids in enumerate(self.work.encoded):
            row = self.rows.rows[index]
            if "error" not in row:
                check.add(index, prompt_ids, row["token_ids"])
            self.screen.advance()
        self.screen.end_of_batch()
        return check.report()

    def _decoder(self) -> Callable[..., GenerationResult]:
        if self.options.method == "autoregressive":
            from ..decoding import autoregressive

            return partial(autoregressive.generate, self.work.target, **self.work.limits)
        from .. import EQSpec

        decoder = EQSpec(
            self.work.target,
            self.work.drafter(self.options.draft),
            num_draft_tokens=self.options.num_draft_tokens,
            layout=self.options.kv_layout,
        )
        self.layout = decoder.layout
        return partial(decoder.generate, **self.work.limits)

    def _decode_batch(
        self, generate: Callable[..., GenerationResult], indices: list[int], before: GenerationStats
    ) -> GenerationStats:
        def on_finish(row: RowResult) -> None:
            index = indices[row.index]
            if index not in self.rows.rows:
                self._record(index, row)
                self.screen.advance()

        ids, mask = pad_left([self.work.encoded[index] for index in indices], self.work.limits["pad_token_id"])
        device = self.work.target.device
        result = generate(
            ids.to(device),
            mask.to(device),
            on_round=lambda running: self.screen.update(before + running),
            on_finish=on_finish,
        )
        return result.stats


def _write_stats(
    options: Options,
    stats: GenerationStats,
    report: Report | None,
    rows: Rows,
    requests: list[dict[str, Any]],
    layout: str | None,
) -> None:
    if options.stats is None:
        return
    counters = ("tokens", "seconds", "tokens_per_second", "rounds", "drafted", "accepted", "mean_accepted")
    more = ("stage_seconds", "bytes_moved", "host_syncs_per_round")
    matches = ("exact_match", "partial_match", "near_ties")
    record = {
        **{key: getattr(stats, key) for key in counters + more},
        **{key: getattr(report, key, None) for key in matches},
        "resumed_rows": rows.resumed,
        "layout": layout,
    }
    if options.method == "exspec":
        record["requests"] = requests
    with writing(options.stats):
        options.stats.write_text(json.dumps(record, indent=2) + "\n")


def _describe_interruption(options: Options, rows: Rows) -> str:
    done = f"stopped: {len(rows.rows)} of {rows.total} prompts are done"
    if options.output is None:
        return f"{done}; without --output nothing is kept"
    if not rows.rows or options.prints_rows:
        return done
    if rows.finished:
        return f"{done} and in {options.file}"
    return f"{done} and kept; run the same command with --resume to go on"
