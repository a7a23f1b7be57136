"""Ragged attention on a GPU, where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu import gates
from gpu.attention_cases import Case, build, cases
from torch import Tensor

from specdec_fast.layouts.ragged import Packing
from specdec_fast.layouts.ragged.attention import ragged_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]


def on_gpu(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of ``ragged_attention``."""
    tensors = (x.cuda() for x in (case.query, case.k_pool, case.v_pool))
    packing = Packing(case.segments, [1] * len(case.segments), torch.device("cuda"))
    options = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in case.options.items()}
    return (*tensors, packing, case.scale), options


@pytest.mark.parametrize("backend", ["auto", "cuda"])
def test_parity(backend, monkeypatch):
    """In one Triton launch, and row by row in PyTorch."""
    monkeypatch.setenv("SPECDEC_FAST_BACKEND", backend)

    def check(case: Case) -> None:
        arguments, options = on_gpu(case)
        case.check(ragged_attention(*arguments, **options).cpu())

    gates.for_each(cases(2000), 40, check)


def test_cuda_graph():
    """Replayed with other tokens and other KV, and without a synchronisation while it was captured."""
    case = build([(3000, 5), (20, 5), (0, 9)], groups=4, dims=(128, 128))
    arguments, options = on_gpu(case)
    ragged_attention(*arguments, **options)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            out = ragged_attention(*arguments, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for seed in range(3):
        other = build([(3000, 5), (20, 5), (0, 9)], groups=4, dims=(128, 128), seed=seed)
        for to, new in zip(arguments[:4], (other.query, other.k_pool, other.v_pool, other.packing), strict=True):
            to, new = (x.table if isinstance(x, Packing) else x for x in (to, new))
            to.copy_(new)
        graph.replay()
        other.check(out.cpu())
