"""The functions that give instructions their meaning, and their common parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .errors import PtxError, Unsupported
from .form import Form
from .parser import Instruction, Kernel
from .scheduler import Step
from .threads import Threads
from .types import FLOATS

Handler = Callable[[Form], Step]
_INTEGER: dict[str, Handler] = {}
_FLOAT: dict[str, Handler] = {}


def compile_instruction(instruction: Instruction, kernel: Kernel) -> Step:
    """The instruction as a function; raises :class:`Unsupported` for all that is not known here."""
    form = Form(instruction, kernel)
    handlers = _FLOAT if FLOATS & set(instruction.modifiers) else _INTEGER
    if form.op not in handlers:
        raise Unsupported("instruction")
    step = handlers[form.op](form)
    form.close()
    return step


def handles(*ops: str, floats: bool = False) -> Callable[[Handler], Handler]:
    """The decorated function serves ``ops`` on floats, or on all other types."""

    def register(handler: Handler) -> Handler:
        (_FLOAT if floats else _INTEGER).update(dict.fromkeys(ops, handler))
        return handler

    return register


def elementwise(form: Form, function: Callable[..., np.ndarray], types: Sequence[str]) -> Step:
    """``operand 0 = function(operand 1, ...)`` with the given source types."""
    form.expect(len(types) + 1)
    write, reads = form.write(), [form.read(i + 1, type_name) for i, type_name in enumerate(types)]

    def step(threads: Threads, lanes: np.ndarray) -> None:
        write(threads, lanes, function(*(read(threads, lanes) for read in reads)))

    return step


def by_warp(lanes: np.ndarray, mask: np.ndarray, threads: Threads) -> tuple[int, int]:
    """Shape of ``lanes`` as warps; refuses a warp of which only a part is here."""
    whole = threads.special["%laneid"][lanes].reshape(-1, 32) if len(lanes) % 32 == 0 else np.empty((0, 32))
    if not len(whole) or (whole != np.arange(32)).any() or (mask != np.uint32(0xFFFFFFFF)).any():
        raise PtxError("a warp instruction without the whole warp")
    return whole.shape
