"""The command line: ``specdec-fast generate``, ``audit`` and ``info``."""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import Annotated

import typer

from .. import __version__
from ..errors import InputError
from ..paths import writing
from .audit import audit
from .generate import generate
from .info import info

app = typer.Typer(
    help="Batch speculative decoding for Hugging Face causal LMs.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(audit)
app.command()(info)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"specdec-fast {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Batch speculative decoding for Hugging Face causal LMs."""


def main(args: list[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit status: 0 fine, 1 a check or a prompt failed, 2 a usage or input error (one line on stderr), 130
        interrupted, 141 where the reader of a pipe has closed it.
    """
    if sys.stderr is None:
        # closed from the start: messages must not end up among the rows
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    for stream in (sys.stdout, sys.stderr):
        # a terminal or pipe that is not UTF-8 must not end a run
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        return _run(args)
    except BrokenPipeError:
        return 128 + signal.SIGPIPE
    finally:
        _drop_unwritten()


def _run(args: list[str] | None) -> int:
    try:
        if sys.stdout is None:
            raise InputError("standard output is closed; send it to a file, /dev/null for instance")
        status = app(args, prog_name="specdec-fast", standalone_mode=False) or 0
        with writing("standard output"):
            sys.stdout.flush()
        return status
    except SystemExit as end:
        # typer raises it for a broken pipe, among others
        if isinstance(end.__context__, BrokenPipeError):
            raise end.__context__ from None
        raise
    except BrokenPipeError:
        raise
    except typer.TyperException as error:
        message = error.format_message()
    except (InputError, OSError) as error:
        message = str(error)
    print("error:", " ".join(message.split()), file=sys.stderr)
    return 2


def _drop_unwritten() -> None:
    """Drop the buffers of streams that cannot be written, which the interpreter would fail to flush at exit."""
    for stream in filter(None, (sys.__stdout__, sys.__stderr__)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
