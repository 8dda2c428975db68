"""Sums over slots, followed by the next norm. The order of additions is exact to the bit, with and without a GPU. Also tests
the machine code."""

from __future__ import annotations

import pytest
import torch

from lowbit.hardware.machine import machine_of, typical_machine
from lowbit.kernels.reference.experts import sum_norm_reference, sum_slots_reference
from lowbit.ops.elementwise import add_norm
from lowbit.ops.expert_gemm import sum_norm
from tests.kernels.calls import meta
from tests.kernels.elementwise.test_norm import near
from tests.kernels.interpreter import interpreted
from tests.kernels.sass import compile_plan

pytest.importorskip("triton", reason="the kernel is written in Triton")
from lowbit.kernels.elementwise.sum_norm import SumNormPlan

gpu = pytest.mark.gpu
CASES = [(3, 8, 1536), (5, 1, 40), (2, 4, 1032), (4, 2, 2880)]


def operands(device, dtype, tokens, top_k, width):
    """Returns terms of very different sizes, so that another order of additions would round differently. The share is a column
    of a wider matrix."""
    generator = torch.Generator().manual_seed(width)
    y = torch.randn(tokens * top_k, width, generator=generator) * torch.exp2(8 * torch.rand(tokens * top_k, 1))
    h, shared = torch.randn(2, tokens, width, generator=generator)
    gamma, logits = 1 + torch.randn(width, generator=generator) / 4, torch.randn(tokens, 5, generator=generator)
    on = [t.to(device, dtype) for t in (h, y, shared, gamma)]
    return *on, logits.to(device)[:, 4:]


def check(device, dtype, tokens, top_k, width):
    h, y, shared, gamma, share = operands(device, dtype, tokens, top_k, width)
    machine = machine_of("cuda") if device == "cuda" else typical_machine(80)
    for extra in ((None, None), (shared, share)):
        plan = SumNormPlan(tokens, top_k, width, machine)
        found, expected = h.clone(), h.clone()
        if device == "cuda":
            torch.full((tokens, width), float("nan"), dtype=dtype, device=device)
        x = plan(found, y, *extra, gamma, 1e-5)
        wanted = sum_norm_reference(expected, y, top_k, gamma, 1e-5, *extra)
        if extra[0] is None:
            assert torch.equal(found, sum_slots_reference(y, top_k, h))
        near(found, expected)
        near(x, wanted, steps=2)


def interpreted_sums():
    """Checks fp16 only: the interpreter truncates float32 to bf16 instead of rounding."""
    for case in CASES:
        check("cpu", torch.float16, *case)


def test_sums_without_a_gpu():
    interpreted(interpreted_sums)


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [*CASES, (300, 8, 2048), (2, 8, 8192)], ids=str)
def test_sums_on_a_gpu(case, dtype):
    check("cuda", dtype, *case)


@pytest.mark.parametrize(("top_k", "width"), [(8, 2048), (2, 4096), (4, 2880), (8, 16384)])
@pytest.mark.parametrize("with_shared", [False, True])
def test_all_slots_are_loaded_before_the_first_is_added(top_k, width, with_shared):
    plan = SumNormPlan(4, top_k, width, typical_machine(90))
    half = lambda *size: meta(size, torch.bfloat16)  # noqa: E731
    shared = (half(4, width), meta((4, 129), torch.float32)[:, 128:]) if with_shared else (None, None)
    pointers = ["x", "h", "y", "shared", "gamma"] if with_shared else None
    kernel = compile_plan(plan, (half(4, width), half(4 * top_k, width), *shared, half(width), 1e-5), 90, pointers)
    assert kernel.stack_bytes == 0 and kernel.count("ACQBULK") == kernel.count("PREEXIT") == 1
    chunks, threads = plan.constants[4], plan.constants[2]
    if threads < 1024:  # with 1024 threads, 64 registers are too few for all slots
        loads = [i for i, line in enumerate(kernel.lines) if "LDG.E.128" in line]
        added = next(i for i, line in enumerate(kernel.lines) if "FADD" in line)
        assert len(loads) == (top_k + 2 + with_shared) * chunks and loads[(top_k - 1) * chunks] < added


def test_the_operator_is_the_sum_then_the_norm():
    h, y, shared, gamma, share = operands("cpu", torch.bfloat16, 3, 2, 64)
    found, expected = h.clone(), h.clone()
    x = sum_norm(found, y, 2, gamma, 1e-5)
    expected = sum_slots_reference(y, 2, expected)
    assert torch.equal(found, expected) and torch.equal(x, add_norm(expected, None, gamma, 1e-5))
    torch.library.opcheck(
        torch.ops.lowbit.sum_norm.default, (h, y, 2, gamma, 1e-5, shared, share), test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top_k": 4}, r"y \[T \* 4, N\] of its type, got torch.bfloat16 \(3, 64\) and torch.bfloat16 \(6, 64\)"),
        ({"gamma": torch.ones(63)}, r"gamma is \[64\], got \(63,\)"),
        ({"share": None}, "shared and share come together"),
        ({"share": torch.ones(3)}, r"share is floats \[3, 1\], got torch.float32 \(3,\)"),
        ({"shared": torch.ones(3, 64)}, r"shared is torch.bfloat16 \(3, 64\) like h, got torch.float32 \(3, 64\)"),
    ],
)
def test_what_does_not_fit_says_why(change, words):
    h, y, shared, gamma, share = operands("cpu", torch.bfloat16, 3, 2, 64)
    given = {"h": h, "y": y, "top_k": 2, "gamma": gamma, "eps": 1e-5, "shared": shared, "share": share, **change}
    with pytest.raises(ValueError, match=words):
        sum_norm(**given)
