"""The CUDA kernels without a GPU: emulated as nvcc compiles them, and on host threads under sanitizers."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch
from gpu import artefacts, cases, gates, harness
from gpu.arguments import assert_same_memory, duplicate, tensors
from gpu.ptx import DataRace, Emulator, Statistics, Trap
from gpu.static_gate import resources
from hypothesis import strategies as st

needs_nvcc = pytest.mark.skipif(not artefacts.HAS_NVCC, reason="no nvcc on the path for all architectures")

# __launch_bounds__ of 5 blocks of 128 threads leaves this many
REGISTERS = 96
EMULATED = {"realign_": 60, "realign_step_": 60, "append_kv_": 30}
ON_HOST = {"realign_": 40, "realign_step_": 40, "append_kv_": 20}
BYTES = 1 << 15


def repeated(counts: dict[str, int]):
    """Each operator, and ten times its cases under ``slow``."""
    full = [pytest.param(name, 10 * count, marks=pytest.mark.slow) for name, count in counts.items()]
    return pytest.mark.parametrize(("operation", "count"), [*counts.items(), *full])


def for_each_case(operation: str, count: int, check) -> None:
    """Call ``check`` with arguments, threads in a block, and blocks that are wanted."""
    case = st.tuples(cases.arguments(operation, BYTES), st.sampled_from([32, 32, 64]), st.sampled_from([1, 60]))
    gates.for_each(case, count, lambda drawn: check(*drawn))


@functools.cache
def packer() -> harness.Packer:
    return harness.Packer(artefacts.library())


@functools.cache
def emulator(sources=artefacts.SOURCES) -> Emulator:
    return Emulator(artefacts.ptx(sources))


def emulate(
    operation: str, arguments: list, threads: int = 128, wanted_blocks: int = 1, sources=artefacts.SOURCES
) -> Statistics:
    blocks, shared, parameters = packer()(operation, arguments, threads, wanted_blocks)
    if not blocks:
        return Statistics()
    return emulator(sources).launch(
        f"{operation}kernel", (blocks,), parameters, list(tensors(arguments)), (threads,), dynamic_shared=shared
    )


@needs_nvcc
@repeated(EMULATED)
def test_emulated(operation, count):
    def check(arguments, threads, wanted_blocks):
        got = duplicate(arguments)
        emulate(operation, got, threads, wanted_blocks)
        assert_same_memory(got, gates.expected(operation, arguments))

    for_each_case(operation, count, check)


@pytest.mark.parametrize("sanitizer", artefacts.SANITIZERS)
@repeated(ON_HOST)
def test_on_host(operation, count, sanitizer, tmp_path):
    file = tmp_path / "cases"

    def check(arguments, threads, wanted_blocks):
        case = harness.words(operation, arguments, threads, wanted_blocks, numbered=True)
        harness.write_case(file, case, arguments, gates.expected(operation, arguments))

    for_each_case(operation, count, check)
    done = harness.run(artefacts.program(sanitizer), file, SHIM_CONC="2")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@needs_nvcc
@pytest.mark.parametrize("shift", gates.FAR)
def test_far_moves(shift):
    gates.moves_far(emulate, shift)


@needs_nvcc
def test_one_launch_for_all_layers():
    gates.moves_all_layers(emulate)


# what keeps the kernels sound: a barrier, or a block for each head
MUTANTS = {
    "loads of a move": ("realign.cuh", "__syncthreads();", "", 0),
    "rows of the plan": ("realign_step.cuh", "__syncthreads();", "", 1),
    "candidates of the plan": ("realign_step.cuh", "__syncthreads();", "", 0),
    "new tokens": ("realign_step.cuh", "__syncthreads();", "", 2),
    "two blocks on one head": ("realign.cuh", "head(block % heads)", "head(0)", 0),
}


def mutant(name: str) -> Path:
    return artefacts.mutant(name.replace(" ", "-"), *MUTANTS[name])


@needs_nvcc
@pytest.mark.parametrize("name", MUTANTS)
def test_emulator_notices(name):
    with pytest.raises(DataRace):
        emulate("realign_step_", cases.ragged_round(), sources=mutant(name))


@pytest.mark.parametrize("name", ["loads of a move", "two blocks on one head"])
def test_thread_sanitizer_notices(name, tmp_path):
    arguments = cases.ragged_round()
    case = harness.words("realign_step_", arguments, 32, 1, numbered=True)
    harness.write_case(tmp_path / "case", case, arguments, gates.expected("realign_step_", arguments))
    done = harness.run(artefacts.program("thread", mutant(name)), tmp_path / "case", SHIM_CONC="2")
    assert done.returncode != 0
    assert "data race" in done.stderr


@needs_nvcc
@pytest.mark.parametrize("arch", artefacts.ARCHITECTURES)
@pytest.mark.parametrize("source", ["realign", "append_kv"])
def test_static_gate(source, arch):
    kernels = resources(artefacts.object_file(source), arch)
    assert len(kernels) == {"realign": 2, "append_kv": 1}[source]
    for name, used in kernels.items():
        assert used.stack_bytes == 0, name
        assert used.registers <= REGISTERS, name
        assert {1, 2, 4, 8, 16} == used.loads == used.stores, name


@needs_nvcc
@pytest.mark.parametrize("operation", ["realign_", "realign_step_"])
def test_each_moved_byte_is_read_once_and_written_once(operation):
    gates.moves_each_byte_once(emulate, operation)


@needs_nvcc
def test_each_appended_byte_is_read_once_and_written_once():
    gates.appends_each_byte_once(emulate)


@needs_nvcc
@pytest.mark.parametrize("name", gates.UNMOVED)
def test_nothing_moves(name):
    gates.moves_nothing(emulate, name)


def test_few_rows_and_heads_split_the_head_dim_and_nothing_else():
    moves = [torch.tensor([x]) for x in (1, 60, 3)]
    arguments = [[torch.zeros(1, 2, 64, 128, dtype=torch.bfloat16)], *moves]
    blocks = {wanted: packer()("realign_", arguments, 128, wanted)[0] for wanted in (1, 4, 8, 1000)}
    # 256 bytes make at most eight sectors
    assert blocks == {1: 2, 4: 4, 8: 8, 1000: 16}


@needs_nvcc
@pytest.mark.parametrize("move", [(1, 60, 4), (0, 10, -1), (5, -1, 1)])
def test_a_move_out_of_range_traps(move):
    arguments = [[torch.zeros(1, 1, 64, 8)], *(torch.tensor([x]) for x in move)]
    with pytest.raises(Trap):
        emulate("realign_", arguments)


@needs_nvcc
def test_a_token_out_of_range_traps():
    pool, new = torch.zeros(2, 1, 4, 8), torch.ones(1, 1, 1, 8)
    for row, position in ((2, 0), (0, 4), (-1, 0)):
        with pytest.raises(Trap):
            emulate("append_kv_", [pool, pool.clone(), new, new, torch.tensor([row]), torch.tensor([position])])
    assert not pool.any()


def test_every_barrier_has_a_mutant():
    barriers = sum(len(re.findall(r"__syncthreads\(\)", path.read_text())) for path in artefacts.SOURCES.iterdir())
    assert barriers == sum(old == "__syncthreads();" for _, old, _, _ in MUTANTS.values())
