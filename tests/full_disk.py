"""A disk that is full, at once or after some lines of a journal."""

import errno
import os

from specdec_fast.cli.journal import Journal


def full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fill_after(patch, lines):
    """Let a journal write ``lines`` lines, the next meets a full disk."""
    write, written = Journal._write, []

    def write_or_fail(self, line):
        if len(written) == lines:
            full_disk()
        written.append(line)
        write(self, line)

    patch.setattr(Journal, "_write", write_or_fail)
