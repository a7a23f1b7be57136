"""Starting, grouping and awaiting asynchronous copies."""

from __future__ import annotations

import numpy as np

from .errors import PtxError, Unsupported
from .form import Form
from .handlers import handles
from .operands import address
from .scheduler import Step
from .threads import Threads


@handles("cp")
def _copy(form: Form) -> Step:
    form.need("async")
    if form.take("commit_group"):
        form.expect(0)
        return _commit
    if form.take("wait_group"):
        form.expect(1)
        pending = int(form.operands[0], 0)
        return lambda threads, lanes: threads.copies.finish(threads, lanes, pending)
    form.need("ca", "cg"), form.need("shared"), form.need("global")
    form.expect(3, 4)
    size = int(form.operands[2], 0)
    if size not in (4, 8, 16):
        raise Unsupported(f"a copy of {size} bytes")
    target, source = (address(operand, form.kernel) for operand in form.operands[:2])
    given = form.read(3 if len(form.operands) == 4 else 2, "u32")

    def start(threads: Threads, lanes: np.ndarray) -> None:
        wanted = given(threads, lanes)
        if ((wanted != 0) & (wanted != size)).any():
            raise PtxError("a copy of a part")
        values = np.zeros((len(lanes), size), np.uint8)
        reads = wanted == size
        if reads.any():
            values[reads] = threads.load("global", source(threads, lanes)[reads], size, lanes[reads])
        threads.copies.start(threads, lanes, target(threads, lanes), values)

    return start


def _commit(threads: Threads, lanes: np.ndarray) -> None:
    threads.copies.committed[lanes] += 1
