"""The kernel that gathers rows of x in the order of slots. Copies are bit-equal, with and without a GPU, and in vectors of 16
bytes."""

from __future__ import annotations

import pytest
import torch

from lowbit.hardware.machine import machine_of, typical_machine
from tests.kernels.calls import meta
from tests.kernels.interpreter import interpreted
from tests.kernels.sass import compile_plan

pytest.importorskip("triton", reason="the kernel is written in Triton")
from lowbit.kernels.elementwise.gather_slots import GatherSlotsPlan

gpu = pytest.mark.gpu
CASES = [(3, 2, 2048), (5, 1, 40), (4, 3, 1031)]


def check(device, tokens, top_k, width):
    generator = torch.Generator().manual_seed(width)
    rows = -(-width // 8) * 8
    x = torch.randn(tokens, rows + 8, generator=generator).half().to(device)[:, :width]
    order = torch.randperm(tokens * top_k, generator=generator).int().to(device)
    machine = machine_of("cuda") if device == "cuda" else typical_machine(80)
    out = GatherSlotsPlan(tokens * top_k, top_k, width, machine)(x, order)
    assert out.stride(0) == rows and torch.equal(out, x[order.long() // top_k])
    # Slots without an expert are last. Their rows of `out` are not used, but reads for them must stay inside x.
    order[-2:], x = -1, x[1:]
    out = GatherSlotsPlan(tokens * top_k - 1, top_k, width, machine)(x, (order[1:] - top_k).clamp(-1))
    assert torch.equal(out, x[(order[1:].long() - top_k).clamp(0) // top_k])


def interpreted_copies():
    for case in CASES:
        check("cpu", *case)


def test_copies_without_a_gpu():
    interpreted(interpreted_copies)


@gpu
@pytest.mark.parametrize("case", [*CASES, (700, 8, 2048)], ids=str)
def test_copies_on_a_gpu(case):
    check("cuda", *case)


def test_rows_are_copied_in_vectors():
    plan = GatherSlotsPlan(8192, 8, 2048, typical_machine(90))
    kernel = compile_plan(plan, (meta((1024, 2048), torch.bfloat16), meta((8192,), torch.int32)), 90)
    assert kernel.count("LDG.E.128") == kernel.count("STG.E.128") == 1 and kernel.count("ACQBULK") == 1
