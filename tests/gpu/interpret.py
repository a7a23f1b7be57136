"""Run with ``TRITON_INTERPRET=1``: the Triton kernels as Python, through the operators, against the definition.

Triton decides when it is imported whether it interprets, which is why this is a program of its own.
"""

from __future__ import annotations

import sys

import torch

from gpu import cases, gates
from gpu.arguments import assert_same_memory
from specdec_fast import ops


def main(operation: str, count: int) -> None:
    torch.set_num_threads(1)

    def check(arguments: list) -> None:
        want = gates.expected(operation, arguments)
        getattr(ops, operation)(*arguments)
        assert_same_memory(arguments, want)

    gates.for_each(cases.arguments(operation, 1 << 12, {"most_rows": 4}), count, check)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
