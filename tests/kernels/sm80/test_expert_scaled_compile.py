"""The kernel of experts for 8-bit activations compiled for machines that are not here."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats import parse_scheme
from lowbit.kernels.choose.experts import ExpertShape
from tests.kernels.calls import meta, scaled_call
from tests.kernels.sass import compile_plan

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.sm80.expert_scaled_gemm import ExpertScaledPlan

COUNT, N, K, TOKENS = 128, 1536, 2048, 64


def compiled(sm, scheme, rows, x_scale="token", x_zero=False, down=False):
    """Compiles the products of Qwen3-30B-A3B: gate and up, or with `down` a product whose rows of x are slots, with router
    weights."""
    parsed = parse_scheme(scheme)
    shape = ExpertShape(TOKENS, 8, COUNT, N, K, parsed.weight.bits, rows, down)
    plan = ExpertScaledPlan(shape, parsed, torch.bfloat16, x_scale, x_zero, True, weighted=down)
    x, of_x, zero, codes, *of_w = scaled_call(scheme, shape.slots if down else TOKENS, N, K, x_scale=x_scale, x_zero=x_zero)[:8]
    if parsed.weight.bits < 8:
        codes = meta((N // 16, K // 64, 32 * parsed.weight.bits), torch.int32)
    stacked = [None if t is None else meta((COUNT, *t.shape), t.dtype) for t in (codes, *of_w)]
    int32, slots = torch.int32, shape.slots
    routing = meta((shape.most_tiles, 3), int32), meta((1,), int32), meta((slots,), int32)
    weights = meta((slots,), torch.float32) if down else None
    return plan, compile_plan(plan, (x, of_x, zero, *stacked, *routing, weights), sm)


CASES = [
    (80, "w8a8", 8, "token", False, False), (90, "w4a8_g128", 128, "token", True, True), (80, "w5a8", 16, "token", False, True),
    (89, "w8e4m3a8e4m3", 64, "tensor", False, False), (90, "fp8_block", 128, "block", False, True),
    (120, "w6e3m2a8e4m3", 64, "token", False, True),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_stages_are_copied_ahead_and_nothing_spills(case):
    plan, kernel = compiled(*case)
    columns = plan.config.columns
    assert columns == min(case[2], 32 if case[1] == "fp8_block" else 64) and plan.launch.grid[0] == plan.shape.most_tiles * (
        case[2] // columns
    ) * (N // 64)
    assert kernel.stack_bytes == 0 and kernel.count("LDL") == 0 and kernel.count("STL") == 0
    products = sum(kernel.count(name) for name in ("IMMA.16832", "QMMA.16832"))
    if case[0] == 90 and case[1] == "fp8_block":  # Hopper's mma.sync computes fp8 by its instruction for 16-bit floats
        products = kernel.count("HMMA.16816") // 2
    assert products == 4 * (columns // 8), "4 k steps x 8 tokens each"
    assert kernel.count("LDGSTS") > 0 and kernel.shared_bytes <= 48 << 10
