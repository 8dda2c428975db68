"""A decode step in one launch against float64 over poisoned memory, on a GPU and warp by warp in an emulator; machine code."""

from __future__ import annotations

import pytest
import torch

from lowbit.hardware.machine import machine_of
from lowbit.kernels.choose.attention import AttentionShape
from lowbit.kernels.choose.decode_step import FIELDS, PRODUCT_NAMES, StepShape, StepTable, step_table
from tests.kernels.calls import meta
from tests.kernels.sass import compile_plan
from tests.kernels.sm90.decode_step_case import Case, small_table
from tests.kernels.warps import execute

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.sm90.decode_step import StepPlan
from lowbit.pack import WeightForm

LOADER_WARPS = 4
"""Warps that Triton adds for the loader: whole warpgroups."""


def plan_of(case: Case) -> StepPlan:
    form = case.weights[0]["qkv"].form
    return StepPlan(case.table, form, case.dtype, "silu", case.biases, case.head_norms)


def arguments(case: Case, vectors: torch.Tensor, layers: torch.Tensor):
    return (
        layers, vectors, case.h, case.x, case.squares, case.tables, case.slot_positions, case.rows, case.status, case.eps,
    )  # fmt: skip


def compare(case: Case, x, squares, vectors, largest: float) -> None:
    """Compares a step's results with float64. The reference starts from h, pages and x before the step, which `case` has."""
    pages = [{name: layer[name].clone() for name in "kv"} for layer in case.vectors_of]
    h = case.h
    case.h = case.before
    for layer, before in zip(case.vectors_of, case.pages_before, strict=True):
        layer["k"].copy_(before["k"]), layer["v"].copy_(before["v"])
    expected_h, expected_x, expected_squares, expected = case.reference()

    def difference(found, expected):
        return float((found.double() - expected).norm() / expected.norm())

    for i, of_layer in enumerate(expected):
        for name, values in of_layer.items():
            assert difference(case.vector(vectors, i, name, values.shape[1]), values) < largest, (i, name)
        for name in "kv":
            before, found = case.pages_before[i][name], pages[i][name]
            assert difference(found, case.vectors_of[i][name].double()) < largest, (i, name)
            changed = (found != before).flatten(2).any(-1).sum()
            assert changed == (case.vectors_of[i][name] != before).flatten(2).any(-1).sum(), "other tokens have changed"
    assert difference(h, expected_h) < largest and difference(x, expected_x) < largest
    assert difference(squares.double().sum(0), expected_squares) < largest
    assert not case.status.any()


def remembered(case: Case) -> Case:
    """The case with copies of what a step changes."""
    case.before = case.h.clone()
    case.pages_before = [{name: layer[name].clone() for name in "kv"} for layer in case.vectors_of]
    return case


CASES = {
    "two layers": ({"layers": 2}, {}),
    "no context": ({}, {"contexts": (0,)}),
    "two splits": ({"blocks": 3}, {"contexts": (150,)}),
    "three splits": ({"blocks": 3}, {"contexts": (300,)}),
    "two rows": ({"tokens": 2}, {"contexts": (3, 200)}),
    "four rows": ({"tokens": 4}, {"contexts": (0, 31, 32, 140)}),
    "heads of 128": ({"head_dim": 128, "heads": 1}, {"contexts": (70,)}),
    "groups of 4": ({"heads": 4}, {"contexts": (65,)}),
    "groups of 6": ({"heads": 6, "hidden": 384}, {"contexts": (65,)}),
    "biases and norms": ({}, {"biases": PRODUCT_NAMES, "head_norms": True, "contexts": (40,)}),
    "bf16": ({}, {"dtype": torch.bfloat16, "contexts": (40,)}),
    "eight rows": ({"tokens": 8, "warps": 8}, {"contexts": (0, 1, 2, 40, 64, 70, 5, 128)}),
    "idle blocks": ({"blocks": 9}, {"contexts": (200,)}),
    "part of a slot": ({"hidden": 640, "heads": 10, "kv_heads": 5}, {"contexts": (9,)}),
    "int8 by channel": ({"bits": 8, "scale_bytes": 0}, {"scheme": "w8a16"}),
    "fp6 in groups of 64": ({"bits": 6, "scale_bytes": 64}, {"scheme": "w6e3m2a16_g64"}),
    "zeros": ({"bits": 4, "scale_bytes": 64}, {"scheme": "w4a16_g128_z"}),
}


@pytest.mark.parametrize("name", CASES)
def test_emulated(name):
    """The compiled PTX of all blocks in a random order of warps, with late copies, over NaN in shared memory."""
    shape, options = CASES[name]
    case = remembered(Case(small_table(**shape), **options))
    plan, vectors = plan_of(case), torch.full((case.table.words,), 0x7FC07FC0, dtype=torch.int32)
    call = arguments(case, vectors, case.layers)
    kernel, launched = compile_plan(plan, call, 90), []
    plan.launch = lambda *given: launched.append(given[:-1])
    x, squares = plan(*call)
    threads = 32 * (case.table.warps + LOADER_WARPS)
    execute(kernel.ptx, kernel.shared_bytes, launched[0], case.table.blocks, threads, others=case.tensors)
    compare(case, x, squares, vectors, 2e-3 if case.dtype == torch.float16 else 1e-2)


