"""Sums over ranks with residual and norm weights: ranks that run one after the other, against float64, without a GPU in the
interpreter; the order of stores, flags and loads in the machine code.
"""

from __future__ import annotations

import re

import pytest
import torch

from lowbit.hardware.machine import machine_of, typical_machine
from lowbit.kernels.reference.elementwise import scaled_reference
from tests.kernels.calls import meta
from tests.kernels.elementwise.test_norm import near
from tests.kernels.interpreter import interpreted
from tests.kernels.sass import compile_plan

pytest.importorskip("triton", reason="the kernel is written in Triton")
from lowbit.kernels.elementwise.sum_ranks import SumRanksPlan

gpu = pytest.mark.gpu
ROWS = 5
CASES = [(2, 3, 40), (2, 5, 1536), (3, 1, 1032), (4, 2, 264)]
"""Ranks, rows, columns."""


class Memories:
    """The memories of several ranks on one device: rows [ranks, phases, ranks, ROWS, H], filled with NaN, and flags."""

    def __init__(self, ranks, width, dtype, device):
        self.ranks, self.width = ranks, width
        self.rows = torch.full((ranks, 2, ranks, ROWS, width), float("nan"), dtype=dtype, device=device)
        self.flags = torch.zeros((ranks, 2, ranks, ROWS), dtype=torch.int32, device=device)
        places = [[part[r].data_ptr() for r in range(ranks)] for part in (self.rows, self.flags)]
        self.places = torch.tensor(places, device=device)
        self.counts = torch.zeros((ranks, 2, ROWS), dtype=torch.int32, device=device)
        self.stop = torch.zeros(1, dtype=torch.int32, device=device)

    def arrive(self, rank, phase, others, call):
        """Puts the rows of all other ranks into a rank's memory, and raises their flags as after `call` calls."""
        for p, y in enumerate(others):
            if p != rank:
                self.rows[rank, phase, p, : len(y)] = y
                self.flags[rank, phase, p, : len(y)] = call


def check(device, dtype, ranks, m, width):
    """Every rank is called after the rows of all others are in its memory; then so in the other phase, and again."""
    machine = machine_of("cuda") if device == "cuda" else typical_machine(80)
    generator = torch.Generator().manual_seed(width)
    memories = Memories(ranks, width, dtype, device)
    gamma = torch.randn(width, generator=generator).to(device)
    for call in (1, 2):
        for phase in (0, 1):
            parts = torch.randn(ranks, m, width, generator=generator).to(device, dtype)
            h = torch.randn(m, width, generator=generator).to(device, dtype)
            exact = h.double() + parts.double().sum(0)
            found = []
            for rank in range(ranks):
                memories.arrive(rank, phase, parts, call)
                mine = h.clone()
                plan = SumRanksPlan(m, width, rank, ranks, ROWS, phase, machine)
                given = memories.places, memories.counts[rank], memories.stop
                x, squares = plan(mine, parts[rank], gamma, *given, 0.25)
                assert int(memories.counts[rank, phase, :m].min()) == call
                found.append((mine, x, squares))
                for other in range(ranks):
                    if other != rank:
                        assert torch.equal(memories.rows[other, phase, rank, :m], parts[rank])
                        assert bool((memories.flags[other, phase, rank, :m] == call).all())
                        assert bool(memories.rows[other, phase, rank, m:].isnan().all())
            mine, x, squares = found[0]
            near(mine, exact.to(dtype), 1, exact.abs() + parts.abs().sum(0))
            wanted, sums = scaled_reference(mine, gamma, 0.0, 0.25)
            near(x, wanted)
            torch.testing.assert_close(squares, sums, rtol=1e-5, atol=0)
            for other in found[1:]:
                assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True)), "ranks differ"


def check_sum(device, dtype, ranks, m, width):
    """Without h."""
    machine = machine_of("cuda") if device == "cuda" else typical_machine(80)
    memories = Memories(ranks, width, dtype, device)
    parts = torch.randn(ranks, m, width, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    for rank in range(ranks):
        memories.arrive(rank, 1, parts, 1)
        plan = SumRanksPlan(m, width, rank, ranks, ROWS, 1, machine)
        x, squares = plan(None, parts[rank], None, memories.places, memories.counts[rank], memories.stop)
        assert squares is None and torch.equal(x, sum(part.float() for part in parts).to(dtype))


def interpreted_sums():
    """In fp16: the interpreter does not round float32 to bf16 but cuts it off."""
    for case in CASES:
        check("cpu", torch.float16, *case)
    check_sum("cpu", torch.float16, 3, 2, 40)


def interpreted_stop():
    """A rank whose flag never comes does not hold the kernel once `stop` is set."""
    memories = Memories(2, 40, torch.float16, "cpu")
    memories.stop.fill_(1)
    y = torch.zeros(1, 40, dtype=torch.float16)
    plan = SumRanksPlan(1, 40, 0, 2, ROWS, 0, typical_machine(80))
    plan(None, y, None, memories.places, memories.counts[0], memories.stop)


def test_sums_without_a_gpu():
    interpreted(interpreted_sums, interpreted_stop)


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [*CASES, (2, 1, 8192), (2, 4, 4096)], ids=str)
def test_sums_on_a_gpu(case, dtype):
    check("cuda", dtype, *case)
    check_sum("cuda", dtype, *case)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("width", [4096, 8192, 5120])
def test_flags_are_raised_after_the_stores_and_rows_are_read_after_the_flags(width, capability):
    plan = SumRanksPlan(4, width, 1, 2, 64, 0, typical_machine(capability))
    half, int32 = (lambda *size: meta(size, torch.bfloat16)), torch.int32
    memory = meta((2, 2), torch.int64), meta((2, 64), int32), meta((1,), int32)
    call = half(4, width), half(4, width), meta((width,), torch.float32), *memory, 1.0
    kernel = compile_plan(plan, call, capability)
    assert kernel.stack_bytes == 0
    sent, raised, seen, read = (
        next(i for i, line in enumerate(kernel.lines) if re.search(what, line))
        for what in (r"STG\.E\.128", r"ATOM.*EXCH.*SYS", r"(LDG|ATOM.*ADD).*SYS", r"LDG\.E\.128\.STRONG")
    )
    released = [i for i, line in enumerate(kernel.lines) if re.search(r"MEMBAR\..*SYS", line)]
    assert sent < released[0] < raised < seen < read
    if capability == 90:
        assert kernel.count("ACQBULK") == kernel.count("PREEXIT") == 1
        places = [i for i, line in enumerate(kernel.lines) if "LDG.E.64 " in line]
        waited = next(i for i, line in enumerate(kernel.lines) if "ACQBULK" in line)
        assert sum(i < waited for i in places) >= 3, "where the rows go is loaded while the product runs"
