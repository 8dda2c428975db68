"""The sums a x of adapters: the kernel's PTX in NumPy and on a GPU against float64, machine code."""

from __future__ import annotations

import pytest
import torch

from lowbit.hardware.machine import machine_of, typical_machine
from lowbit.kernels.reference.lora import lora_sums_reference
from tests.kernels.calls import meta
from tests.kernels.ptx import execute
from tests.kernels.sass import compile_plan

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")
from lowbit.kernels.sm80.lora_sums import REGISTERS, WARPS, LoraSumsPlan, splits_of

gpu = pytest.mark.gpu
EPS = 1e-5


def call_of(m, k, parts, rank, adapters, norm, dtype=torch.float16):
    """Random rows of several adapters and of none: (x, a, adapter_of, squares, 1 / width, eps, factor)."""
    generator = torch.Generator().manual_seed(m * k + rank)
    x = torch.randn(m, k, generator=generator).to(dtype)
    a = (torch.randn(adapters, parts, rank, k, generator=generator) * k**-0.5).to(dtype)
    adapter_of = torch.randint(-1, adapters, (m,), generator=generator, dtype=torch.int32)
    squares = torch.rand(norm, m, generator=generator) * k / norm if norm else None
    return x, a, adapter_of, squares, 1.0 / k, EPS, 0.5 if norm else 1.0


def check(t, call, tolerance):
    """t holds NaN where nothing was written."""
    x, a, adapter_of, squares, inverse_width, eps, factor = call
    expected = lora_sums_reference(x, a, adapter_of, squares, width=round(1 / inverse_width), eps=eps, factor=factor)
    own = adapter_of >= 0
    found = t.double().sum(0)
    assert bool(found[~own].isnan().all()), "rows without an adapter are not written"
    assert not bool(own.any()) or float((found - expected)[own].abs().max()) < tolerance * float(expected[own].abs().max())


@pytest.mark.parametrize(
    ("m", "k", "parts", "rank", "adapters", "norm"),
    [(1, 64, 1, 16, 1, 0), (5, 2304, 3, 16, 3, 9), (19, 4104, 2, 32, 2, 3), (8, 200, 1, 16, 4, 70)],
)
def test_without_a_gpu(m, k, parts, rank, adapters, norm):
    call = call_of(m, k, parts, rank, adapters, norm)
    plan = LoraSumsPlan(m, k, parts, rank, adapters, norm, torch.float16, typical_machine(80))
    kernel, noted = compile_plan(plan, call, 80), []
    launch, plan.launch = plan.launch, lambda *arguments: noted.append(arguments)
    t = plan(*call).fill_(torch.nan)
    execute(kernel.ptx, kernel.shared_bytes, (t, *noted[0][1:-1]), launch.grid, 32 * WARPS)
    check(t, call, 1e-5)


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("m", [1, 8, 16, 33, 64])
def test_on_a_gpu(m, dtype):
    for k, parts, rank, adapters, norm in (
        (4096, 3, 16, 4, 128),
        (14336, 1, 16, 4, 0),
        (200, 2, 64, 1, 5),
        (4104, 2, 32, 3, 0),
    ):
        call = call_of(m, k, parts, rank, adapters, norm, dtype)
        given = [each.cuda() if isinstance(each, torch.Tensor) else each for each in call]
        plan = LoraSumsPlan(m, k, parts, rank, adapters, norm, dtype, machine_of("cuda"))
        made = []
        for _ in range(2):
            torch.full((plan.config.splits, m, parts, rank), torch.nan, device="cuda")
            made.append(plan(*given).cpu())
        check(made[0], call, 1e-4)
        own = call[2] >= 0
        assert torch.equal(made[0][:, own], made[1][:, own])


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("m", "k", "norm"), [(1, 4096, 128), (8, 14336, 0), (64, 4096, 32), (64, 14336, 0)])
def test_machine_code(m, k, norm, capability):
    """At most four registers are spilled, and there is no loop. Weights are loaded before the wait for the previous kernel, x
    at once after it. Up to 8 rows, registers are left for a block of the small-M kernel on the same SM."""
    plan = LoraSumsPlan(m, k, 2, 16, 4, norm, torch.bfloat16, typical_machine(capability))
    squares = meta((norm, m), torch.float32) if norm else None
    tensors = meta((m, k), torch.bfloat16), meta((4, 2, 16, k), torch.bfloat16), meta((m,), torch.int32), squares
    kernel = compile_plan(plan, (*tensors, 1.0 / k, EPS, 1.0), capability)
    assert kernel.stack_bytes <= 16 and kernel.registers <= (REGISTERS if m <= 8 else 128)
    products = [i for i, line in enumerate(kernel.lines) if "HMMA" in line]
    chunks = plan.config.chunks
    assert len(products) == 2 * chunks * plan.config.n8_tiles
    if capability == 90:
        wait = next(i for i, line in enumerate(kernel.lines) if "ACQBULK" in line)
        assert sum("LDG.E.128" in line for line in kernel.lines[:wait]) == 2 * chunks
        assert sum("LDG.E.128" in line for line in kernel.lines[wait : products[0]]) >= chunks
        assert kernel.count("UBLKPF") == 1, "the first block prefetches the weights of all"


def test_splits_depend_on_k_and_on_whether_rows_are_few():
    assert {splits_of(m, 14336) for m in range(1, 9)} == {7} and {splits_of(m, 14336) for m in range(9, 65)} == {4}
    assert splits_of(1, 64) == 1 and splits_of(64, 4096) == 2 and splits_of(64, 28672) == 7
