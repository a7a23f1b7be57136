"""The Triton and CUDA operators on a GPU, where there is one."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from gpu import cases, gates
from gpu.arguments import assert_same_memory, duplicate, storages

from specdec_fast import ops
from specdec_fast.operators import backends

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

OPERATIONS = ("realign_", "realign_step_", "append_kv_")


@pytest.fixture(params=["triton", "cuda"])
def backend(request) -> ModuleType:
    """The module of one backend's operators."""
    if request.param == "cuda":
        if not any(b.name == "cuda" and b.available for b in backends.available()):
            pytest.skip("the CUDA operators are not built")
        return ops
    pytest.importorskip("triton")
    from specdec_fast.kernels import realign

    return realign


def on_gpu(arguments: list) -> list:
    return duplicate(arguments, "cuda")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_parity(backend, operation):
    def check(arguments):
        got = on_gpu(arguments)
        getattr(backend, operation)(*got)
        assert_same_memory(got, gates.expected(operation, arguments))

    # Triton compiles anew for other vectors and head dims
    count = 300 if backend is ops else 25
    gates.for_each(cases.arguments(operation, 1 << 18), count, check)


@pytest.mark.parametrize("shift", [5, -5, 3000])
def test_parity_at_size(backend, shift):
    cache = torch.randint(256, (8, 8, 8192, 256), dtype=torch.uint8)
    columns = torch.tensor([4000, 1, 0, 5000, 2048, 33, 4999, 31])
    arguments = [[cache], torch.full((8,), 100), columns, torch.tensor([shift, 0] * 4).clamp(min=-100)]
    got = on_gpu(arguments)
    backend.realign_(*got)
    assert_same_memory(got, gates.expected("realign_", arguments))


def test_one_kernel_and_no_synchronisation(backend):
    arguments = on_gpu(cases.ragged_round())
    # the first call may compile and copy tables
    backend.realign_step_(*arguments)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.cuda.set_sync_debug_mode("error")
        try:
            backend.realign_step_(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    launched = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(launched) == 1


def test_cuda_graph(backend):
    arguments = cases.ragged_round()
    n_accepted = arguments[7] = torch.zeros(6, dtype=torch.int64)
    captured = on_gpu(arguments)
    # a table may not be copied while a graph is captured
    backend.realign_step_(*captured)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.realign_step_(*captured)
    for seed in range(3):
        n_accepted.copy_(torch.randint(0, 5, (6,), generator=torch.Generator().manual_seed(seed)))
        for to, data in zip(storages(captured).values(), storages(arguments).values(), strict=True):
            to.copy_(data)
        graph.replay()
        assert_same_memory(captured, gates.expected("realign_step_", arguments))


def test_other_stream(backend):
    arguments = cases.ragged_round()
    got = on_gpu(arguments)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        backend.realign_step_(*got)
    stream.synchronize()
    assert_same_memory(got, gates.expected("realign_step_", arguments))
