"""Sums over the slots of a token. They are bit-equal in the defined order of additions, with and without a GPU. Also tests the
machine code."""

from __future__ import annotations

import pytest
import torch

from lowbit.hardware.machine import machine_of, typical_machine
from lowbit.kernels.reference.experts import sum_slots_reference
from lowbit.ops.expert_gemm import sum_slots
from tests.kernels.calls import meta
from tests.kernels.interpreter import interpreted
from tests.kernels.sass import compile_plan

pytest.importorskip("triton", reason="the kernel is written in Triton")
from lowbit.kernels.elementwise.sum_slots import SumSlotsPlan

gpu = pytest.mark.gpu
CASES = [(3, 8, 1536), (5, 1, 40), (2, 4, 1031), (4, 2, 2880)]


def check(device, dtype, tokens, top_k, width):
    """Checks terms of very different magnitudes, so another order of additions would round differently."""
    generator = torch.Generator().manual_seed(width)
    y = torch.randn(tokens * top_k, width, generator=generator) * torch.exp2(8 * torch.rand(tokens * top_k, 1))
    y, residual = (t.to(device, dtype) for t in (y, torch.randn(tokens, width, generator=generator)))
    machine = machine_of("cuda") if device == "cuda" else typical_machine(80)
    for added in (None, residual):
        plan = SumSlotsPlan(tokens, top_k, width, width % 8 == 0, machine)
        if device == "cuda":
            torch.full((tokens, width), float("nan"), dtype=dtype, device=device)
        assert torch.equal(plan(y, added), sum_slots_reference(y, top_k, added))
        experts = torch.randint(-2, 2, (tokens, top_k), generator=generator).int().to(device)
        left_out = y.masked_fill(experts.reshape(-1, 1) < 0, float("nan"))
        expected = sum_slots_reference(y.masked_fill(experts.reshape(-1, 1) < 0, 0), top_k, added)
        # the rows of a call either all have experts or all have none
        plan = SumSlotsPlan(tokens, top_k, width, width % 8 == 0, machine)
        assert torch.equal(plan(left_out, added, experts), expected)
        assert torch.equal(sum_slots_reference(left_out, top_k, added, experts), expected)


def interpreted_sums():
    """Checks fp16 only: the interpreter truncates float32 to bf16 instead of rounding."""
    for case in CASES:
        check("cpu", torch.float16, *case)


def test_sums_without_a_gpu():
    interpreted(interpreted_sums)


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [*CASES, (300, 8, 2048)], ids=str)
def test_sums_on_a_gpu(case, dtype):
    check("cuda", dtype, *case)


def test_all_slots_are_loaded_in_pieces_before_the_first_is_added():
    plan = SumSlotsPlan(4, 8, 2048, True, typical_machine(90))
    y, residual = meta((32, 2048), torch.bfloat16), meta((4, 2048), torch.bfloat16)
    kernel = compile_plan(plan, (y, residual), 90)
    loads = [i for i, line in enumerate(kernel.lines) if "LDG.E.128" in line]
    added = next(i for i, line in enumerate(kernel.lines) if "FADD" in line)
    assert len(loads) == 9 and loads[7] < added and kernel.count("STG.E.128") == 1
    assert kernel.count("ACQBULK") == 1 and kernel.stack_bytes == 0


def test_what_does_not_fit_says_why():
    y = torch.randn(6, 16).bfloat16()
    assert torch.equal(sum_slots(y, 2), sum_slots_reference(y, 2))
    assert sum_slots(y.to("meta"), 3).shape == (2, 16)
    with pytest.raises(ValueError, match=r"y is floats \[T \* 4, N\], got torch.bfloat16 \(6, 16\)"):
        sum_slots(y, 4)
    with pytest.raises(ValueError, match=r"residual is torch.bfloat16 \(3, 16\), got torch.float32 \(3, 16\)"):
        sum_slots(y, 2, torch.zeros(3, 16))
    with pytest.raises(ValueError, match=r"experts are int32 \(3, 2\), got torch.int64 \(6,\)"):
        sum_slots(y, 2, experts=torch.zeros(6, dtype=torch.int64))
