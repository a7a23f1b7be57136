"""The Triton kernels without a GPU: interpreted, and emulated as they are compiled for one."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from arena import Arena
from gpu import artefacts, cases, gates, mutants
from gpu.arguments import assert_same_memory, duplicate
from gpu.ptx import DataRace, Statistics
from gpu.static_gate import resources
from gpu.triton_offline import captured_launches, emulate
from test_ops_parity import make_caches
from triton.backends.compiler import GPUTarget

from specdec_fast.kernels import realign as kernels
from specdec_fast.kernels import tables

ROOT = Path(__file__).parents[1]
INTERPRETED = {"realign_": 90, "realign_step_": 50, "append_kv_": 60}
# a kernel is compiled anew for every such set of tensors, which takes longer than running it
CACHES = {
    80: [("plain", 2, 64, torch.bfloat16), ("heads_inside", 3, 96, torch.float32), ("paired", 1, 67, torch.float16)],
    90: [("narrow", 2, 80, torch.float16), ("plain", 1, 256, torch.float64), ("strided", 2, 3, torch.complex64)],
    100: [("narrow", 1, 128, torch.bfloat16), ("columns_inside", 2, 16, torch.int8), ("plain", 3, 1, torch.float32)],
}
MASKS = {
    80: [(torch.bfloat16, 0, False), (torch.bool, 7, True)],
    90: [(torch.float32, 0, True)],
    100: [(torch.float16, 20, False), (torch.float64, 0, True)],
}
BYTES = 1 << 14


def fixed_for(operation: str, arch: int, variant: int) -> dict:
    """Fixed settings of a kernel; ``variant`` 0 or 1."""
    if operation == "append_kv_":
        (*_, dtype), sides = CACHES[arch][variant], [list(cache[:3]) for cache in CACHES[arch][:2]]
        return {"sides": sides, "dtype": dtype}
    fixed = {"caches": CACHES[arch]}
    if operation == "realign_step_":
        fixed |= {"decided": variant == 1, "layout": (variant + arch // 10) % 2, "masks": MASKS[arch]}
    return fixed


def run(operation: str, arguments: list, arch: int = 90, module=kernels) -> Statistics:
    """Launch as a user would, compiled for ``arch``, in the emulator."""
    with captured_launches(GPUTarget("cuda", arch, 32)) as launches:
        getattr(module, operation)(*arguments)
    assert len(launches) <= 1
    return emulate(launches[0], arguments) if launches else Statistics()


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("operation", INTERPRETED)
def test_interpreted(operation, times):
    environment = {"TRITON_INTERPRET": "1", "SPECDEC_FAST_BACKEND": "triton", "PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    command = [sys.executable, "-m", "gpu.interpret", operation, str(times * INTERPRETED[operation])]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", [0, 1])
@pytest.mark.parametrize("arch", artefacts.ARCHITECTURES)
@pytest.mark.parametrize("operation", INTERPRETED)
def test_emulated(operation, arch, variant, times):
    def check(arguments):
        got = duplicate(arguments)
        run(operation, got, arch)
        assert_same_memory(got, gates.expected(operation, arguments))

    gates.for_each(cases.arguments(operation, BYTES, fixed_for(operation, arch, variant)), 3 * times, check)


@pytest.mark.parametrize("operation", ["realign_", "realign_step_"])
def test_each_moved_byte_is_read_once_and_written_once(operation):
    gates.moves_each_byte_once(run, operation)


def test_each_appended_byte_is_read_once_and_written_once():
    gates.appends_each_byte_once(run)


@pytest.mark.parametrize("name", gates.UNMOVED)
def test_nothing_moves(name):
    gates.moves_nothing(run, name)


@pytest.mark.parametrize("shift", gates.FAR)
def test_far_moves(shift):
    gates.moves_far(run, shift)


@pytest.mark.parametrize(("wanted", "strips"), [(1, 1), (4, 2), (1000, 8)])
def test_few_rows_and_heads_split_the_head_dim_and_nothing_else(wanted, strips, monkeypatch):
    monkeypatch.setattr(tables, "wanted_blocks", lambda device: wanted)
    tables._strip_table.cache_clear()
    arguments = [[torch.randn(1, 2, 64, 128).bfloat16()], *(torch.tensor([x]) for x in (1, 60, 3))]
    want = gates.expected("realign_", arguments)
    run("realign_", arguments)
    assert_same_memory(arguments, want)
    # 256 bytes make at most eight sectors
    assert tables.strip_table(arguments[0], torch.device("cpu")).num_strips == strips
    tables._strip_table.cache_clear()


def test_one_launch_for_all_layers():
    gates.moves_all_layers(run)


# what keeps the kernels sound: a barrier, or a program for each head
MUTANTS = {
    "loads of a move": ("move.py", "tl.debug_barrier()", "pass"),
    "new tokens": ("realign.py", "tl.debug_barrier()", "pass"),
    "two programs on one head": ("realign.py", "row, move % heads,", "row, 0,"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_emulator_notices(name, monkeypatch, tmp_path):
    file, old, new = MUTANTS[name]
    assert (ROOT / "kernels" / file).read_text().count(old) == 1
    package = mutants.write(tmp_path, name, file, old, new)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataRace):
        run("realign_step_", cases.ragged_round(), module=importlib.import_module(f"{package}.realign"))


def test_every_barrier_has_a_mutant():
    barriers = sum(path.read_text().count("debug_barrier") for path in (ROOT / "kernels").glob("*.py"))
    assert barriers == sum("barrier" in old for _, old, _ in MUTANTS.values())


def launches_for(target: GPUTarget) -> list:
    """Every operator with keys and values of 128 bfloat16."""
    step = cases.ragged_round(columns=304, dim=128)
    pools, new = [step[0][0], step[0][1]], [torch.zeros(1, 2, 9, 128, dtype=torch.bfloat16) for _ in range(2)]
    with captured_launches(target) as launches:
        kernels.realign_(step[0], *cases.moves_of(step))
        kernels.realign_step_(*step)
        kernels.append_kv_(*pools, *new, torch.arange(9) % 6, torch.arange(9))
    return launches


@pytest.mark.parametrize("arch", artefacts.ARCHITECTURES)
def test_static_gate(arch, tmp_path):
    for launch in launches_for(GPUTarget("cuda", arch, 32)):
        binary = tmp_path / f"{launch.kernel.name}.cubin"
        binary.write_bytes(launch.kernel.asm["cubin"])
        (used,) = resources(binary).values()
        assert used.stack_bytes == 0
        # four blocks of 128 threads on a processor
        assert used.registers <= 128
        assert 16 in used.loads and 16 in used.stores
        assert 1 not in used.loads | used.stores


@pytest.mark.parametrize("arch", artefacts.ARCHITECTURES)
def test_a_move_does_not_pass_through_shared_memory(arch):
    # it would if Triton chose different layouts for a load and the store of what was loaded
    with captured_launches(GPUTarget("cuda", arch, 32)) as launches:
        for caches in (CACHES[arch], CACHES[arch][:1], CACHES[arch][1:]):
            kernels.realign_(make_caches(Arena(), 2, 7, caches), *(torch.tensor([x, 1]) for x in (1, 2, 3)))
    assert [launch.kernel.metadata.shared for launch in launches] == [0, 0, 0]


def test_compiles_for_amd():
    for launch in launches_for(GPUTarget("hip", "gfx942", 64)):
        assembly = launch.kernel.asm["amdgcn"]
        assert re.search(r"(global|buffer)_load_dwordx4", assembly)
        assert re.search(r"(global|buffer)_store_dwordx4", assembly)
        assert re.findall(r"spill_count:\s*(\d+)", assembly) == ["0", "0"]
