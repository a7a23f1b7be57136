"""Control flow: the threads with the lowest program counter run, so that diverged paths meet again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .errors import BarrierDivergence, PtxError, Unsupported
from .parser import Instruction, Kernel
from .threads import Threads

Step = Callable[[Threads, np.ndarray], None]
# modifiers and operands a control instruction may have
_CONTROL = {
    "bra": ({"uni"}, 1),
    "ret": ({"uni"}, 0),
    "exit": (set(), 0),
    "bar": ({"sync"}, 1),
    "barrier": ({"sync"}, 1),
}
_MAX_STEPS = 5_000_000
_RUNNING, _WAITING, _DONE = range(3)


def is_control(instruction: Instruction, kernel: Kernel) -> bool:
    """True if the scheduler executes this; refuses forms it does not know."""
    if instruction.op not in _CONTROL or instruction.modifiers == ("warp", "sync"):
        return False
    allowed, operands = _CONTROL[instruction.op]
    if not set(instruction.modifiers) <= allowed or len(instruction.operands) != operands:
        raise Unsupported("modifier or operand")
    if instruction.op == "bra" and instruction.operands[0] not in kernel.labels:
        raise Unsupported("label")
    if instruction.op in ("bar", "barrier") and (instruction.modifiers, instruction.operands) != (("sync",), ("0",)):
        raise Unsupported("barrier other than number 0 for the whole block")
    return True


def run(kernel: Kernel, steps: Sequence[Step | None], threads: Threads) -> None:
    """Execute a batch of blocks; ``steps`` has None where control flow is."""
    program = np.zeros(len(threads), np.int64)
    state = np.full(len(threads), _RUNNING, np.int8)
    for _ in range(_MAX_STEPS):
        running = state == _RUNNING
        if running.any():
            at = int(program[running].min())
            lanes = np.flatnonzero(running & (program == at))
            others = program[running & (program != at)]
            meet = int(others.min()) if len(others) else len(kernel.code)
            _run_straight(kernel, steps, threads, lanes, program, state, meet)
        elif (state == _WAITING).any():
            _release_barriers(kernel, threads, program, state)
        else:
            return
    raise PtxError(f"{kernel.name} does not end")


def _run_straight(
    kernel: Kernel,
    steps: Sequence[Step | None],
    threads: Threads,
    lanes: np.ndarray,
    program: np.ndarray,
    state: np.ndarray,
    meet: int,
) -> None:
    """Run ``lanes`` to the next control instruction, or to where other threads wait."""
    at = int(program[lanes[0]])
    warps = len(np.unique(threads.who.warp[lanes]))
    while at < len(kernel.code):
        instruction, step = kernel.code[at], steps[at]
        threads.statistics.warp_instructions += warps
        active = lanes
        if instruction.predicate:
            active = lanes[threads.registers[instruction.predicate][lanes] != instruction.negated]
        at += 1
        if step is None:
            program[lanes] = at
            if instruction.op == "bra":
                program[active] = kernel.labels[instruction.operands[0]]
            else:
                state[active] = _DONE if instruction.op in ("ret", "exit") else _WAITING
            return
        if len(active):
            try:
                step(threads, active)
            except PtxError as error:
                raise type(error)(f"{kernel.name} line {instruction.line}: `{instruction.text}`: {error}") from None
        if at == meet:
            break
    program[lanes] = at
    if at == len(kernel.code):
        state[lanes] = _DONE


def _release_barriers(kernel: Kernel, threads: Threads, program: np.ndarray, state: np.ndarray) -> None:
    waiting = np.flatnonzero(state == _WAITING)
    blocks = np.unique(threads.slot[waiting])
    present = np.isin(threads.slot, blocks)
    if (state[present] == _DONE).any():
        raise BarrierDivergence(f"{kernel.name}: threads exit while others of their block wait at a barrier")
    barriers = np.unique(np.stack([threads.slot[waiting], program[waiting]]), axis=1)
    if barriers.shape[1] != len(blocks):
        raise BarrierDivergence(f"{kernel.name}: threads of one block wait at different barriers")
    threads.who.epoch[waiting] += 1
    state[waiting] = _RUNNING
    threads.statistics.barriers += len(blocks)
