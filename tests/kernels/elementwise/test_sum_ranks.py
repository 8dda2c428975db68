"""Sums over ranks with residual and norm weights, against float64. Without a GPU, ranks run one after the other in the
interpreter. Also the order of stores and loads in the machine code."""

from __future__ import annotations

import mmap
import os
import re
import time

import pytest
import torch

from lowbit.hardware.machine import machine_of, typical_machine
from lowbit.kernels.reference.elementwise import scaled_reference
from tests.kernels.calls import meta
from tests.kernels.elementwise.test_norm import near
from tests.kernels.interpreter import interpreted
from tests.kernels.sass import compile_plan

pytest.importorskip("triton", reason="the kernel is written in Triton")
from lowbit.kernels.elementwise.sum_ranks import EMPTY, SumRanksPlan
from lowbit.kernels.parts.launch import recording

gpu = pytest.mark.gpu
ROWS = 5
CASES = [(2, 3, 40), (2, 5, 1536), (3, 1, 1032), (4, 2, 264)]
"""Ranks, rows, columns."""


class Memories:
    """The memories of several ranks on one device: rows [ranks, phases, ranks, ROWS, H], which are all EMPTY at first."""

    def __init__(self, ranks, width, dtype, device):
        self.ranks, self.width = ranks, width
        self.rows = torch.full((ranks, 2, ranks, ROWS, width), EMPTY, dtype=torch.int16, device=device)
        self.places = torch.tensor([self.rows[r].data_ptr() for r in range(ranks)], device=device)
        self.stop = torch.zeros(1, dtype=torch.int32, device=device)

    def arrive(self, rank, phase, others):
        """Puts the rows of all other ranks into a rank's memory."""
        for p, y in enumerate(others):
            if p != rank:
                self.rows[rank, phase, p, : len(y)] = y.view(torch.int16)


def check(device, dtype, ranks, m, width):
    """Calls each rank after the rows of all others are in its memory, first in one phase, then in the other."""
    machine = machine_of("cuda") if device == "cuda" else typical_machine(80)
    generator = torch.Generator().manual_seed(width)
    memories = Memories(ranks, width, dtype, device)
    gamma = torch.randn(width, generator=generator).to(device)
    for phase in (0, 1):
        parts = torch.randn(ranks, m, width, generator=generator).to(device, dtype)
        h = torch.randn(m, width, generator=generator).to(device, dtype)
        exact = h.double() + parts.double().sum(0)
        found = []
        for rank in range(ranks):
            memories.rows.fill_(EMPTY)
            memories.arrive(rank, phase, parts)
            mine = h.clone()
            plan = SumRanksPlan(m, width, rank, ranks, ROWS, phase, machine)
            x, squares = plan(mine, parts[rank], gamma, memories.places, memories.stop, 0.25)
            found.append((mine, x, squares))
            sent = memories.rows.clone()
            for other in range(ranks):
                if other != rank:
                    assert torch.equal(sent[other, phase, rank, :m], parts[rank].view(torch.int16))
                    sent[other, phase, rank, :m] = EMPTY
            assert bool((sent == EMPTY).all()), "nothing else is stored, and what was read is empty again"
        mine, x, squares = found[0]
        near(mine, exact.to(dtype), 1, exact.abs() + parts.abs().sum(0))
        wanted, sums = scaled_reference(mine, gamma, 0.0, 0.25)
        near(x, wanted)
        torch.testing.assert_close(squares, sums, rtol=1e-5, atol=0)
        for other in found[1:]:
            assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True)), "ranks differ"


