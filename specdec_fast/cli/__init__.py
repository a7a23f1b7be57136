"""The command line: ``specdec-fast generate``, ``audit`` and ``info``."""

from __future__ import annotations

import io
import sys

import typer

from ..errors import InputError
from .audit import audit
from .generate import generate
from .info import info

app = typer.Typer(
    help="Batch speculative decoding for Hugging Face causal LMs.", add_completion=False, pretty_exceptions_enable=False
)
app.command()(generate)
app.command()(audit)
app.command()(info)


def main(args: list[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit status: 0 fine, 1 a check failed, 2 a usage or input error (one line on stderr), 130 interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        # a terminal or pipe that is not UTF-8 must not end a run
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        return app(args, prog_name="specdec-fast", standalone_mode=False) or 0
    except typer.TyperException as error:
        message = error.format_message()
    except (InputError, OSError) as error:
        message = str(error)
    print("error:", " ".join(message.split()), file=sys.stderr)
    return 2