def test_a_missing_block_is_reported():
    """Where one block does not run, the others end, and the status says what they waited for."""
    case = Case(small_table())
    plan, vectors = plan_of(case), torch.empty(case.table.words, dtype=torch.int32)
    object.__setattr__(plan.config, "limit", 600)
    call = arguments(case, vectors, case.layers)
    kernel, launched = compile_plan(plan, call, 90), []
    plan.launch = lambda *given: launched.append(given[:-1])
    plan(*call)
    threads = 32 * (case.table.warps + LOADER_WARPS)
    execute(kernel.ptx, kernel.shared_bytes, launched[0], 1, threads, others=case.tensors)
    assert case.status.item() != 0


# ---- machine code

LLAMA = AttentionShape(32, 8, 128, 128**-0.5, 128)


def compiled(tokens, fmt="int4", group=128, dtype=torch.float16):
    bits, scale_bytes = {"int4": (4, 32), "fp6_e3m2": (6, 0), "int8": (8, 0)}[fmt]
    table = StepTable(StepShape(32, 4096, 14336, LLAMA, tokens, bits, scale_bytes), 132)
    form = WeightForm(fmt, group, "none", "fp16", group > 0, group > 0)
    plan = StepPlan(table, form, dtype, "silu", (), False)
    call = (
        meta((32, len(FIELDS)), torch.int64), meta((table.words,), torch.int32), meta((tokens, 4096), dtype),
        meta((tokens, 4096), dtype), meta((1, tokens), torch.float32), meta((9, 16), torch.int32), meta((9,), torch.int32),
        meta((tokens,), torch.int32), meta((1,), torch.int32), 1e-5,
    )  # fmt: skip
    return plan, compile_plan(plan, call, 90)


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_machine_code(tokens):
    """All shared memory is one allocation at address 0 beside the state of roles; nothing is on the stack."""
    plan, kernel = compiled(tokens)
    table = plan.table
    assert table.shared_bytes <= kernel.shared_bytes <= 227 << 10
    assert kernel.registers * 32 * (table.warps + LOADER_WARPS) <= 1 << 16
    assert kernel.stack_bytes == 0
    products = [(first, last) for first, last in kernel.loops if any("HMMA" in line for line in kernel.lines[first : last + 1])]
    innermost = [
        loop
        for loop in products
        if not any(other != loop and loop[0] <= other[0] and other[1] <= loop[1] for other in products)
    ]
    assert len(innermost) == 4
    for first, last in innermost:
        lines = kernel.lines[first : last + 1]
        assert sum("LDS.128" in line for line in lines) % 2 == 0


# ---- on a GPU

GPU_SHAPES = {
    "llama": {"hidden": 1024, "intermediate": 3584, "heads": 8, "kv_heads": 2, "head_dim": 128, "layers": 3},
    "qwen": {"hidden": 896, "intermediate": 1152, "heads": 14, "kv_heads": 2, "head_dim": 64, "layers": 2},
}


def gpu_case(name, tokens=1, **options):
    shape = dict(GPU_SHAPES[name])
    bits, scale_bytes = shape.pop("bits", 4), shape.pop("scale_bytes", 32)
    heads, kv_heads, dim = (shape.pop(key) for key in ("heads", "kv_heads", "head_dim"))
    attention = AttentionShape(heads, kv_heads, dim, dim**-0.5, dim, norm_eps=1e-6)
    step = StepShape(**shape, attention=attention, tokens=tokens, bits=bits, scale_bytes=scale_bytes)
    return remembered(Case(step_table(step, machine_of("cuda")), device="cuda", **options))


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_SHAPES)
@pytest.mark.parametrize("contexts", [(0,), (1,), (129,), (1000,), (5, 700), (0, 127, 128, 2000)], ids=str)
def test_on_a_gpu(name, contexts):
    options = {"biases": ("qkv",), "head_norms": True} if name == "qwen" else {}
    case = gpu_case(name, len(contexts), contexts=contexts, **options)
    vectors = torch.full((case.table.words,), 0x7FC07FC0, dtype=torch.int32, device="cuda")
    x, squares = plan_of(case)(*arguments(case, vectors, case.layers))
    torch.cuda.synchronize()
    compare(case, x, squares, vectors, 2e-3)


@pytest.mark.gpu
def test_on_a_gpu_in_bf16():
    case = gpu_case("llama", contexts=(300,), dtype=torch.bfloat16)
    vectors = torch.zeros(case.table.words, dtype=torch.int32, device="cuda")
    x, squares = plan_of(case)(*arguments(case, vectors, case.layers))
    torch.cuda.synchronize()
    compare(case, x, squares, vectors, 1e-2)


@pytest.mark.gpu
def test_equal_bits_on_a_gpu():
    """1,000 launches give the same bits, also beside a stream that loads the memory."""
    case = gpu_case("llama", contexts=(1000,))
    plan, layers, table = plan_of(case), case.layers, case.table
    vectors, first = torch.zeros(table.words, dtype=torch.int32, device="cuda"), None
    side, large = torch.cuda.Stream(), torch.zeros(1 << 28, dtype=torch.uint8, device="cuda")
    for i in range(1000):
        case.h.copy_(case.before)
        if i % 10 == 5:
            with torch.cuda.stream(side):
                large.add_(1)
        plan(*arguments(case, vectors, layers))
        if first is None:
            first, first_h = vectors.clone(), case.h.clone()
        elif i % 10 == 6 or i > 980:
            assert torch.equal(vectors, first) and torch.equal(case.h, first_h), i
    assert not case.status.any()
