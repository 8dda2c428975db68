"""The kernels of low-rank adapters, compared with float64. Without a GPU they run in Triton's interpreter. Also tests their
machine code."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lowbit.hardware.machine import machine_of, typical_machine
from lowbit.kernels.reference.lora import lora_reference, part_of_columns
from tests.kernels.calls import meta
from tests.kernels.interpreter import interpreted
from tests.kernels.sass import compile_plan

pytest.importorskip("triton", reason="the kernels are written in Triton")
from lowbit.kernels.elementwise.lora import LoraPlan

gpu = pytest.mark.gpu
EPS = 1e-5


def check(device, dtype, m, k, widths, adapters=3, rank=16, alternates=False, bias=False, norm=0, strided=False):
    """Checks random rows, with several adapters and with none. A second run must give the same bits. Outputs and sums hold NaN
    before."""
    generator = torch.Generator().manual_seed(m * k + rank)
    n, parts = sum(widths), len(widths)
    x = torch.randn(m, k + 8 * strided, generator=generator).to(dtype)[:, :k]
    a = (torch.randn(adapters, parts, rank, k, generator=generator) * k**-0.5).to(dtype)
    b = torch.randn(adapters, n, rank, generator=generator).to(dtype)
    adapter_of = torch.randint(-1, adapters, (m,), generator=generator, dtype=torch.int32)
    squares = torch.rand(norm, m, generator=generator) * k / norm if norm else None
    of_columns = torch.randn(n, generator=generator).to(dtype) if bias else None
    factor = 0.25 if norm else 1.0
    given = [None if t is None else t.to(device) for t in (x, a, b, adapter_of, squares, of_columns)]
    machine = machine_of("cuda") if device == "cuda" else typical_machine(80)
    plan = LoraPlan(m, k, widths, alternates, adapters, rank, norm, machine)
    expected = lora_reference(
        x, a, b, adapter_of, part_of_columns(widths, alternates), squares, of_columns, width=k, eps=EPS, factor=factor
    )
    made = []
    for _ in range(2):
        config = plan.shrink.config
        torch.full((config.splits, m, parts, rank), torch.nan, device=device)
        torch.full((m, n), torch.nan, device=device, dtype=dtype)
        made.append(plan(*given, 1.0 / k, EPS, factor).cpu())
    assert torch.equal(*made)
    alone = adapter_of < 0
    assert torch.equal(made[0][alone], expected[alone].to(dtype)), "rows without an adapter"
    if not bool(alone.all()):
        # The product a x is rounded to 16 bits, as in PEFT, and then y is.
        error = (made[0][~alone].double() - expected[~alone]).norm() / expected[~alone].norm()
        assert error < (1.5e-3 if dtype == torch.float16 else 1.2e-2), float(error)


def check_without_a_gpu():
    check("cpu", torch.float16, 1, 64, (48,))
    check("cpu", torch.float16, 19, 200, (40, 24, 24), bias=True)
    check("cpu", torch.float16, 5, 4352, (136,), rank=32, norm=3)  # each split has two chunks of K
    check("cpu", torch.float16, 17, 264, (72, 72), alternates=True, norm=5, strided=True, bias=True)
    check("cpu", torch.float16, 4, 64, (200,), adapters=1, rank=128)


def test_without_a_gpu():
    interpreted(check_without_a_gpu)


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("m", [1, 16, 33, 300])
def test_on_a_gpu(m, dtype):
    check("cuda", dtype, m, 4096, (4096, 1024, 1024), bias=True, norm=32)
    check("cuda", dtype, m, 4096, (14336, 14336), alternates=True, norm=32, rank=64)
    check("cuda", dtype, m, 14336, (4096,), rank=16)
    check("cuda", dtype, m, 200, (40, 24, 24), strided=True, adapters=1)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("k", "widths", "rank", "norm"), [(4096, (4096, 1024, 1024), 16, 32), (14336, (4096,), 64, 0)])
def test_machine_code(capability, k, widths, rank, norm):
    """Nothing spills. Tensor cores multiply. Weights are loaded before the wait for the previous kernel."""
    plan = LoraPlan(16, k, widths, False, 2, rank, norm, typical_machine(capability))
    half, n, parts = torch.bfloat16, sum(widths), len(widths)
    rows = meta((16,), torch.int32)
    shrink = compile_plan(plan.shrink, (meta((16, k), half), meta((2, parts, rank, k), half), rows), capability)
    t = meta((plan.shrink.config.splits, 16, parts, rank), torch.float32)
    squares = meta((norm, 16), torch.float32) if norm else None
    call = t, meta((2, n, rank), half), rows, squares, None, 1.0 / k, EPS, 1.0
    expand = compile_plan(plan.expand, call, capability)
    for kernel in (shrink, expand):
        assert kernel.stack_bytes == 0 and kernel.count("HMMA") > 0
        if capability == 90 and (kernel is expand or plan.shrink.config.early_chunks):
            wait = next(i for i, line in enumerate(kernel.lines) if "ACQBULK" in line)
            assert sum("LDG" in line for line in kernel.lines[:wait]) >= 2, "adapters and weights"


def test_splits_depend_on_k_alone():
    """The number of splits depends on K alone, so that a row has the same bits in any batch."""
    plans = [LoraPlan(m, 14336, (4096,), False, 2, 16, 0, typical_machine(90)) for m in (1, 16, 1024)]
    assert len({dataclasses.astuple(plan.shrink.config) for plan in plans}) == 1
    assert plans[0].shrink.config.splits <= 16