def check_sum(device, dtype, ranks, m, width):
    """Checks sums without a residual h."""
    machine = machine_of("cuda") if device == "cuda" else typical_machine(80)
    memories = Memories(ranks, width, dtype, device)
    parts = torch.randn(ranks, m, width, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    for rank in range(ranks):
        memories.arrive(rank, 1, parts)
        plan = SumRanksPlan(m, width, rank, ranks, ROWS, 1, machine)
        x, squares = plan(None, parts[rank], None, memories.places, memories.stop)
        assert squares is None and torch.equal(x, sum(part.float() for part in parts).to(dtype))


def check_nan(device, dtype):
    """A NaN with the bits of EMPTY is sent as another NaN. Otherwise the receiver would wait for it for ever."""
    machine = machine_of("cuda") if device == "cuda" else typical_machine(80)
    memories = Memories(2, 40, dtype, device)
    y = torch.full((1, 40), EMPTY, dtype=torch.int16, device=device).view(dtype)
    memories.arrive(0, 0, [y, torch.zeros_like(y)])
    x, _ = SumRanksPlan(1, 40, 0, 2, ROWS, 0, machine)(None, y, None, memories.places, memories.stop)
    arrived = memories.rows[1, 0, 0, 0]
    assert bool(x.isnan().all()) and bool(arrived.view(dtype).isnan().all()) and not bool((arrived == EMPTY).any())


def interpreted_sums():
    """Checks fp16 only: the interpreter truncates float32 to bf16 instead of rounding."""
    for case in CASES:
        check("cpu", torch.float16, *case)
    check_sum("cpu", torch.float16, 3, 2, 40)
    check_nan("cpu", torch.float16)


def interpreted_together():
    """Two processes at once compute sums over shared memory, in alternating phases. One of them or the other is late."""
    memory = mmap.mmap(-1, 2 * 2 * 2 * ROWS * 40 * 2)
    rows = torch.frombuffer(memory, dtype=torch.int16).view(2, 2, 2, ROWS, 40).fill_(EMPTY)
    places, stop = torch.tensor([rows[r].data_ptr() for r in range(2)]), torch.zeros(1, dtype=torch.int32)
    child = os.fork()
    rank = int(child == 0)
    try:
        for call in range(8):
            parts = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(call)).half()
            time.sleep(0.03 * (call % 4 == 1 + 2 * rank))
            plan = SumRanksPlan(3, 40, rank, 2, ROWS, call % 2, typical_machine(80))
            x, _ = plan(None, parts[rank], None, places, stop)
            assert torch.equal(x, (parts[0].float() + parts[1].float()).half()), (rank, call)
    except BaseException:
        if rank:
            os._exit(1)
        raise
    if rank:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert bool((rows == EMPTY).all())


def interpreted_stop():
    """The rows of the other rank never arrive. Once `stop` is set, the kernel ends nevertheless."""
    memories = Memories(2, 40, torch.float16, "cpu")
    memories.stop.fill_(1)
    y = torch.zeros(1, 40, dtype=torch.float16)
    plan = SumRanksPlan(1, 40, 0, 2, ROWS, 0, typical_machine(80))
    plan(None, y, None, memories.places, memories.stop)


def test_a_plan_has_a_kernel_with_h_and_one_without():
    """Decode steps add to h. Prompts with as many tokens do not, and take the other kernel."""
    plan = SumRanksPlan(4, 64, 0, 2, ROWS, 0, typical_machine(90))
    y, h, gamma = torch.zeros(4, 64).half(), torch.zeros(4, 64).half(), torch.zeros(64)
    memory = torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    with recording() as kernels:
        for _ in range(2):
            plan(h, y, gamma, *memory)
            plan(None, y, None, *memory)
    assert [kernel.arguments[2] is None for kernel in kernels] == [False, True]


def test_sums_without_a_gpu():
    interpreted(interpreted_sums, interpreted_together, interpreted_stop)


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [*CASES, (2, 1, 8192), (2, 4, 4096)], ids=str)
def test_sums_on_a_gpu(case, dtype):
    check("cuda", dtype, *case)
    check_sum("cuda", dtype, *case)
    check_nan("cuda", dtype)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("width", [4096, 8192, 5120])
def test_rows_are_stored_before_others_are_waited_for(width, capability):
    """A rank stores its rows before it waits for others, in 16 bytes and without a fence. Loads of different rows do not wait
    for each other."""
    plan = SumRanksPlan(4, width, 1, 2, 64, 0, typical_machine(capability))
    half = lambda *size: meta(size, torch.bfloat16)  # noqa: E731
    memory = meta((2,), torch.int64), meta((1,), torch.int32)
    kernel = compile_plan(plan, (half(4, width), half(4, width), meta((width,), torch.float32), *memory, 1.0), capability)
    assert kernel.stack_bytes == 0 and kernel.count("MEMBAR") == 0
    at = lambda what: [i for i, line in enumerate(kernel.lines) if re.search(what, line)]  # noqa: E731
    chunks = plan.constants[7]
    stores, looks = at(r"STG\.E\.128"), at(r"LDG\.E\.128\.STRONG\.SYS")
    assert len(looks) == 2 * chunks and stores[chunks - 1] < looks[0], "a look, and another in the loop"
    assert not [i for i in at(r"LDG\.E\.(16|U16|64)\b.*STRONG") if i > looks[0]]
    if capability == 90:
        assert kernel.count("ACQBULK") == kernel.count("PREEXIT") == 1
        waited, places = at("ACQBULK")[0], at(r"LDG\.E\.64 ")
        assert sum(i < waited for i in places) >= 2, "where the rows go is loaded while the product runs"
