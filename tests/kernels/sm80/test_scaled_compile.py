"""The mma.sync kernel for 8-bit activations, compiled without a GPU."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats import parse_scheme
from lowbit.ops.byte_gemm import scaled_shape
from tests.kernels.calls import scaled_call
from tests.kernels.sass import compile_plan

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.sm80.scaled_gemm import PlainPlan


def compiled(sm, scheme, x_scale="token", x_zero=False, y=torch.bfloat16, function="none", m=64):
    n, k = 4096, 4096
    parsed = parse_scheme(scheme)
    shape = scaled_shape(parsed, m, n, k, x_scale == "block")
    plan = PlainPlan(shape, parsed, y, x_scale, x_zero, True, function)
    call = scaled_call(scheme, m, n, k, x_scale=x_scale, x_zero=x_zero, codes_of_y=y == torch.int8)
    return compile_plan(plan, call, sm, ("y", "x", "w", "x_stride", "w_stride"))


@pytest.mark.parametrize("sm", [80, 86, 87, 89, 120])
def test_int8(sm):
    to_codes = compiled(sm, "w8a8", y=torch.int8, function="gelu")
    for kernel in (compiled(sm, "w8a8"), compiled(sm, "w4a8_g128", x_zero=True), to_codes):
        # 64 rows, 64 tokens and K 128 for 4 warps: 4 steps of K x 8 tiles of 8 tokens
        assert kernel.count("IMMA.16832") == 32 and kernel.stack_bytes == 0


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8_g128", "w5a8"])
def test_stages_are_copied_ahead(scheme):
    """In the main loop only cp.async writes shared memory. Two blocks fit an SM of any GPU."""
    kernel = compiled(80, scheme)
    first, last = max(kernel.loops, key=lambda loop: sum("IMMA" in line for line in kernel.lines[loop[0] : loop[1]]))
    loop = kernel.lines[first : last + 1]
    copies = sum("LDGSTS.E.BYPASS.128" in line for line in loop)
    assert copies == {"w8a8": 8, "w4a8_g128": 6, "w5a8": 6}[scheme] and sum("DEPBAR.LE" in line for line in loop) == 1
    assert not any(line.startswith("STS") for line in loop)
    assert all(each.shared_bytes <= 48 << 10 for each in (kernel, compiled(80, scheme, m=16)))


@pytest.mark.parametrize("sm", [89, 120])
def test_fp8(sm):
    for kernel in (compiled(sm, "fp8_block", "block"), compiled(sm, "w6e3m2a8e4m3")):
        assert kernel.count("QMMA.16832") == 32 and kernel.stack_bytes == 0
