"""The kernels of embedding, residual and norm, compared with their reference and with float64. Without a GPU they run in
Triton's interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.functional import layer_norm

from lowbit.hardware.machine import machine_of, typical_machine
from lowbit.kernels.reference.elementwise import add_reference, embed_rows_reference, norm_reference, scaled_reference
from lowbit.ops.elementwise import EmbeddingTable, add_norm, add_norm_squares, embed_norm, embed_rows
from lowbit.quantize import rtn
from tests.kernels.calls import meta
from tests.kernels.interpreter import interpreted
from tests.kernels.sass import TRITON, compile_plan

pytest.importorskip("triton", reason="the kernel is written in Triton")
from lowbit.kernels.elementwise.norm import (
    NONE,
    NORMED,
    SQUARES,
    VECTOR,
    EmbedPlan,
    NormPlan,
    NormRequest,
    shape_of,
)

gpu = pytest.mark.gpu
NAN = float("nan")
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
HALVES = [*TYPES.values()]


def random(*shape, dtype=torch.float16, seed=0, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def framed(values):
    """Returns (rows, memory): a copy of `values` with NaN before and after it, so that any access outside the rows shows."""
    m, width = values.shape
    memory = values.new_full(((m + 2) * width,), NAN)
    rows = memory[width:-width].view(m, width)
    rows.copy_(values)
    return rows, memory


def near(got, wanted, steps=1, size=None, few=0.01):
    """Asserts a difference of at most `steps` roundings of numbers of `size`, and that all but a share `few` are equal. (The
    last bit of a float32 root can flip a tie, and one rounding affects the next.)
    """
    eps = torch.finfo(got.dtype).eps
    difference = (got.double() - wanted.double()).abs()
    tolerance = steps * eps * (wanted if size is None else size).double().abs() + 1e-6
    assert bool((difference <= tolerance).all()), float(difference.max())
    assert int((difference > 0).sum()) <= 1 + few * difference.numel()


def machine(device):
    return machine_of("cuda") if device == "cuda" else typical_machine(80)


def poison(device):
    """Fills the memory that the allocator returns next with NaN."""
    if device == "cuda":
        torch.full((1 << 20,), NAN, device=device)


def calls(device):
    """Two calls on a GPU, since the first compiles and the second uses the cached launch; one in the interpreter."""
    return range(2 if device == "cuda" else 1)


def check_norm(device, dtype, m, width, offset, with_delta=True, with_post=False, weights=None):
    h, delta = random(m, width, dtype=dtype, device=device), random(m, width, dtype=dtype, seed=1, device=device)
    gamma, post = (random(width, dtype=weights or dtype, seed=seed, device=device) for seed in (2, 3))
    delta, post = delta if with_delta else None, post if with_post else None
    wanted = h.clone()
    add_reference(wanted, delta, 1e-5, offset, post)
    for norm in (NORMED, SQUARES):
        plan = NormPlan(m, width, NormRequest(norm, offset), machine(device))
        for _ in calls(device):
            mine, memory = framed(h)
            poison(device)
            x, squares = plan(mine, delta, gamma, None, post, 1e-5, 0.25)
            if post is None:
                assert torch.equal(mine, wanted)
            else:  # a summand is rounded once, and may be larger than the sum
                near(mine, wanted, 2, h.abs() + wanted.abs())
            assert memory[:width].isnan().all() and memory[-width:].isnan().all()
            if norm == NORMED:
                near(x, norm_reference(mine, gamma, 1e-5, offset), 2)
                continue
            exact, sums = scaled_reference(mine, gamma, offset, 0.25)
            assert squares is not None and squares.shape == (1, m)
            near(x, exact)
            torch.testing.assert_close(squares, sums, rtol=1e-5, atol=0)


def check_layer_norm(device, dtype, m, width, mean=0.0, with_delta=True, weights=None):
    """Checks rows with a large mean, which LayerNorm must remove without a remainder, and one row of equal elements."""
    h, delta = random(m, width, dtype=dtype, device=device), random(m, width, dtype=dtype, seed=1, device=device)
    h += mean
    h[0], delta[0] = 3.0, 0.5
    gamma, bias = (random(width, dtype=weights or dtype, seed=seed, device=device) for seed in (2, 3))
    wanted = h + delta if with_delta else h.clone()
    plan = NormPlan(m, width, NormRequest(NORMED), machine(device))
    for _ in calls(device):
        mine, memory = framed(h)
        poison(device)
        x, squares = plan(mine, delta if with_delta else None, gamma, bias, None, 1e-5)
        assert torch.equal(mine, wanted) and squares is None
        assert memory[:width].isnan().all() and memory[-width:].isnan().all()
        # The tolerance grows where terms cancel: the bias with the product, and h with its mean, which float32 has to a
        # relative 2^-22.
        variance, of_row = torch.var_mean(mine.float(), 1, correction=0, keepdim=True)
        of_mean = 2**-22 / torch.finfo(dtype).eps * of_row.abs() * gamma.abs() / (variance + 1e-5).sqrt()
        size = bias.abs() + x.abs() + of_mean
        near(x, layer_norm(mine.double(), (width,), gamma.double(), bias.double(), 1e-5).to(dtype), 2, size)
        # Rows of equal elements are not compared: torch merges means of parts, and the remainder is divided by sqrt(eps). With
        # a mean of 30, 1.3 % of 9216 elements round differently (torch 2.11 on an H200).
        near(x[1:], norm_reference(mine, gamma, 1e-5, 0.0, bias)[1:], 2, size[1:], few=0.015 if mean else 0.01)
        assert torch.equal(x[0], bias.to(dtype)), "(h - mean) is 0"


def check_embed(device, dtype, width, packed, norm, scale, with_rows, learned=False):
    weight = random(50, width, dtype=torch.float32, device=device)
    table = EmbeddingTable.from_quant_tensor(rtn(weight, "w8a16")) if packed else None
    codes, row_scale = (weight.to(dtype), None) if table is None else (table.codes, table.scale)
    tokens = torch.tensor([3, 49, 0, 7], dtype=torch.int32, device=device)
    rows = torch.tensor([2, 1, 3, 1, 0], dtype=torch.int32, device=device) if with_rows else None
    gamma = random(width, dtype=dtype, seed=2, device=device)
    positions = torch.tensor([2, 0, 29, 7], dtype=torch.int32, device=device) if learned else None
    position_table = random(30, width, dtype=dtype, seed=4, device=device) if learned else None
    bias = random(width, dtype=dtype, seed=5, device=device) if learned and norm == NORMED else None
    offset = 0.0 if learned else 1.0
    m, rounded = len(tokens if rows is None else rows), float(torch.tensor(scale, dtype=dtype))
    plan = EmbedPlan(m, width, NormRequest(norm, offset), scale != 1.0, machine(device))
    wanted = embed_rows_reference(tokens, rows, codes, row_scale, dtype, scale, positions, position_table)
    for _ in calls(device):
        poison(device)
        weights = None if norm == NONE else gamma
        of_tokens = (tokens, rows, codes, row_scale, positions, position_table)
        h, x, squares = plan(*of_tokens, weights, bias, dtype, rounded, 1e-5, 0.5)
        assert torch.equal(h, wanted)
        if norm == NORMED:
            exact = norm_reference(wanted, gamma, 1e-5, offset, bias)
            near(x, exact, 2, exact.abs() + (0 if bias is None else bias.abs()))
        elif norm == SQUARES:
            exact, sums = scaled_reference(wanted, gamma, offset, 0.5)
            near(x, exact)
            torch.testing.assert_close(squares, sums, rtol=1e-5, atol=0)
        else:
            assert x is None and squares is None


def check_without_a_gpu():
    for width, offset in itertools.product((64, 203, 576), (0.0, 1.0)):
        check_norm("cpu", torch.float16, 3, width, offset)
        check_norm("cpu", torch.float16, 3, width, offset, with_post=True)
        check_norm("cpu", torch.float16, 3, width, offset, with_delta=False, weights=torch.float32)
    for width, packed, norm, scale, with_rows in itertools.product(
        (64, 203), (False, True), (NONE, NORMED, SQUARES), (1.0, 14.2), (False, True)
    ):
        check_embed("cpu", torch.float16, width, packed, norm, scale, with_rows)
    for width, mean in itertools.product((64, 203, 576, 768), (0.0, 30.0)):
        check_layer_norm("cpu", torch.float16, 3, width, mean)
        check_layer_norm("cpu", torch.float16, 2, width, mean, with_delta=False, weights=torch.float32)
    for width, packed, norm, with_rows in itertools.product((64, 203), (False, True), (NONE, NORMED), (False, True)):
        check_embed("cpu", torch.float16, width, packed, norm, 1.0, with_rows, learned=True)
    check_embed("cpu", torch.float16, 64, True, SQUARES, 14.2, True, learned=True)


def test_the_arithmetic_in_tritons_interpreter():
    """Checks fp16 only: the interpreter truncates to bf16, while a GPU rounds."""
    interpreted(check_without_a_gpu)


@pytest.mark.parametrize("width", [1, 8, 203, 576, 896, 2048, 4096, 5120, 8192, 16384])
def test_a_rows_shape_depends_on_its_width_alone(width):
    """The number of threads and of vectors per thread depends on the width, never on the number of rows."""
    threads, chunks = shape_of(width)
    assert 32 <= threads <= 1024 and threads & (threads - 1) == 0
    assert width <= threads * chunks * VECTOR < width + threads * VECTOR
    plans = [NormPlan(m, width, NormRequest(NORMED), typical_machine(90)) for m in (1, 64, 8192)]
    assert len({plan.constants for plan in plans}) == 1, "a row's bits do not depend on the number of rows"
    if width >= 576:
        assert 2 <= chunks <= 4 and 3 * threads * chunks * VECTOR <= 4 * width


def compiled_norm(width, dtype=torch.float16, norm=NORMED, offset=0.0, delta=True, post=False, sm=90, gamma=None, bias=False):
    plan = NormPlan(64, width, NormRequest(norm, offset), typical_machine(sm))
    rows, weights = meta((64, width), dtype), meta((width,), gamma or dtype)
    call = rows, rows if delta else None, weights, weights if bias else None, weights if post else None, 1e-5, 0.25
    return plan, compile_plan(plan, call, sm)


def compiled_embed(width, dtype=torch.float16, norm=NORMED, packed=False, scaled=False, sm=90, rows=True, learned=False):
    plan = EmbedPlan(64, width, NormRequest(norm), scaled, typical_machine(sm))
    ids, weights = meta((64,), torch.int32), None if norm == NONE else meta((width,), dtype)
    table = meta((1000, width), torch.uint8 if packed else dtype)
    scale = meta((1000,), torch.float32) if packed else None
    of_positions = (ids, meta((2048, width), dtype), weights, weights) if learned else (None, None, weights, None)
    call = (ids, ids if rows else None, table, scale, *of_positions, dtype, 2.0, 1e-5, 0.25)
    return plan, compile_plan(plan, call, sm)


# fp16 and bf16 differ only in single instructions, so the widths alternate between them. Each width stands for a pair (threads,
# vectors per thread): 768 also for 576, (32, 3), and 12288 also for 9216, (512, 3).
WIDTHS = [(576, "fp16"), (4096, "bf16"), (5120, "bf16"), (8192, "fp16"), (16384, "bf16")]
WIDTHS_OF_OPT = [(768, "bf16"), (4096, "fp16"), (5120, "fp16"), (7168, "bf16"), (12288, "bf16"), (16384, "fp16")]


@pytest.mark.parametrize(("norm", "offset", "post"), [(NORMED, 0.0, False), (NORMED, 1.0, True), (SQUARES, 0.0, False)])
def test_rows_move_in_vectors_of_16_bytes(norm, offset, post):
    made = [(case, *compiled_norm(case[0], TYPES[case[1]], norm, offset, post=post)) for case in WIDTHS]
    for case, plan, kernel in made:
        _, threads, _, chunks, *_ = plan.constants
        assert kernel.stack_bytes == 0 and kernel.registers <= (64 if threads == 1024 else 128), case
        assert kernel.count("LDG.E.128") == kernel.count("LDG") == (4 if post else 3) * chunks, case
        assert kernel.count("STG.E.128") == 2 * chunks and kernel.count("STG") == 2 * chunks + (norm == SQUARES), case
        assert kernel.shared_bytes <= 4 * threads // 32, "only the sums of the warps are shared"


def test_layer_norms_move_in_vectors_of_16_bytes():
    """Checked for widths of OPT too; gamma and bias are loaded before the wait for the previous kernel."""
    made = [(case, *compiled_norm(case[0], TYPES[case[1]], bias=True)) for case in WIDTHS_OF_OPT]
    of_embeddings = [compiled_embed(width, TYPES[dtype], learned=True)[1] for width, dtype in WIDTHS_OF_OPT]
    for (case, plan, kernel), embed in zip(made, of_embeddings, strict=True):
        _, threads, _, chunks, *_ = plan.constants
        for each in (kernel, embed):
            assert each.stack_bytes == 0 and each.registers <= (64 if threads == 1024 else 96), case
            assert each.count("STG.E.128") == each.count("STG") == 2 * chunks, case
            reads, wait = reads_and_wait(each)
            assert sum(i < wait for i in reads) == 2 * chunks, "positions are written by the end of the step before"
        assert kernel.count("LDG.E.128") == kernel.count("LDG") == 4 * chunks, case
        assert embed.count("LDG.E.128") == 4 * chunks == embed.count("LDG") - 3, "row, token and position beside"


def test_an_embedding_moves_in_vectors():
    cases = itertools.product((NONE, NORMED), (False, True))
    made = [(*case, *compiled_embed(4096, norm=case[0], packed=case[1], scaled=True)) for case in cases]
    for norm, packed, plan, kernel in made:
        _, _, _, chunks, *_ = plan.constants
        assert kernel.stack_bytes == 0 and kernel.count("STG.E.128") == (1 + norm) * chunks, (norm, packed)
        assert kernel.count("LDG.E.64" if packed else "LDG.E.128") >= chunks, (norm, packed)


def reads_and_wait(kernel):
    """The indices of the lines with global loads, and that of the wait for the previous kernel."""
    lines = [line.split()[0] if not line.startswith("@") else line.split()[1] for line in kernel.lines]
    return [i for i, line in enumerate(lines) if line.startswith("LDG")], lines.index("ACQBULK")


@pytest.mark.parametrize("of", ["norm", "embed"])
def test_neighbours_in_the_stream_overlap(of):
    """sm_90: before the wait for the previous kernel only gamma is loaded. The next kernel is started after the wait, so that a
    kernel overlaps with at most one earlier kernel."""
    _, kernel = compiled_norm(4096) if of == "norm" else compiled_embed(4096)
    lines = [line.split()[0] if not line.startswith("@") else line.split()[1] for line in kernel.lines]
    start, wait = lines.index("PREEXIT"), lines.index("ACQBULK")
    reads = [i for i, line in enumerate(lines) if line.startswith("LDG")]
    assert wait < start and sum(i < wait for i in reads) == 2, "two vectors of gamma"
    assert all(i > wait for i, line in enumerate(lines) if line.startswith("STG"))
    _, before = compiled_norm(4096, sm=80) if of == "norm" else compiled_embed(4096, sm=80)
    assert before.count("ACQBULK") == before.count("PREEXIT") == 0


@pytest.mark.parametrize("sm", [80, 89, 100])
def test_compiles_for_other_gpus(sm):
    assert TRITON >= (3, 6)
    for kernel in (compiled_norm(4096, sm=sm)[1], compiled_embed(4096, packed=True, sm=sm)[1]):
        assert kernel.stack_bytes == 0


@pytest.mark.parametrize(("width", "dtype"), [(203, torch.float16), (4096, torch.bfloat16)], ids=str)
def test_everything_that_is_launched_compiles(width, dtype):
    made = [compiled_norm(width, dtype, *way) for way in itertools.product((NORMED, SQUARES), (0.0, 1.0), (False, True))]
    made += [
        compiled_embed(width, dtype, norm, packed, scaled=rows, rows=rows)
        for norm, packed, rows in itertools.product((NONE, NORMED, SQUARES), (False, True), (False, True))
    ]
    assert all(kernel.stack_bytes == 0 and kernel.registers <= 96 for _, kernel in made)
    made = [compiled_norm(width, dtype, delta=delta, bias=True) for delta in (False, True)]
    made += [
        compiled_embed(width, dtype, norm, packed, scaled=rows, rows=rows, learned=True)
        for norm, packed, rows in itertools.product((NONE, NORMED), (False, True), (False, True))
    ]
    made += [compiled_norm(width, dtype, gamma=torch.float32, bias=True)]
    assert all(kernel.stack_bytes == 0 and kernel.registers <= 96 for _, kernel in made)
    for offset in (0.0, 1.0):  # with 32-bit gammas, ptxas of Triton 3.6 puts two registers on the stack
        kernel = compiled_norm(width, dtype, offset=offset, post=offset == 1, gamma=torch.float32)[1]
        assert kernel.stack_bytes <= 8 and kernel.registers <= 96


@gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("width", [8, 64, 203, 576, 896, 2048, 4096, 5120, 8192, 16384])
def test_norms_against_the_reference(dtype, width):
    for m, offset in itertools.product((1, 3, 64), (0.0, 1.0)):
        check_norm("cuda", dtype, m, width, offset)
        check_norm("cuda", dtype, m, width, offset, with_post=True)
        check_norm("cuda", dtype, m, width, offset, with_delta=False)
        check_norm("cuda", dtype, m, width, offset, weights=torch.float32)
    check_norm("cuda", dtype, 8192, min(width, 4096), 0.0)


@gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("width", [8, 203, 768, 2048, 5120, 7168, 9216, 16384])
def test_layer_norms_against_the_reference(dtype, width):
    for m, mean in itertools.product((1, 3, 64), (0.0, 30.0)):
        check_layer_norm("cuda", dtype, m, width, mean)
        check_layer_norm("cuda", dtype, m, width, mean, with_delta=False, weights=torch.float32)
    check_layer_norm("cuda", dtype, 8192, min(width, 4096), 1.0)


@gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("width", [64, 203, 7168])
def test_embeddings_with_positions_against_the_reference(dtype, width):
    for packed, norm, with_rows in itertools.product((False, True), (NONE, NORMED), (False, True)):
        check_embed("cuda", dtype, width, packed, norm, 1.0, with_rows, learned=True)
    check_embed("cuda", dtype, width, True, SQUARES, 14.2, True, learned=True)


@gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("width", [64, 203, 4096])
def test_embeddings_against_the_reference(dtype, width):
    for packed, norm, scale, with_rows in itertools.product(
        (False, True), (NONE, NORMED, SQUARES), (1.0, 14.2), (False, True)
    ):  # fmt: skip
        check_embed("cuda", dtype, width, packed, norm, scale, with_rows)


@gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_row_has_the_same_bits_in_any_company(dtype):
    h, delta = (random(8192, 4096, dtype=dtype, seed=seed, device="cuda") for seed in (0, 1))
    gamma, bias = (random(4096, dtype=dtype, seed=seed, device="cuda") for seed in (2, 3))
    many = h.clone()
    x, squares = add_norm(many, delta, gamma, 1e-5), add_norm_squares(many.clone(), None, gamma)[1]
    centred = add_norm(many.clone(), None, gamma, 1e-5, bias=bias)
    for first, m in ((0, 1), (5, 3), (64, 64), (8191, 1)):
        assert torch.equal(add_norm(many[first : first + m].clone(), None, gamma, 1e-5, bias=bias), centred[first : first + m])
        few = h[first : first + m].clone()
        assert torch.equal(add_norm(few, delta[first : first + m].clone(), gamma, 1e-5), x[first : first + m])
        assert torch.equal(add_norm_squares(few, None, gamma)[1], squares[:, first : first + m])


@gpu
def test_rows_that_start_anywhere():
    """Tensors are aligned to 16 bytes or not, in every combination. A plan is compiled for the alignment of its tensors."""
    for shifts in itertools.product((0, 1), repeat=3):
        h, delta, gamma = (
            random(n * 576 + s, seed=seed, device="cuda")[s:].view(n, 576)
            for seed, (n, s) in enumerate(zip((3, 3, 1), shifts, strict=True))
        )
        mine = h.clone() if not shifts[0] else torch.cat([h.new_zeros(1), h.flatten()])[1:].view(3, 576)
        wanted = h + delta
        near(add_norm(mine, delta, gamma[0], 1e-5), norm_reference(wanted, gamma[0], 1e-5, 0.0), 2)
        assert torch.equal(mine, wanted)


@gpu
def test_in_a_graph_behind_and_before_other_kernels():
    """The previous kernel writes the summand, the next one reads the result. Both must be correct although the three kernels
    overlap.
    """
    table, gamma = random(100, 4096, device="cuda"), random(4096, seed=2, device="cuda")
    bias = random(4096, seed=3, device="cuda")
    for m in (1, 16, 64):
        tokens = torch.arange(64, dtype=torch.int32, device="cuda")
        rows = torch.arange(m, dtype=torch.int32, device="cuda").flip(0).contiguous()

        def step(tokens=tokens, rows=rows):
            h, x = embed_norm(
                tokens, rows, table, gamma, 1e-5, torch.float16, bias=bias, positions=tokens, position_table=table
            )
            for _ in range(10):
                x = add_norm(h, x, gamma, 1e-5)
                x = add_norm(h, x, gamma, 1e-5, bias=bias)
                x = add_norm(h, x * 0.5, gamma, 1e-5)
            return h, x

        wanted = step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = step()
        for _ in range(3):
            for t in made:
                t.fill_(NAN)
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))
    assert torch.equal(embed_rows(tokens, None, table, torch.float16), table[:64])
