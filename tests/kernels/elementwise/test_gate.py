"""The kernel of activation functions and gates, compared with float64. Without a GPU it runs in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import gelu, relu, silu

from lowbit.hardware.machine import machine_of, typical_machine
from lowbit.kernels.reference.elementwise import GATES
from lowbit.ops.elementwise import activate, gate, gate2
from tests.kernels.calls import meta
from tests.kernels.interpreter import interpreted
from tests.kernels.sass import compile_plan

pytest.importorskip("triton", reason="the kernel is written in Triton")
from lowbit.kernels.elementwise.gate import GatePlan

gpu = pytest.mark.gpu
HALVES = [torch.float16, torch.bfloat16]


def inputs(m, width, dtype, device="cpu"):
    """Gates from large (f(g) is 0 or g) to small (f(g) is g / 2)."""
    generator = torch.Generator().manual_seed(m * width)
    both = torch.randn(m, 2 * width, generator=generator) * torch.logspace(1.5, -4, m)[:, None]
    return both.to(device, dtype)


def exact(gate, up, function):
    """f in float64, then the intended roundings. (torch's float32 GELU loses digits where 1 + tanh cancels.)"""
    functions = {"silu": silu, "gelu_tanh": lambda x: gelu(x, approximate="tanh"), "relu": relu}
    made = functions[function](gate.double()).to(gate.dtype)
    return made if up is None else made * up


def near(got, wanted):
    """Asserts that values agree within two roundings and that at most 1 % differ by more than 1e-9. The last bit of float32 can
    flip the rounding of f, and this the rounding of the product. GELU far below zero (1e-27) has no correct digit in float32.

    """
    eps = torch.finfo(got.dtype).eps
    difference = (got.double() - wanted.double()).abs()
    assert bool((difference <= 2 * eps * wanted.double().abs() + 1e-6).all()), float(difference.max())
    assert int((difference > 1e-9).sum()) <= 1 + 0.01 * difference.numel()


def check(device, dtype, m, width, function, start=0):
    both = inputs(m, width + start, dtype, device)
    first, second = both[:, start : width + start], both[:, width + 2 * start :]
    vectors = width % 8 == 0 and start == 0
    plan = GatePlan(m, width, function, vectors, machine_of("cuda") if device == "cuda" else typical_machine(80))
    for _ in range(2):
        if device == "cuda":
            torch.full((m, width), float("nan"), dtype=dtype, device=device)
        y = plan(first, second)
        assert y.is_contiguous()
        near(y, exact(first, second, function))


def alternating(both):
    """Returns the columns of gate and up in turns: 8 of gate, then 8 of up, and so on."""
    first, second = (half.unflatten(1, (-1, 8)) for half in both.chunk(2, dim=-1))
    return torch.stack([first, second], dim=2).flatten(1)


def check_alternating(device, dtype, m, width, function):
    both = inputs(m, width, dtype, device)
    rows = alternating(both)
    plan = GatePlan(m, width, function, True, machine_of("cuda") if device == "cuda" else typical_machine(80), alternate=True)
    near(plan(rows, rows[:, 8:]), exact(*both.chunk(2, dim=-1), function))


def check_alone(device, dtype, m, width, function, start=0):
    """Checks f(x) alone, as an MLP without a gate has it."""
    x = inputs(m, width + start, dtype, device)[:, start : width + start]
    vectors = width % 8 == 0 and start == 0
    plan = GatePlan(m, width, function, vectors, machine_of("cuda") if device == "cuda" else typical_machine(80))
    for _ in range(2):
        y = plan(x, None)
        assert y.is_contiguous()
        near(y, exact(x, None, function))
    if function == "relu":
        assert torch.equal(y, x.relu())


def check_without_a_gpu():
    for function in GATES:
        for m, width, start in ((1, 64, 0), (5, 203, 0), (2, 2056, 0), (3, 64, 3)):
            check_alone("cpu", torch.float16, m, width, function, start)
        for m, width in ((1, 64), (3, 1032), (2, 2056)):
            check_alternating("cpu", torch.float16, m, width, function)
        for m, width, start in ((1, 64, 0), (5, 203, 0), (3, 1032, 0), (3, 64, 3)):
            check("cpu", torch.float16, m, width, function, start)


def test_the_arithmetic_in_tritons_interpreter():
    interpreted(check_without_a_gpu)


# fp16 and bf16 differ only in single instructions. So each number of rows is compiled with one of the two.
ROWS_AND_TYPES = [(1, torch.float16), (8192, torch.bfloat16)]


@pytest.mark.parametrize(("m", "dtype"), ROWS_AND_TYPES, ids=["1-fp16", "8192-bf16"])
def test_vectors_of_16_bytes_and_neighbours_that_overlap(m, dtype):
    """Loads and stores are vectors of 16 bytes, the kernel overlaps with its neighbours, and without a gate only x is read."""
    each, both = 1 if m == 1 else 2, (meta((m, 14336), dtype), meta((m, 14336), dtype))
    kernels, of_one = {}, {}
    for function in GATES:
        for alternate in (False, True):
            plan = GatePlan(m, 14336, function, True, typical_machine(90), alternate)
            kernels[function, alternate] = compile_plan(plan, both, 90)
        plan = GatePlan(m, 28672, function, True, typical_machine(90))
        of_one[function] = compile_plan(plan, (meta((m, 28672), dtype), None), 90)
    for case, kernel in (*kernels.items(), *of_one.items()):
        assert kernel.stack_bytes == 0 and kernel.registers <= 64 and kernel.shared_bytes == 0, case
        assert kernel.count("LDG.E.128") == kernel.count("LDG") == (1 if case in of_one else 2) * each, case
        assert kernel.count("STG.E.128") == kernel.count("STG") == each, case
    for case, kernel in kernels.items():
        lines = [line.split()[0] if not line.startswith("@") else line.split()[1] for line in kernel.lines]
        wait = lines.index("ACQBULK")
        assert wait < lines.index("PREEXIT"), case
        assert all(i > wait for i, line in enumerate(lines) if line[:3] in ("LDG", "STG")), case


@gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("function", GATES)
@pytest.mark.parametrize("width", [8, 203, 1536, 14336])
def test_against_the_reference(width, function, dtype):
    for m in (1, 3, 64, 1000):
        check("cuda", dtype, m, width, function)
        check("cuda", dtype, m, width, function, start=3)
        check_alone("cuda", dtype, m, width, function)
        check_alone("cuda", dtype, m, width, function, start=3)
        if width % 8 == 0:
            check_alternating("cuda", dtype, m, width, function)
        both = inputs(m, width, dtype, "cuda")
        near(gate(both, function), exact(*both.chunk(2, dim=-1), function))
        first, second = (half.contiguous() for half in both.chunk(2, dim=-1))
        assert torch.equal(gate2(first, second, function), gate(both, function))
        near(activate(both, function), exact(both, None, function))
