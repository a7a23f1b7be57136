"""The Triton kernels of ragged attention without a GPU: interpreted, and emulated as they are compiled for one."""

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

from gpu import artefacts, gates, mutants
from gpu.attention_cases import Case, build, cases, telling, windows
from gpu.cases import count_bytes
from gpu.ptx import DataRace, Statistics
from gpu.static_gate import resources
from gpu.triton_offline import captured_launches, emulate
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget

from specdec_fast.kernels import ragged_attention as kernels
from specdec_fast.layouts.ragged import Segment

ROOT = Path(__file__).parents[1]
# what a kernel is compiled for, two of each architecture
COMPILED = {
    80: [
        {"dtype": torch.bfloat16, "dims": (64, 64), "groups": 4, "window": None, "soft_cap": None, "sinks": False},
        {"dtype": torch.float32, "dims": (80, 16), "groups": 3, "window": windows(500), "soft_cap": 3.0, "sinks": True},
    ],
    90: [
        {"dtype": torch.bfloat16, "dims": (128, 128), "groups": 8, "window": windows(500), "soft_cap": None},
        {"dtype": torch.float16, "dims": (16, 80), "groups": 1, "window": None, "soft_cap": 9.0, "sinks": True},
    ],
    100: [
        {"dtype": torch.float16, "dims": (80, 80), "groups": 3, "window": None, "soft_cap": None, "sinks": True},
        {"dtype": torch.bfloat16, "dims": (64, 128), "groups": 2, "window": windows(500), "soft_cap": 20.0},
    ],
}
# of a tile
MOST_QUERIES = {80: 64, 90: 64, 100: 32}
ALWAYS = {"heads": 2, "sinks": False, "packed_query": True, "wanted_blocks": st.sampled_from([1, 1000])}


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """Memory that was not written is NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(9).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def launch(case: Case, arch: int, module=kernels) -> tuple[torch.Tensor, list]:
    """The output, which is yet to be written, and the launches that will."""
    packing = case.packing
    with pytest.MonkeyPatch.context() as patch, captured_launches(GPUTarget("cuda", arch, 32)) as launches:
        patch.setattr(module, "wanted_blocks", lambda device: case.wanted_blocks)
        patch.setattr(module, "_most_checked", lambda device: MOST_QUERIES[arch])
        bounds = packing.table, packing.most_tokens, packing.longest
        out = module.ragged_attention(case.query, case.k_pool, case.v_pool, *bounds, case.scale, *case.options.values())
    return out, launches


def attend(case: Case, arch: int, module=kernels) -> tuple[torch.Tensor, Statistics]:
    """The output, and what the kernel that reads keys and values did."""
    out, launches = launch(case, arch, module)
    statistics = [emulate(each, []) for each in launches]
    return out, statistics[0]


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_interpreted(times, tmp_path):
    wrong = [mutants.write(tmp_path, name, *change) for name, change in mutants.ATTENTION.items()]
    path = f"{ROOT}:{ROOT}/tests:{tmp_path}"
    environment = {"TRITON_INTERPRET": "1", "SPECDEC_FAST_BACKEND": "triton", "PYTHONPATH": path}
    command = [sys.executable, "-m", "gpu.interpret_attention", str(20 * times), *wrong]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", [0, 1])
@pytest.mark.parametrize("arch", artefacts.ARCHITECTURES)
def test_emulated(arch, variant, times):
    fixed = ALWAYS | COMPILED[arch][variant]
    gates.for_each(cases(500, 20, **fixed), 3 * times, lambda case: case.check(attend(case, arch)[0]))


@pytest.mark.parametrize(("capability", "most"), [((8, 0), 64), ((9, 0), 64), ((10, 0), 32)])
def test_tiles_are_no_larger_than_what_is_emulated(capability, most, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert kernels._most_checked(torch.device("cuda")) == most == MOST_QUERIES[capability[0] * 10]


@pytest.mark.parametrize(("arch", "wanted_blocks"), [(80, 1), (90, 1000), (100, 1000)])
def test_each_byte_of_a_row_is_read_once_for_each_kv_head(arch, wanted_blocks):
    case = build([(595, 5), (95, 5), (0, 5), (700, 1)], groups=4, wanted_blocks=wanted_blocks)
    out, statistics = attend(case, arch)
    case.check(out)
    columns = torch.zeros(case.k_pool.shape[0], dtype=torch.int64)
    for segment in case.segments:
        columns[segment.slot] = segment.end
    for pool in (case.k_pool, case.v_pool):
        region = statistics.region(pool)
        assert region.loads.tolist() == count_bytes(pool, torch.zeros_like(columns), columns).tolist()
        assert set(region.widths) == {16}
        # full sectors: neighbouring threads read neighbouring bytes
        assert region.sectors * 32 == region.loads.sum()
    assert (statistics.region(case.query).loads >= 1).all()


def test_a_window_leaves_the_rest_of_a_row_alone():
    case = build([(595, 5), (20, 5)], window=100, wanted_blocks=1000)
    out, statistics = attend(case, 90)
    case.check(out)
    low, columns = (torch.zeros(case.k_pool.shape[0], dtype=torch.int64) for _ in range(2))
    for segment in case.segments:
        low[segment.slot] = max(0, segment.start + 1 - 100)
        columns[segment.slot] = segment.end - low[segment.slot]
    for pool in (case.k_pool, case.v_pool):
        assert statistics.region(pool).loads.tolist() == count_bytes(pool, low, columns).tolist()


def test_a_captured_launch_serves_other_rows():
    """A replayed CUDA graph: the same launch, with other and fewer rows in the table."""
    case = build([(600, 4), (0, 3), (9, 5), (2, 2)], wanted_blocks=1000)
    packing = case.packing
    with captured_launches(GPUTarget("cuda", 90, 32)) as launches, pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "wanted_blocks", lambda device: case.wanted_blocks)
        out = kernels.ragged_attention(
            case.query, case.k_pool, case.v_pool, packing.table, packing.most_tokens, packing.longest, case.scale
        )
    slots = [segment.slot for segment in case.segments]
    # 12 of 14 tokens in three segments, the fourth is empty
    case.segments = [Segment(slots[0], 0, 5), Segment(slots[2], 10, 4), Segment(slots[0], 595, 3)]
    first = [0, 5, 9, 12]
    empty = Segment(0, 0, 0)
    packing.table.copy_(torch.tensor([[s.slot, s.end, s.size, n] for s, n in zip([*case.segments, empty], first)]).T)
    for each in launches:
        emulate(each, [])
    assert out[:, 12:].isnan().all()
    case.query = case.query[:, :, :12]
    case.check(out[:, :12])


# races, and mistakes that half precision shows
NOTICED = ("the row's length", "causality", "one scale for all splits", "memory of its own for a split")


def _check_all(some: list[Case], module) -> None:
    for case in some:
        case.check(attend(case, 90, module)[0])


@pytest.mark.parametrize("name", NOTICED)
def test_emulator_notices(name, monkeypatch, tmp_path):
    package = mutants.write(tmp_path, name, *mutants.ATTENTION[name])
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(f"{package}.ragged_attention")
    error = DataRace if name.startswith("memory") else AssertionError
    with pytest.raises(error):
        _check_all(telling(torch.bfloat16), module)


# at 128 registers a processor holds four blocks, at 255 two
CEILINGS = {1: 128, 5: 255, 12: 255}


@pytest.mark.parametrize(("arch", "tokens"), [(80, 1), (80, 12), (90, 5), (90, 12), (100, 1), (100, 5)])
def test_static_gate(arch, tokens, tmp_path):
    """One token of a row, a verify, a prompt: tiles of 16, 32 and, where they exist, 64 queries."""
    case = build([(1000, tokens), (7, 1)], groups=4, dims=(128, 128), wanted_blocks=1000)
    _, launches = launch(case, arch)
    assert [each.kernel.name for each in launches] == ["attend_kernel", "merge_kernel"]
    for each in launches:
        binary = tmp_path / f"{each.kernel.name}.cubin"
        binary.write_bytes(each.kernel.asm["cubin"])
        (used,) = resources(binary).values()
        assert used.stack_bytes == 0
        assert used.registers <= CEILINGS[tokens]
        assert 16 in used.loads and 16 in used.stores
        assert not {1, 2} & (used.loads | used.stores)
    copied = re.findall(r"cp\.async\.c\w\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", launches[0].kernel.asm["ptx"])
    assert set(copied) == {"0x10"}
