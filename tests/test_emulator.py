"""The PTX emulator that the GPU kernels are checked with: meaning of instructions, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpu.ptx import (
    BarrierDivergence,
    DataRace,
    Emulator,
    Misaligned,
    OutOfBounds,
    PtxError,
    Trap,
    Unsupported,
)

MODULE = """
.version 8.8
.target sm_90
.address_size 64
{globals}
.visible .entry kernel(.param .u64 out, .param .u64 in, .param .u32 n) {{
    .reg .pred %p<9>;
    .reg .b16 %h<9>;
    .reg .b32 %r<19>;
    .reg .b64 %d<19>;
    ld.param.u64 %d0, [out];
    ld.param.u64 %d1, [in];
    ld.param.u32 %r0, [n];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    {body}
    ret;
}}
"""
# thread t stores %r9 at out[t]
STORE = "mul.wide.u32 %d8, %r1, 4; add.s64 %d8, %d0, %d8; st.global.b32 [%d8], %r9;"


def emulate(body: str, out: torch.Tensor, *arguments, grid: int = 1, threads: int = 32, declare: str = "", **options):
    module = MODULE.format(body=body, globals=declare)
    return Emulator(module).launch("kernel", (grid,), [out, *arguments], block=(threads,), **options)


def values(count: int) -> np.ndarray:
    special = [0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x89ABCDEF, 255, 128]
    return np.resize(np.array(special, np.uint32), count)


A, B = values(144), np.repeat(values(12), 12)
SIGNED_A, SIGNED_B = (x.view(np.int32) for x in (A, B))
WIDE_A, WIDE_B = (x.astype(np.int64) for x in (SIGNED_A, SIGNED_B))
NONZERO = np.where(SIGNED_B == 0, 7, SIGNED_B).astype(np.int64)


def truncated(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.array([int(abs(x) // abs(y)) * (1 if (x < 0) == (y < 0) else -1) for x, y in zip(a, b, strict=True)])


# instructions that leave a word in %r9, from a in %r3 and b in %r4
MEANING = {
    "add.s32 %r9, %r3, %r4;": A + B,
    "sub.u32 %r9, %r3, %r4;": A - B,
    "mul.lo.s32 %r9, %r3, %r4;": A * B,
    "mul.hi.s32 %r9, %r3, %r4;": (WIDE_A * WIDE_B) >> 32,
    "mul.wide.s32 %d2, %r3, %r4; shr.u64 %d2, %d2, 32; cvt.u32.u64 %r9, %d2;": (WIDE_A * WIDE_B) >> 32,
    "mad.lo.s32 %r9, %r3, %r4, %r3;": A * B + A,
    "min.s32 %r9, %r3, %r4;": np.minimum(SIGNED_A, SIGNED_B),
    "max.u32 %r9, %r3, %r4;": np.maximum(A, B),
    "and.b32 %r9, %r3, %r4; not.b32 %r9, %r9;": ~(A & B),
    "or.b32 %r9, %r3, %r4; neg.s32 %r9, %r9;": -(A | B).view(np.int32),
    "xor.b32 %r9, %r3, %r4;": A ^ B,
    "abs.s32 %r9, %r3;": np.abs(SIGNED_A),
    "shl.b32 %r9, %r3, %r4;": np.where(B < 32, A << (B & 31), 0),
    "shr.u32 %r9, %r3, %r4;": np.where(B < 32, A >> (B & 31), 0),
    "shr.s32 %r9, %r3, %r4;": SIGNED_A >> np.minimum(B, 31).astype(np.int32),
    "shf.l.wrap.b32 %r9, %r3, %r4, 8;": (B << 8) | (A >> 24),
    "shf.r.wrap.b32 %r9, %r3, %r4, 8;": (A >> 8) | (B << 24),
    "prmt.b32 %r9, %r3, %r4, 0x7610;": (A & 0xFFFF) | (B & 0xFF000000) | (B & 0x00FF0000),
    "prmt.b32 %r9, %r3, %r4, 0x888b;": np.where(A >> 31, 255, 0) | np.where(A & 128, 0xFFFFFF00, 0),
    "bfe.u32 %r9, %r3, 5, 9;": (A >> 5) & 511,
    "bfe.u32 %r9, %r3, 20, 40;": A >> 20,
    "bfe.s32 %r9, %r3, 1, 1;": np.where(A & 2, -1, 0),
    "bfe.s32 %r9, %r3, 7, 9;": (A << 16).view(np.int32) >> 23,
    "bfe.s32 %r9, %r3, 20, 40;": SIGNED_A >> 20,
    "bfe.u32 %r9, %r3, 32, 1;": np.zeros_like(A),
    "mov.b64 %d2, {%r3, %r4}; bfe.u64 %d2, %d2, 31, 2; cvt.u32.u64 %r9, %d2;": (A >> 31) | ((B & 1) << 1),
    "setp.lt.s32 %p0, %r3, %r4; selp.b32 %r9, 5, 6, %p0;": np.where(SIGNED_A < SIGNED_B, 5, 6),
    "setp.hs.u32 %p0|%p1, %r3, %r4; selp.b32 %r9, 5, 6, %p1;": np.where(A < B, 5, 6),
    "setp.eq.s32 %p1, %r3, 0; setp.gt.or.s32 %p0, %r4, 0, %p1; selp.b32 %r9, 1, 0, %p0;": (SIGNED_B > 0) | (A == 0),
    "cvt.s64.s32 %d2, %r3; add.s64 %d2, %d2, 5; cvt.u32.u64 %r9, %d2;": A + np.uint32(5),
    "cvt.u16.u32 %h0, %r3; cvt.s32.s16 %r9, %h0;": A.astype(np.uint16).view(np.int16),
    "mov.b64 %d2, {%r3, %r4}; shr.u64 %d2, %d2, 16; mov.b64 {%r9, _}, %d2;": (A >> 16) | (B << 16),
    "max.u32 %r4, %r4, 1; div.u32 %r9, %r3, %r4;": A // np.maximum(B, 1),
    "max.u32 %r4, %r4, 1; rem.u32 %r9, %r3, %r4;": A % np.maximum(B, 1),
    "setp.eq.s32 %p0, %r4, 0; selp.b32 %r4, 7, %r4, %p0; div.s32 %r9, %r3, %r4;": truncated(WIDE_A, NONZERO),
    "{ .reg .b32 %r3; mov.u32 %r3, 4; } mov.u32 %r9, %r3;": A,
    "mov.u32 %r9, %r3; setp.ne.s32 %p0, %r3, 0; @%p0 mov.u32 %r9, 9;": np.where(A == 0, A, 9),
    "mov.u32 %r9, 0; mov.u32 %r5, 0; L: add.s32 %r9, %r9, %r5; add.s32 %r5, %r5, 1; setp.le.u32 %p0, %r5, %r1;"
    "@%p0 bra L;": np.arange(144) * np.arange(1, 145) // 2,
}


# in each warp
WARP_MEANING = {
    "redux.sync.add.s32 %r9, %r3, -1;": lambda a: a.sum(),
    "redux.sync.max.s32 %r9, %r3, -1;": lambda a: a.view(np.int32).max(),
    "redux.sync.min.u32 %r9, %r3, -1;": lambda a: a.min(),
    "shfl.sync.bfly.b32 %r9, %r3, 5, 31, -1;": lambda a: a[np.arange(32) ^ 5],
}


@pytest.mark.parametrize("body", WARP_MEANING)
def test_warp_instruction(body):
    out, source = torch.zeros(64, dtype=torch.int32), torch.from_numpy(values(64).view(np.int32))
    load = "mul.wide.u32 %d7, %r1, 4; add.s64 %d7, %d1, %d7; ld.global.b32 %r3, [%d7];"
    emulate(load + body + STORE, out, source, threads=64)
    want = [np.broadcast_to(WARP_MEANING[body](warp), 32) for warp in values(64).reshape(2, 32)]
    assert np.array_equal(out.numpy().view(np.uint32), np.concatenate(want).astype(np.uint32))
    with pytest.raises(PtxError, match="whole warp"):
        emulate("setp.lt.u32 %p0, %r1, 40; @%p0 " + body, out, source, threads=64)


@pytest.mark.parametrize("body", MEANING)
def test_instruction(body):
    pair = torch.from_numpy(np.stack([A, B], axis=1).view(np.int32))
    out = torch.zeros(144, dtype=torch.int32)
    load = "mul.wide.u32 %d7, %r1, 8; add.s64 %d7, %d1, %d7; ld.global.v2.b32 {%r3, %r4}, [%d7];"
    emulate(load + body + STORE, out, pair, threads=144)
    assert np.array_equal(out.numpy(), np.asarray(MEANING[body]).astype(np.int64).astype(np.uint32).view(np.int32))


@pytest.mark.parametrize(
    "body",
    [
        "fma.rz.f32 %r9, %r3, %r4, %r3;",
        "add.sat.s32 %r9, %r3, %r4;",
        "add.f64 %d2, %d2, %d2;",
        "max.NaN.f32 %r9, %r3, %r4;",
        "tcgen05.wait::ld.sync.aligned;",
        "ld.volatile.global.b32 %r9, [%d0];",
        "ld.global.nc.b32 %r9, [%d0];",
        "ld.local.b32 %r9, [%d0];",
        "bar.sync 1;",
        "bar.arrive 0;",
        "bar.warp.arrive -1;",
        "atom.global.add.u32 %r9, [%d0], 1;",
        "cp.async.ca.shared.global [%d0], [%d1], 12;",
        "cp.async.bulk.commit_group;",
        "bra nowhere;",
        "mov.u32 %r9, %clock;",
        "shf.l.clamp.b32 %r9, %r3, %r4, 8;",
        ".local .b32 stack[4];",
        ".reg .f32 %f<4>;",
    ],
)
def test_what_is_not_known_is_refused_before_it_runs(body):
    with pytest.raises(Unsupported):
        Emulator(MODULE.format(body=f"ret; {body}", globals=""))


def test_line_numbers_and_comments_hide_no_instruction():
    out = torch.zeros(32, dtype=torch.int32)
    emulate("mov.u32 %r9, 1; // two\n    .loc 1 5 3, function_name L, inlined_at 1 2 3\n mov.u32 %r9, 2;" + STORE, out)
    assert out.eq(2).all()


def test_predicates_and_data_do_not_mix():
    with pytest.raises(PtxError, match="predicate"):
        emulate("mov.u32 %r9, %p0;" + STORE, torch.zeros(32, dtype=torch.int32))


# stores 1 at word `offset` of out, for each thread
def store_at(offset: str) -> str:
    return f"{offset} mul.wide.s32 %d3, %r5, 4; add.s64 %d3, %d0, %d3; st.global.b32 [%d3], %r1;"


RACES = {
    "one word for all threads": store_at("mov.u32 %r5, 0;"),
    "one word for two threads": store_at("shr.u32 %r5, %r1, 1;"),
    "load and store": store_at("add.s32 %r5, %r1, 1;") + "ld.global.b32 %r9, [%d3+-4];",
    "store and load": store_at("mov.u32 %r5, %r1;") + "setp.lt.s32 %p0, %r1, 31; @%p0 ld.global.b32 %r9, [%d3+4];",
    "shared memory": "mov.u32 %r5, staging; shl.b32 %r6, %r1, 2; add.s32 %r5, %r5, %r6; st.shared.b32 [%r5], %r1;"
    "setp.lt.s32 %p0, %r1, 31; @%p0 ld.shared.b32 %r9, [%r5+4];",
}
SHARED = ".shared .align 16 .b8 staging[128];"


@pytest.mark.parametrize("name", RACES)
def test_race_within_a_block(name):
    with pytest.raises(DataRace, match=r"kernel line \d+"):
        emulate(RACES[name], torch.zeros(40, dtype=torch.int32), declare=SHARED)
    emulate(RACES[name], torch.zeros(40, dtype=torch.int32), declare=SHARED, detect_races=False)


@pytest.mark.parametrize("name", ["load and store", "store and load", "shared memory"])
def test_a_barrier_between_them_makes_it_sound(name):
    first, second = RACES[name].rsplit("st.", 1)
    store, rest = second.split(";", 1)
    emulate(f"{first}st.{store}; bar.sync 0;{rest}", torch.zeros(40, dtype=torch.int32), declare=SHARED)


@pytest.mark.parametrize("name", ["load and store", "store and load", "shared memory"])
def test_a_barrier_of_a_warp_orders_the_warp_and_no_other(name):
    first, second = RACES[name].rsplit("st.", 1)
    store, rest = second.split(";", 1)
    body = f"{first}st.{store}; bar.warp.sync -1;{rest}".replace("31;", "%r0;")
    emulate(body, torch.zeros(80, dtype=torch.int32), 0, 31, declare=SHARED)
    with pytest.raises(DataRace):
        emulate(body, torch.zeros(80, dtype=torch.int32), 0, 63, declare=SHARED.replace("128", "256"), threads=64)


@pytest.mark.parametrize("batch", [1, 16384])
def test_race_between_blocks_whatever_the_schedule(batch, monkeypatch):
    monkeypatch.setattr("gpu.ptx.emulator._BATCH_THREADS", batch)
    body = store_at("mad.lo.s32 %r5, %r2, 31, %r1;") + "bar.sync 0;"
    with pytest.raises(DataRace):
        emulate(body, torch.zeros(80, dtype=torch.int32), grid=2)
    emulate(body.replace("31", "32"), torch.zeros(80, dtype=torch.int32), grid=2)


def test_readers_of_other_blocks_are_remembered():
    # blocks 0..2 read word 0, the last one writes it
    body = """ld.global.b32 %r9, [%d0];
    setp.lt.s32 %p0, %r2, 2; @%p0 ret; setp.gt.s32 %p1, %r1, 0; @%p1 ret; st.global.b32 [%d0], %r9;"""
    with pytest.raises(DataRace):
        emulate(body, torch.zeros(1, dtype=torch.int32), grid=3)
    with pytest.raises(DataRace):
        emulate(body, torch.zeros(1, dtype=torch.int32), grid=3, threads=1)


def test_out_of_bounds():
    with pytest.raises(OutOfBounds, match="tensor 0, which has 124"):
        emulate("mov.u32 %r9, 1;" + STORE, torch.zeros(31, dtype=torch.int32))
    with pytest.raises(OutOfBounds):
        emulate("ld.global.b32 %r9, [%d0+-4];", torch.zeros(32, dtype=torch.int32))
    with pytest.raises(OutOfBounds):
        emulate("ld.param.b32 %r9, [n+4];", torch.zeros(32, dtype=torch.int32))
    with pytest.raises(OutOfBounds):
        emulate("mov.u32 %r5, staging; ld.shared.b32 %r9, [%r5+128];", torch.zeros(1), declare=SHARED)


def test_misaligned():
    with pytest.raises(Misaligned):
        emulate("ld.global.v4.b32 {%r3, %r4, %r5, %r6}, [%d0+8];", torch.zeros(32, dtype=torch.int32))


def test_barrier_divergence():
    with pytest.raises(BarrierDivergence, match="exit"):
        emulate("setp.eq.s32 %p0, %r1, 3; @%p0 ret; bar.sync 0;", torch.zeros(1))
    with pytest.raises(BarrierDivergence, match="different"):
        emulate("setp.eq.s32 %p0, %r1, 3; @%p0 bra M; bar.sync 0; ret; M: bar.sync 0;", torch.zeros(1))


def test_trap_and_endless_loop(monkeypatch):
    with pytest.raises(Trap):
        emulate("setp.eq.s32 %p0, %r1, 3; @%p0 trap;", torch.zeros(1))
    monkeypatch.setattr("gpu.ptx.scheduler._MAX_STEPS", 100)
    with pytest.raises(PtxError, match="does not end"):
        emulate("L: bra.uni L;", torch.zeros(1))


def test_division_by_zero():
    with pytest.raises(PtxError, match="division by zero"):
        emulate("mov.u32 %r3, 0; div.u32 %r9, %r1, %r3;", torch.zeros(1))


def test_counts():
    body = """mul.wide.u32 %d2, %r1, 16; add.s64 %d2, %d0, %d2;
    ld.global.v4.b32 {%r3, %r4, %r5, %r6}, [%d2];"""
    out = torch.zeros(260, dtype=torch.int32)
    region = emulate(body, out, threads=64).region(out)
    assert region.loads.tolist() == [1] * 1024 + [0] * 16
    assert not region.stores.any()
    # two warps of 32 threads, each 512 bytes
    assert region.widths == {16: 2}
    assert region.sectors == 32 + (out.data_ptr() % 32 != 0) * 2


def test_struct_parameters_and_dynamic_shared_memory():
    module = """.visible .entry kernel(.param .align 8 .b8 table[24], .param .u64 out) {
        .extern .shared .align 16 .b8 staging[];
        .reg .b32 %r<9>; .reg .b64 %d<9>;
        mov.u32 %r1, %tid.x; cvt.u64.u32 %d1, %r1; shl.b64 %d1, %d1, 3;
        mov.b64 %d2, table; add.s64 %d2, %d2, %d1; ld.param.b64 %d3, [%d2];
        mov.u32 %r2, staging; cvt.u32.u64 %r3, %d1; add.s32 %r2, %r2, %r3; st.shared.b64 [%r2], %d3;
        ld.shared.b64 %d4, [%r2]; ld.param.b64 %d5, [out]; add.s64 %d5, %d5, %d1; st.global.b64 [%d5], %d4;
        ret; }"""
    out = torch.zeros(3, dtype=torch.int64)
    table = np.array([7, -8, 9], np.int64).tobytes()
    Emulator(module).launch("kernel", (1,), [table, out], block=(3,), dynamic_shared=24)
    assert out.tolist() == [7, -8, 9]
    with pytest.raises(OutOfBounds):
        Emulator(module).launch("kernel", (1,), [table, out], block=(3,), dynamic_shared=16)
    with pytest.raises(PtxError, match="24 bytes"):
        Emulator(module).launch("kernel", (1,), [table[:8], out], block=(3,), dynamic_shared=24)
