"""The PTX emulator's floating point, matrix fragments and asynchronous copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpu.ptx import DataRace, OutOfBounds, PtxError
from test_emulator import STORE, emulate

NAN, INF, SUBNORMAL = float("nan"), float("inf"), 1e-40
SPECIAL = np.array([0.0, -0.0, 1.0, -1.5, 3.25, 1e30, -1e-30, SUBNORMAL, INF, -INF, NAN, 0.1], np.float32)
A, B = np.tile(SPECIAL, 12), np.repeat(SPECIAL, 12)
WIDE_A, WIDE_B = A.astype(np.float64), B.astype(np.float64)
UNORDERED = np.isnan(A) | np.isnan(B)
NORMAL_A = np.where(np.abs(A) < 1.2e-38, np.copysign(np.float32(0), A), A)


def bits(values: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return values.astype(np.float32).view(np.uint32)


def bfloat16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16).astype(np.uint32)


def float16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).half().view(torch.int16).numpy().view(np.uint16).astype(np.uint32)


with np.errstate(all="ignore"):
    # instructions that leave a word in %r9, from floats a in %r3 and b in %r4
    MEANING = {
        "add.f32 %r9, %r3, %r4;": bits(WIDE_A + WIDE_B),
        "sub.rn.f32 %r9, %r3, %r4;": bits(WIDE_A - WIDE_B),
        "mul.f32 %r9, %r3, 0f3FC00000;": bits(WIDE_A * 1.5),
        "mul.ftz.f32 %r9, %r3, 0f3FC00000;": bits(NORMAL_A * 1.5),
        "fma.rn.f32 %r9, %r3, %r4, %r3;": bits(WIDE_A * WIDE_B + WIDE_A),
        "div.full.f32 %r9, %r3, %r4;": bits(WIDE_A / WIDE_B),
        "ex2.approx.f32 %r9, %r3;": bits(np.exp2(WIDE_A)),
        "neg.f32 %r9, %r3; abs.f32 %r9, %r9;": bits(np.abs(A)),
        "max.f32 %r9, %r3, %r4;": bits(np.fmax(A, B)),
        "min.f32 %r9, %r3, %r4;": bits(np.fmin(A, B)),
        "max.f32 %r9, %r3, %r4, 0f3F800000;": bits(np.fmax(np.fmax(A, B), 1)),
        "setp.lt.f32 %p0, %r3, %r4; selp.f32 %r9, 0f3F800000, %r4, %p0;": bits(np.where(WIDE_A < WIDE_B, 1, B)),
        "setp.ne.f32 %p0, %r3, %r4; selp.b32 %r9, 1, 0, %p0;": (WIDE_A != WIDE_B) & ~UNORDERED,
        "setp.neu.f32 %p0, %r3, %r4; selp.b32 %r9, 1, 0, %p0;": (WIDE_A != WIDE_B) | UNORDERED,
        "setp.geu.f32 %p0, %r3, %r4; selp.b32 %r9, 1, 0, %p0;": (WIDE_A >= WIDE_B) | UNORDERED,
        "cvt.rn.bf16.f32 %h0, %r3; cvt.u32.u16 %r9, %h0;": bfloat16(A),
        "cvt.rn.f16.f32 %h0, %r3; cvt.u32.u16 %r9, %h0;": float16(A),
        "cvt.rn.bf16x2.f32 %r9, %r3, %r4;": bfloat16(A) << 16 | bfloat16(B),
        "cvt.rn.f16x2.f32 %r9, %r3, %r4;": float16(A) << 16 | float16(B),
        "cvt.rn.bf16.f32 %h0, %r3; cvt.f32.bf16 %r9, %h0;": bfloat16(A) << 16,
        "cvt.rn.f16.f32 %h0, %r3; cvt.f32.f16 %r9, %h0;": bits(A.astype(np.float16)),
        "mov.b64 %d2, {%r3, %r4}; add.f32x2 %d2, %d2, %d2; mov.b64 {_, %r9}, %d2;": bits(WIDE_B * 2),
        "mov.b64 %d2, {%r3, %r4}; fma.rn.f32x2 %d2, %d2, %d2, %d2; mov.b64 {%r9, _}, %d2;": bits(WIDE_A**2 + WIDE_A),
    }


@pytest.mark.parametrize("body", MEANING)
def test_instruction(body):
    pair = torch.from_numpy(np.stack([A, B], axis=1).view(np.int32))
    out = torch.zeros(144, dtype=torch.int32)
    load = "mul.wide.u32 %d7, %r1, 8; add.s64 %d7, %d1, %d7; ld.global.v2.b32 {%r3, %r4}, [%d7];"
    emulate(load + body + STORE, out, pair, threads=144)
    got, want = out.numpy().view(np.uint32), MEANING[body].astype(np.uint32)
    if "16" in body or "selp.b32" in body:
        numbers = ~np.isnan(A) & ~np.isnan(B) if "cvt" in body else np.ones(144, bool)
        assert np.array_equal(got[numbers], want[numbers])
    else:
        np.testing.assert_array_equal(got.view(np.float32), want.view(np.float32))


def test_float_reduction_and_shuffle():
    out, source = torch.zeros(32, dtype=torch.int32), torch.randn(32)
    load = "mul.wide.u32 %d7, %r1, 4; add.s64 %d7, %d1, %d7; ld.global.b32 %r3, [%d7];"
    emulate(load + "redux.sync.max.f32 %r9, %r3, -1;" + STORE, out, source)
    assert out.view(torch.float32).eq(source.max()).all()
    emulate(load + "sub.s32 %r4, 31, %r1; shfl.sync.idx.b32 %r9, %r3, %r4, 31, -1;" + STORE, out, source)
    assert torch.equal(out.view(torch.float32), source.flip(0))


SHARED = ".shared .align 16 .b8 staging[1024];"
# 16 bytes of thread t go to row t of the staging area
FILL = """mov.u32 %r3, staging; shl.b32 %r4, %r1, 4; add.s32 %r3, %r3, %r4; cvt.u64.u32 %d4, %r4;
    add.s64 %d5, %d1, %d4; ld.global.v4.b32 {%r5, %r6, %r7, %r8}, [%d5];
    st.shared.v4.b32 [%r3], {%r5, %r6, %r7, %r8}; bar.sync 0;"""
WRITE = "add.s64 %d6, %d0, %d4; st.global.v4.b32 [%d6], {%r5, %r6, %r7, %r8};"


@pytest.mark.parametrize("transposed", [False, True])
def test_matrix_load(transposed):
    # four matrices of 8 x 8, and what each thread gets of them
    matrices = torch.arange(256, dtype=torch.int16).view(4, 8, 8)
    got = torch.zeros(32, 4, 2, dtype=torch.int16)
    load = f"ldmatrix.sync.aligned.m8n8.x4{'.trans' * transposed}.shared.b16 {{%r5, %r6, %r7, %r8}}, [%r3];"
    emulate(FILL + load + WRITE, got, matrices, declare=SHARED)
    for lane in range(32):
        for i in range(2):
            row, column = lane // 4, lane % 4 * 2 + i
            want = matrices[:, column, row] if transposed else matrices[:, row, column]
            assert torch.equal(got[lane, :, i], want)


def test_matrix_store_is_the_inverse_of_the_load():
    matrices, got = torch.arange(256, dtype=torch.int16).view(4, 8, 8), torch.zeros(4, 8, 8, dtype=torch.int16)
    load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r5, %r6, %r7, %r8}, [%r3];"
    store = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r3+512], {%r5, %r6, %r7, %r8};"
    back = "bar.sync 0; ld.shared.v4.b32 {%r5, %r6, %r7, %r8}, [%r3+512];"
    emulate(FILL + load + store + back + WRITE, got, matrices, declare=SHARED)
    assert torch.equal(got, matrices)
    neighbour = "xor.b32 %r3, %r3, 16; ld.shared.v4.b32 {%r5, %r6, %r7, %r8}, [%r3+512];"
    with pytest.raises(DataRace):
        emulate(FILL + load + store + neighbour + WRITE, got, matrices, declare=SHARED)


def left_fragment(a: torch.Tensor, lane: int) -> torch.Tensor:
    """A thread's part of a matrix of 16 x 16, in four words."""
    places = [(lane // 4 + i // 2 % 2 * 8, lane % 4 * 2 + i % 2 + i // 4 * 8) for i in range(8)]
    return torch.stack([a[place] for place in places]).view(torch.int32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_matrix_product(dtype):
    """Fragments as the PTX manual lays them out for m16n8k16."""
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(shape, generator=generator) for shape in ((16, 16), (16, 8), (16, 8)))
    a, b = a.to(dtype), b.to(dtype)
    fragments = torch.zeros(32, 16, dtype=torch.int32)
    for lane in range(32):
        b_part = [b[lane % 4 * 2 + i % 2 + i // 2 * 8, lane // 4] for i in range(4)]
        c_part = [c[lane // 4 + i // 2 * 8, lane % 4 * 2 + i % 2] for i in range(4)]
        fragments[lane, :4] = left_fragment(a, lane)
        fragments[lane, 4:6] = torch.stack(b_part).view(torch.int32)
        fragments[lane, 6:10] = torch.stack(c_part).view(torch.int32)
    got = torch.zeros(32, 4)
    name = {torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
    body = f"""shl.b32 %r3, %r1, 6; cvt.u64.u32 %d4, %r3; add.s64 %d5, %d1, %d4;
    ld.global.v4.b32 {{%r5, %r6, %r7, %r8}}, [%d5]; ld.global.v4.b32 {{%r9, %r10, %r11, %r12}}, [%d5+16];
    ld.global.v2.b32 {{%r13, %r14}}, [%d5+32];
    mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 {{%r5, %r6, %r7, %r8}}, {{%r5, %r6, %r7, %r8}},
        {{%r9, %r10}}, {{%r11, %r12, %r13, %r14}};
    shl.b32 %r3, %r1, 4; cvt.u64.u32 %d4, %r3;"""
    emulate(body + WRITE, got, fragments)
    want = a.double() @ b.double() + c
    for lane in range(32):
        for i in range(4):
            value = want[lane // 4 + i // 2 * 8, lane % 4 * 2 + i % 2]
            torch.testing.assert_close(got[lane, i].double(), value, rtol=1e-6, atol=1e-6)


# each thread copies 16 bytes, waits for them, and reads those of its neighbour
ADDRESSES = """mov.u32 %r3, staging; shl.b32 %r4, %r1, 4; add.s32 %r2, %r3, %r4; cvt.u64.u32 %d4, %r4;
    add.s64 %d5, %d1, %d4; xor.b32 %r5, %r4, 16; add.s32 %r3, %r3, %r5; mov.u32 %r10, 16;"""
START = "cp.async.cg.shared.global [%r2+0], [%d5+0], 0x10, %r10; cp.async.commit_group;"
WAIT, MEET = "cp.async.wait_group 0;", "bar.sync 0;"
READ = "ld.shared.v4.b32 {%r5, %r6, %r7, %r8}, [%r3];" + WRITE


def copied(body: str, source: torch.Tensor, **options) -> torch.Tensor:
    out = torch.zeros(32, 4, dtype=torch.int32)
    emulate(ADDRESSES + body, out, source, declare=SHARED, **options)
    return out


def test_asynchronous_copy():
    source = torch.arange(128, dtype=torch.int32).view(32, 4)
    neighbours = source.view(16, 2, 4).flip(1).view(32, 4)
    assert torch.equal(copied(START + WAIT + MEET + READ, source), neighbours)
    # of two groups the older one is waited for
    later = START.replace("[%r2+0]", "[%r2+512]")
    assert torch.equal(copied(START + later + WAIT.replace("0;", "1;") + MEET + READ, source), neighbours)
    # a source of no bytes is not read, and leaves zeros
    nothing = "mov.u32 %r10, 0; mov.u64 %d5, 0;"
    assert copied(nothing + START + WAIT + MEET + READ, source).eq(0).all()
    with pytest.raises(OutOfBounds):
        copied(START, source[:31].clone())
    with pytest.raises(PtxError, match="part"):
        copied("mov.u32 %r10, 8;" + START, source)


def test_a_copy_that_is_not_waited_for_is_garbage():
    source = torch.arange(128, dtype=torch.int32).view(32, 4)
    assert copied(START + MEET + READ, source).eq(-1).all()
    assert copied(START + WAIT.replace("0;", "1;") + MEET + READ, source).eq(-1).all()


@pytest.mark.parametrize("body", [START + WAIT + READ, READ + START, START + READ + WAIT])
def test_a_copy_races_like_any_store(body):
    source = torch.arange(128, dtype=torch.int32).view(32, 4)
    with pytest.raises(DataRace):
        copied(body, source)


def warpgroup_product(transposed: bool, after: str) -> tuple[torch.Tensor, torch.Tensor]:
    """``a b`` of 64 x 16 by 16 x 8, as threads hold it, and as it should be; ``after`` ends the instructions."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).half() for shape in ((64, 16), (16, 8)))
    # 128 bytes a row: a column of b, or a row of it, whose 16 bytes are swapped within the row by its number
    pieces = torch.zeros(16, 8, 8, dtype=torch.float16)
    for row in range(16 if transposed else 8):
        for piece in range(1 if transposed else 2):
            pieces[row, piece ^ row % 8] = b[row] if transposed else b[piece * 8 : piece * 8 + 8, row]
    fragments = [left_fragment(a[lane // 32 * 16 :][:16], lane % 32) for lane in range(128)]
    source = torch.cat([torch.stack(fragments).flatten(), pieces.view(torch.int32).flatten()])
    # rows are swizzled over 128 bytes, eight of them take 1024
    descriptor = 1 << 62 | (1024 >> 4) << 32
    body = f"""shl.b32 %r4, %r1, 4; cvt.u64.u32 %d4, %r4; add.s64 %d5, %d1, %d4;
    ld.global.v4.b32 {{%r5, %r6, %r7, %r8}}, [%d5+2048]; st.shared.v4.b32 [%r4], {{%r5, %r6, %r7, %r8}}; bar.sync 0;
    ld.global.v4.b32 {{%r5, %r6, %r7, %r8}}, [%d5]; mov.u64 %d6, {descriptor};
    fence.proxy.async.shared::cta; wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{%r9, %r10, %r11, %r12}}, {{%r5, %r6, %r7, %r8}}, %d6,
        0, 1, 1, {int(transposed)}; wgmma.commit_group.sync.aligned;
    {after} mov.b32 %r5, %r9; mov.b32 %r6, %r10; mov.b32 %r7, %r11; mov.b32 %r8, %r12;"""
    got = torch.zeros(128, 4)
    emulate(body + WRITE, got, source, threads=128, declare=SHARED.replace("1024", "2048"))
    want = torch.zeros(128, 4)
    product = a.float() @ b.float()
    for lane in range(128):
        for i in range(4):
            want[lane, i] = product[lane // 32 * 16 + lane % 32 // 4 + i // 2 * 8, lane % 4 * 2 + i % 2]
    return got, want


DELIVER = "wgmma.wait_group.sync.aligned 0;"


@pytest.mark.parametrize("transposed", [False, True])
def test_warpgroup_product(transposed):
    torch.testing.assert_close(*warpgroup_product(transposed, DELIVER), rtol=1e-5, atol=1e-5)


def test_a_product_that_is_not_waited_for_is_garbage():
    assert warpgroup_product(False, "")[0].isnan().all()
    assert warpgroup_product(False, DELIVER.replace("0;", "1;"))[0].isnan().all()


def test_operands_stay_until_the_product_is_waited_for():
    overwrite = "bar.sync 0; st.shared.v4.b32 [%r4], {%r4, %r4, %r4, %r4};"
    warpgroup_product(False, DELIVER + overwrite)
    with pytest.raises(DataRace, match="overwritten before"):
        warpgroup_product(False, overwrite + "bar.sync 0;" + DELIVER)
