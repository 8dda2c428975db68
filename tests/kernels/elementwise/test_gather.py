"""The kernel that permutes the columns of x into the order of the codes. It is bit-equal to torch; without a GPU it runs in
Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from lowbit.hardware.machine import machine_of, typical_machine
from tests.kernels.calls import meta
from tests.kernels.interpreter import interpreted
from tests.kernels.sass import compile_plan

pytest.importorskip("triton", reason="the kernel is written in Triton")

from lowbit.kernels.elementwise.gather import FEW_TOKENS, GatherPlan, gather_elements, gather_rows

gpu = pytest.mark.gpu


def expected(x, order, scale):
    """x times scale in float32, rounded once; then the columns are permuted."""
    if scale is not None:
        x = (x.float() * scale.float()).to(x.dtype)
    return x if order is None else x[:, order.long()]


def check(device, dtype, m, k, order=True, scale=None, start=0, gap=0):
    """Checks an x that starts `start` elements into its memory and has `gap` elements between rows. All other memory is
    poisoned.
    """
    generator = torch.Generator().manual_seed(m * k)
    wide = torch.randn(m, start + k + gap, generator=generator).to(device, dtype)
    x = wide[:, start : start + k]
    permutation = torch.randperm(k, generator=generator).to(device, torch.int32) if order else None
    factors = None if scale is None else torch.randn(k, generator=generator).to(device, scale)
    vectors = k % 8 == 0 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    if device == "cuda":
        row = machine_of("cuda")
        torch.full((m, k + 8), float("nan"), dtype=dtype, device=device)  # poisons the memory that the allocator returns next
    else:
        row = typical_machine(80)
    plan = GatherPlan(m, k, order, vectors, row)
    for _ in range(2):  # the first call compiles, the second uses the cached launch
        y = plan(x, permutation, factors)
        assert y.shape == (m, k) and y.stride(0) % 8 == 0 and y.data_ptr() % 16 == 0
        assert torch.equal(y, expected(x, permutation, factors)), (dtype, m, k, order, scale)
        rest = y.as_strided((m, y.stride(0)), (y.stride(0), 1))[:, k:]
        assert not rest.any(), "a vector is read as a whole, so what is beyond K must be zero"


CASES = [
    (1, 64, {}),
    (3, 203, {"scale": torch.float32}),
    (FEW_TOKENS + 1, 200, {}),
    (FEW_TOKENS + 2, 203, {"scale": torch.bfloat16, "start": 3, "gap": 2}),
    (FEW_TOKENS + 1, 64, {"order": False, "scale": torch.float16}),
]


def check_without_a_gpu():
    for m, k, options in CASES:
        check("cpu", torch.float16, m, k, **options)
        if "scale" not in options:  # the interpreter truncates to bf16, a GPU rounds
            check("cpu", torch.bfloat16, m, k, **options)


def test_the_arithmetic_in_tritons_interpreter():
    interpreted(check_without_a_gpu)


def compiled(sm, m, k, dtype=torch.float16, scale=None):
    plan = GatherPlan(m, k, True, True, typical_machine(sm))
    call = meta((m, k), dtype), meta((k,), torch.int32), None if scale is None else meta((k,), scale)
    return plan, compile_plan(plan, call, sm)


@pytest.mark.parametrize("sm", [80, 89, 90, 100])
def test_rows_move_in_vectors_of_16_bytes(sm):
    for plan, kernel in [compiled(sm, 4096, 8192, dtype, scale=torch.float32) for dtype in (torch.float16, torch.bfloat16)]:
        assert plan.launch.function is gather_rows and kernel.stack_bytes == 0
        # Each of 512 threads loads 4 vectors of the order, 4 of the scale, and 2 of each row. For each of two rows, it stores
        # the words to shared memory and makes 16 random reads.
        assert kernel.count("LDG.E.128") == kernel.count("LDG") == 12
        assert kernel.count("STS.128") == 4 and kernel.count("LDS") == 16
        assert kernel.count("STG.E.128") == kernel.count("STG") == 4
        assert kernel.shared_bytes == 4 * 8192


@pytest.mark.parametrize("sm", [80, 90])
def test_few_tokens_start_many_blocks(sm):
    plan, kernel = compiled(sm, 1, 8192)
    assert plan.launch.function is gather_elements and plan.launch.grid == (1, 32, 1)
    assert kernel.stack_bytes == 0 and kernel.shared_bytes == 0


@pytest.mark.parametrize("m", [1, 4096])
def test_neighbours_in_the_stream_overlap(m):
    """sm_90: the next kernel may start at once. Order and scale are read before the wait for the previous kernel, x after
    it.
    """
    _, kernel = compiled(90, m, 4096, scale=torch.float16)
    lines = [line.split()[0] if not line.startswith("@") else line.split()[1] for line in kernel.lines]
    start, wait = lines.index("PREEXIT"), lines.index("ACQBULK")
    reads = [i for i, line in enumerate(lines) if line.startswith("LDG")]
    assert start < wait and any(i < wait for i in reads) and any(i > wait for i in reads)
    assert all(i > wait for i, line in enumerate(lines) if line.startswith("STG"))
    _, before = compiled(80, m, 4096)
    assert before.count("ACQBULK") == before.count("PREEXIT") == 0


def test_rows_too_wide_for_a_block_are_read_where_they_lie():
    assert GatherPlan(4096, 32768, True, True, typical_machine(90)).launch.function is gather_rows
    assert GatherPlan(4096, 32768, True, True, typical_machine(89)).launch.function is gather_elements, "less shared memory"
    assert GatherPlan(4096, 53248, True, True, typical_machine(90)).launch.function is gather_elements
    assert GatherPlan(4096, 8192, False, True, typical_machine(90)).launch.function is gather_elements, "nothing moves"


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [None, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("k", [8, 200, 203, 576, 4096, 8192, 28672, 40000])
def test_against_torch(dtype, scale, k):
    for m in (1, 2, FEW_TOKENS, FEW_TOKENS + 1, 300):
        check("cuda", dtype, m, k, scale=scale)
        check("cuda", dtype, m, k, scale=scale, start=1, gap=3)
        check("cuda", dtype, m, k, order=False, scale=scale)
    check("cuda", dtype, 16384, min(k, 4096), scale=scale)


@gpu
def test_in_a_graph_behind_and_before_other_kernels():
    """The previous kernel writes x, the next one reads the result. Both must be correct although the three kernels overlap."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(4096, generator=generator).to("cuda", torch.int32)
    for m in (1, 16, 256):
        x = torch.randn(m, 4096, device="cuda", dtype=torch.float16)
        plan = GatherPlan(m, 4096, True, True, machine_of("cuda"))
        plan(x, order, None)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x
            for _ in range(20):
                y = plan(y * -1, order, None) + 1
        reference = x
        for _ in range(20):
            reference = (reference * -1)[:, order.long()] + 1
        for _ in range(3):
            y.fill_(float("nan"))
            graph.replay()
            assert torch.equal(y, reference)
