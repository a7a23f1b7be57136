"""Run with ``TRITON_INTERPRET=1``: ragged attention as Python, through the package, against the definition.

Arguments are how many cases to draw, then mutants of the kernels that must not pass.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import torch

from gpu import gates
from gpu.attention_cases import Case, cases, telling
from specdec_fast import ops
from specdec_fast.layouts.ragged import attention


def check(case: Case, kernels: ModuleType) -> None:
    kernels.wanted_blocks = lambda device: case.wanted_blocks
    ops.triton_kernel = lambda name, device: kernels
    arguments = case.query, case.k_pool, case.v_pool, case.packing, case.scale
    case.check(attention.ragged_attention(*arguments, **case.options))


def passes(mutant: str) -> bool:
    kernels = importlib.import_module(f"{mutant}.ragged_attention")
    try:
        for case in telling(torch.float32):
            check(case, kernels)
    except AssertionError:
        return False
    return True


def main(count: int, mutants: list[str]) -> None:
    torch.set_num_threads(1)
    # memory that nothing was written to is NaN
    torch.use_deterministic_algorithms(True)
    kernels = importlib.import_module("specdec_fast.kernels.ragged_attention")
    gates.for_each(cases(longest=400), count, lambda case: check(case, kernels))
    for case in telling(torch.float32):
        check(case, kernels)
    survivors = [mutant for mutant in mutants if passes(mutant)]
    assert not survivors, survivors


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
