"""The emulator of PTX, compared with torch: a small kernel for each kind of instruction. Also tests what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.ptx import Memory, execute, parsed

HEAD = ".visible .entry kernel(\n.param .u64 kernel_param_0\n)\n{\n"


def run(body, *tensors, grid=(1, 1, 1), threads=32):
    execute(HEAD + body + "\n// -- End function", 1024, tensors, grid, threads)


def test_scopes_vectors_and_guards():
    x, y = torch.arange(64, dtype=torch.int32), torch.full((64,), -1, dtype=torch.int32)
    run(
        """
        ld.param.b64 %rd1, [kernel_param_0]; ld.param.b64 %rd2, [kernel_param_1];
        mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 8; add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3;
        ld.global.v2.b32 {%r2, %r3}, [%rd1];
        { .reg .b32 t, u<2>; mov.b32 t, %r3; shl.b32 u1, t, 1; mov.b32 %r3, u1; }
        { .reg .b32 t; mov.b32 t, 5; }
        setp.lt.u32 %p1, %r1, 7;
        @%p1 st.global.v2.b32 [%rd2], {%r3, %r2};
        @!%p1 st.global.b32 [%rd2+4], %r1;
        ret;
        """,
        x, y,
    )  # fmt: skip
    expected = torch.full((32, 2), -1, dtype=torch.int32)
    expected[:7], expected[7:, 1] = torch.stack((2 * x.view(32, 2)[:7, 1], x.view(32, 2)[:7, 0]), 1), torch.arange(7, 32)
    assert torch.equal(y.view(32, 2), expected)


def test_a_loop_a_shuffle_and_an_atomic():
    total, counter = torch.zeros(3), torch.zeros(1, dtype=torch.int32)
    run(
        """
        ld.param.b64 %rd1, [kernel_param_0]; ld.param.b64 %rd2, [kernel_param_1];
        mov.u32 %r1, %tid.x; cvt.rn.f32.u32 %r2, %r1; mov.b32 %r3, 1;
        $L_again:
        shfl.sync.bfly.b32 %r4, %r2, %r3, 31, 0xffffffff; add.f32 %r2, %r2, %r4; shl.b32 %r3, %r3, 1;
        setp.lt.u32 %p1, %r3, 32;
        @%p1 bra $L_again;
        mov.u32 %r5, %ctaid.x; mul.wide.u32 %rd3, %r5, 4; add.s64 %rd1, %rd1, %rd3;
        setp.eq.u32 %p2, %r1, 0;
        @%p2 st.global.f32 [%rd1], %r2;
        @%p2 atom.global.add.u32 %r6, [%rd2], 2;
        ret;
        """,
        total, counter, grid=(3, 1, 1),
    )  # fmt: skip
    assert total.tolist() == [496.0] * 3 and counter.item() == 6


def test_a_product_of_tensor_cores():
    """Fragments of the instruction's table, against torch."""
    from lowbit.hardware.mma import MMA_M16N8K16_F16 as ATOM

    generator = np.random.default_rng(0)
    a, b = generator.standard_normal((16, 16)).astype(np.float16), generator.standard_normal((16, 8)).astype(np.float16)
    words = [np.ascontiguousarray(f.gather(t)).view(np.uint32).reshape(32, -1) for f, t in ((ATOM.a, a), (ATOM.b, b))]
    given, out = torch.from_numpy(np.concatenate(words, 1).view(np.int32).copy()), torch.full((32, 4), torch.nan)
    run(
        """
        ld.param.b64 %rd1, [kernel_param_0]; ld.param.b64 %rd2, [kernel_param_1]; mov.u32 %r1, %tid.x;
        mad.wide.u32 %rd1, %r1, 24, %rd1; mad.wide.u32 %rd2, %r1, 16, %rd2;
        ld.global.v2.b32 {%r2, %r3}, [%rd1]; ld.global.v2.b32 {%r4, %r5}, [%rd1+8]; ld.global.v2.b32 {%r6, %r7}, [%rd1+16];
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1, %f2, %f3, %f4}, {%r2, %r3, %r4, %r5}, {%r6, %r7},
            {0f3F800000, 0f00000000, 0f00000000, 0f00000000};
        st.global.v4.f32 [%rd2], {%f1, %f2, %f3, %f4};
        ret;
        """,
        given, out,
    )  # fmt: skip
    row, column = ATOM.c.coordinates()
    expected = torch.from_numpy((a.astype(np.float64) @ b.astype(np.float64))[row, column].reshape(32, 4).copy()).float()
    expected[:, 0] += 1
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


def test_what_is_refused():
    with pytest.raises(NotImplementedError, match="vote"):
        run("vote.sync.any.pred %p1, %p2, 0xffffffff; ret;", torch.zeros(1))
    with pytest.raises(AssertionError, match="is in no tensor"):
        run("ld.param.b64 %rd1, [kernel_param_0]; st.global.b32 [%rd1+4], 0; ret;", torch.zeros(1))
    with pytest.raises(AssertionError, match="a branch is not uniform"):
        run("mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 7; @%p1 bra $L_end; $L_end: ret;", torch.zeros(1))
    with pytest.raises(AssertionError, match="is in no tensor"):
        Memory([torch.zeros(4)], 16).load(np.array([5]), 4, np.ones(1, bool))
    assert len(parsed(HEAD + "mov.b32 %r1, 1; // mov.b32\nret;\n// -- End function")[0]) == 2
