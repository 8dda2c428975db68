"""A decode step in one launch against float64 over poisoned memory, on a GPU and warp by warp in an emulator; machine code."""

from __future__ import annotations

import functools
import re
import time

import pytest
import torch

from lowbit.hardware.machine import machine_of
from lowbit.kernels.choose.attention import AttentionShape
from lowbit.kernels.choose.decode_step import PRODUCT_NAMES, StepShape, StepTable, UnitForm, step_table
from tests.kernels.calls import meta
from tests.kernels.sass import compile_plan
from tests.kernels.sm90.decode_step_case import Case, alike, forms_of_schemes, small_table
from tests.kernels.warps import execute

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.sm90.decode_step import StepPlan
from lowbit.pack.weight import DENSE_FORM, WeightForm

LOADER_WARPS = 4
"""Warps that Triton adds for the loader: whole warpgroups."""


def plan_of(case: Case) -> StepPlan:
    return StepPlan(
        case.table, case.forms, case.dtype, "silu", case.biases, case.head_norms, case.sinks, case.embedding_scale,
        case.normalize,
    )  # fmt: skip


def arguments(case: Case, vectors: torch.Tensor, layers: torch.Tensor):
    return (
        layers, vectors, case.h, case.tokens, case.embedding, case.row_scale, case.tables, case.slot_positions, case.rows,
        case.status, case.logits, case.eps,
    )  # fmt: skip


def compare(case: Case, x, squares, vectors, largest: float) -> None:
    """Compares a step's results with float64. The reference starts from the pages before the step, which `case` has."""
    pages = [{name: layer[name].clone() for name in "kv"} for layer in case.vectors_of]
    for layer, before in zip(case.vectors_of, case.pages_before, strict=True):
        layer["k"].copy_(before["k"]), layer["v"].copy_(before["v"])
    shape = case.table.shape
    routed_by = [case.vector(vectors, i, "logits", shape.experts) for i in range(shape.layers)] if shape.experts else None
    expected_h, expected_x, expected_squares, expected_logits, expected = case.reference(routed_by)

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
    assert difference(case.h, expected_h) < largest and difference(x, expected_x) < largest
    if expected_logits is not None:
        assert difference(case.logits, expected_logits) < largest
    assert difference(squares.double().sum(0), expected_squares) < largest
    assert not case.status.any()


def remembered(case: Case) -> Case:
    """The case with copies of the pages, which a step changes."""
    case.pages_before = [{name: layer[name].clone() for name in "kv"} for layer in case.vectors_of]
    return case


def emulate(table, schemes, options):
    """Executes a step without a GPU and compares it with float64."""
    case = remembered(Case(table, schemes, **options))
    plan, vectors = plan_of(case), torch.full((case.table.words,), 0x7FC07FC0, dtype=torch.int32)
    object.__setattr__(plan.config, "limit", 1 << 14)  # a wrong kernel ends soon
    call = arguments(case, vectors, case.layers)
    kernel, launched = compile_plan(plan, call, 90), []
    plan.launch = lambda *given: launched.append(given[:-1])
    x, squares = plan(*call)
    threads = 32 * (case.table.warps + LOADER_WARPS)
    execute(kernel.ptx, kernel.shared_bytes, launched[0], case.table.blocks, threads, others=case.tensors)
    compare(case, x, squares, vectors, 2e-3 if case.dtype == torch.float16 else 1e-2)


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
    "groups of 8": ({"heads": 8, "hidden": 512, "layers": 2}, {"contexts": (65,), "head_norms": True}),
    "biases and norms": ({}, {"biases": PRODUCT_NAMES, "head_norms": True, "contexts": (40,)}),
    "bf16": ({}, {"dtype": torch.bfloat16, "contexts": (40,)}),
    "eight rows": ({"tokens": 8, "warps": 8}, {"contexts": (0, 1, 2, 40, 64, 70, 5, 128)}),
    "idle blocks": ({"blocks": 9}, {"contexts": (200,)}),
    "part of a slot": ({"hidden": 640, "heads": 10, "kv_heads": 5}, {"contexts": (9,)}),
    "half a k block": ({"hidden": 192, "heads": 3, "kv_heads": 3, "intermediate": 320}, {"contexts": (9,)}),
    "head": ({"vocab": 200, "schemes": alike("w4a16_g128", "w8a16")}, {"biases": ("head",), "embedding_bits": 8}),
    "head of 4 bits": (
        {"vocab": 64, "tokens": 2, "schemes": alike("w4a16_g128", "w4a16_g128")},
        {"contexts": (5, 7), "embedding_scale": 1.5},
    ),
    "head of 16 bits": ({"vocab": 96, "schemes": alike("w4a16_g128", "16")}, {"biases": ("head",)}),
    "window": ({"blocks": 3, "windows": True, "layers": 2}, {"contexts": (300,), "windows": (150, 0)}),
    "sinks": ({"blocks": 3, "tokens": 2}, {"contexts": (150, 0), "sinks": True}),
    "int8 by channel": ({"schemes": alike("w8a16")}, {}),
    "fp6 in groups of 64": ({"schemes": alike("w6e3m2a16_g64")}, {}),
    "zeros": ({"schemes": alike("w4a16_g128_z")}, {}),
    "16 bits": (
        {"schemes": alike("16", "16"), "vocab": 64, "hidden": 192, "heads": 3, "kv_heads": 3},
        {"biases": PRODUCT_NAMES},
    ),
    "16 bits, bf16, four rows": ({"schemes": alike("16"), "tokens": 4}, {"contexts": (1, 2, 3, 40), "dtype": torch.bfloat16}),
    "mixed products": (
        {"schemes": (("w4a16_g128",), ("w8a16",), ("w6e3m2a16_g64",), ("16",), ()), "hidden": 320, "heads": 5, "kv_heads": 5},
        {},
    ),
    "mixed layers": (
        {"layers": 3, "schemes": (("w4a16_g64", "16"), ("16", "w4a16_g64"), ("w4a16_g64",), ("w8a16", "16", "w4a16_g64"), ())},
        {},
    ),
}


EXPERTS = {
    "two of eight": ({"experts": 8, "top_k": 2, "layers": 2}, {}),
    "all of three": ({"experts": 3, "top_k": 3, "blocks": 5}, {"contexts": (40,)}),
    "ties": ({"experts": 10, "top_k": 3, "layers": 2}, {"ties": True}),
    "one of 40": ({"experts": 40, "top_k": 1}, {"normalize": False}),
    "softmax over all, bf16": ({"experts": 6, "top_k": 2, "blocks": 3}, {"normalize": False, "dtype": torch.bfloat16}),
    "experts of two k blocks": ({"experts": 8, "top_k": 3, "intermediate": 256, "blocks": 3, "vocab": 64, "schemes":
                                 alike("w4a16_g128", "w8a16")}, {"head_norms": True, "contexts": (40,)}),
    "experts by channel": ({"experts": 8, "top_k": 5, "schemes": alike("w8a16")}, {}),
    "experts of three k blocks": ({"experts": 5, "top_k": 4, "intermediate": 384, "hidden": 192, "heads": 3, "kv_heads": 3,
                                   "schemes": alike("w6e3m2a16_g64")}, {}),
    "experts with zeros": ({"experts": 8, "top_k": 2, "schemes": alike("w4a16_g128_z")}, {}),
    "experts with logits near each other": (  # in layer 1 rounding changes the order of two of them
        {"experts": 64, "top_k": 16, "layers": 2}, {"contexts": (40,), "dtype": torch.bfloat16, "seed": 2}
    ),
    "experts of two tokens": ({"experts": 8, "top_k": 3, "tokens": 2, "layers": 2}, {"contexts": (5, 70)}),
    "experts of four tokens": ({"experts": 6, "top_k": 2, "tokens": 4, "intermediate": 256, "blocks": 3, "schemes":
                                alike("w4a16_g64", "w8a16"), "vocab": 64}, {"contexts": (5, 0, 40, 9), "ties": True}),
    "experts of two tokens by channel": ({"experts": 4, "top_k": 2, "tokens": 2, "schemes": alike("w8a16"), "blocks": 5},
                                         {"contexts": (3, 4), "dtype": torch.bfloat16, "normalize": False}),
    "experts beside 16 bits": (
        {"experts": 8, "top_k": 2, "schemes": (("16",), ("16", "w8a16"), ("w8a16",), ("w4a16_g64", "w8a16"), ()), "layers": 2},
        {"biases": ("qkv",)},
    ),
}  # fmt: skip
"""Mixtures of experts."""


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_emulated(name):
    """As `test_emulated`, with a router and its experts."""
    shape, options = EXPERTS[name]
    emulate(small_table(**shape), shape.get("schemes", ()), options)


FORMATS = {
    "int2": "w2a16_g64", "int3": "w3a16_g128", "int5": "w5a16", "int6": "w6a16_g128", "int7": "w7a16_g32",
    "fp4": "w4e2m1a16_g32", "fp5": "w5e2m2a16_g128", "fp6_e2m3": "w6e2m3a16", "fp7": "w7e3m3a16_g64", "fp8_e4m3": "w8e4m3a16",
    "fp8_e5m2": "w8e5m2a16_g128", "int2 with zeros": "w2a16_g64_z",
}  # fmt: skip
"""Schemes of weights; int4, int8 and fp6_e3m2 are those of other cases."""


@pytest.mark.parametrize(("name", "dtype"), [(name, (torch.float16, torch.bfloat16)[i % 2]) for i, name in enumerate(FORMATS)])
def test_formats_emulated(name, dtype):
    """As `test_emulated`, in each format."""
    schemes = alike(FORMATS[name])
    emulate(small_table(schemes=schemes), schemes, {"dtype": dtype})


@pytest.mark.parametrize("name", CASES)
def test_emulated(name):
    """The compiled PTX of all blocks in a random order of warps, with late copies, over NaN in shared memory."""
    shape, options = CASES[name]
    emulate(small_table(**shape), shape.get("schemes", ()), options)


def test_x_in_parts(monkeypatch):
    """Where shared memory holds a part of x only, it is gathered several times; blocks have 2 or 3 row blocks of o and down."""
    monkeypatch.setattr("lowbit.kernels.choose.decode_step.MOST_X_BYTES", 2048)
    shape = {"hidden": 384, "heads": 6, "kv_heads": 2, "intermediate": 1088, "tokens": 2, "blocks": 9}
    schemes = alike("w4a16_g64")
    table = small_table(**shape, schemes=schemes)
    assert table.parts("down") == 3 and table.parts("qkv") == 1
    emulate(table, schemes, {"contexts": (3, 40)})


def test_x_of_experts_in_parts(monkeypatch):
    """Activations of down of many chosen experts are gathered in parts, too; those of the router are not."""
    monkeypatch.setattr("lowbit.kernels.choose.decode_step.MOST_X_BYTES", 2048)
    shape = {"tokens": 2, "intermediate": 256, "experts": 6, "top_k": 3, "blocks": 3}
    table = small_table(**shape)
    assert table.parts("down") == 2 and table.parts("gate_up") == 1
    emulate(table, (), {"contexts": (3, 40)})


def test_three_row_blocks_at_once(monkeypatch):
    """Units are read two at a time, also where the sums of three row blocks are reduced together."""
    monkeypatch.setattr("lowbit.kernels.choose.decode_step.MOST_X_BYTES", 1024)
    table = small_table(hidden=640, blocks=6)
    assert table.parts("qkv") == 2 and table.at_once("qkv") == table.at_once("gate_up") == 3
    emulate(table, (), {"contexts": (3,)})


def test_late_weights(monkeypatch):
    """A slot may be full long after the slots behind it. A warp waits for every second slot of a ring of 5, so for the same
    place every second time only: it must not take the contents that other warps wait for as its own."""
    monkeypatch.setattr("lowbit.kernels.choose.decode_step.MOST_SLOTS", 5)
    monkeypatch.setattr("lowbit.kernels.choose.decode_step.MOST_SLOT_BYTES", 9 << 10)
    schemes = alike("16")
    table = small_table(hidden=512, blocks=2, schemes=schemes)
    assert table.ring_slots == 5 and table.slots_of_chunk("gate_up") == 2
    emulate(table, schemes, {"contexts": (3,)})


@pytest.mark.parametrize("shape", [{}, {"experts": 8, "top_k": 3}], ids=["dense", "experts"])
def test_a_missing_block_is_reported(shape):
    """Where one block does not run, the others end, and the status says what they waited for."""
    case = Case(small_table(**shape))
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

FORMS = {
    "w4a16_g128": (UnitForm(4, 32), WeightForm("int4", 128, "none", "fp16", True, True)),
    "w6e3m2a16": (UnitForm(6), WeightForm("fp6_e3m2", 0, "none", "fp16")),
    "w8a16": (UnitForm(8), WeightForm("int8", 0, "none", "fp16")),
    "16": (UnitForm(16), DENSE_FORM),
}
SHAPES = {
    "llama": (4096, 14336, AttentionShape(32, 8, 128, 128**-0.5, 128), 128256),
    "smollm2": (576, 1536, AttentionShape(9, 3, 64, 64**-0.5, 64), 49152),
    "qwen3 moe": (2048, 8 * 768, AttentionShape(32, 4, 128, 128**-0.5, 128), 151936),
    "mixtral": (4096, 2 * 14336, AttentionShape(32, 8, 128, 128**-0.5, 128), 32000),
}
EXPERTS_OF = {"qwen3 moe": (128, 8), "mixtral": (8, 2)}
"""Numbers of experts of a layer, and of a token."""


@functools.cache
def compiled(tokens, scheme="w4a16_g128", head="w8a16", dtype=torch.float16, shape="llama", layers=32):
    """The plan of a step on 132 SMs, and its machine code."""
    hidden, intermediate, attention, vocab = SHAPES[shape]
    units, forms = zip(*[*(FORMS[scheme],) * 4, FORMS[head]], strict=True)
    of_products = tuple((unit,) for unit in units)
    experts, top_k = EXPERTS_OF.get(shape, (0, 1))
    step = StepShape(
        layers, hidden, intermediate * (tokens if experts else 1), attention, tokens, of_products, vocab, experts=experts,
        top_k=top_k,
    )  # fmt: skip
    table = StepTable(step, 132)
    plan = StepPlan(table, tuple((form,) for form in forms), dtype, "silu", head_norms=shape == "qwen3 moe")
    call = (
        meta((layers + 1, len(step.fields)), torch.int64), meta((table.words,), torch.int32), meta((tokens, hidden), dtype),
        meta((9,), torch.int32), meta((vocab, hidden), torch.uint8), meta((vocab,), torch.float32), meta((9, 16), torch.int32),
        meta((9,), torch.int32), meta((tokens,), torch.int32), meta((1,), torch.int32), meta((tokens, vocab), dtype), 1e-5,
    )  # fmt: skip
    return plan, compile_plan(plan, call, 90)


@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        *((tokens, {}) for tokens in (1, 2, 4, 8)), (1, {"scheme": "16", "head": "16"}), (1, {"scheme": "w6e3m2a16"}),
        (1, {"shape": "smollm2", "scheme": "w8a16"}), (1, {"shape": "qwen3 moe"}), (4, {"shape": "qwen3 moe"}),
        (1, {"shape": "mixtral"}), (1, {"shape": "qwen3 moe", "scheme": "w8a16"}),
    ],
)  # fmt: skip
def test_machine_code(tokens, options):
    """All shared memory is one allocation at address 0 beside the state of roles; nothing is on the stack, or a few
    words at 8 tokens or of heads in groups of 8. A unit of 4 bits takes at most 100 instructions,
    with those of a wait that fails."""
    plan, kernel = compiled(tokens, **options)
    table = plan.table
    assert table.shared_bytes <= kernel.shared_bytes <= 227 << 10
    assert kernel.registers * 32 * (table.warps + LOADER_WARPS) <= 1 << 16
    assert kernel.stack_bytes <= (128 if tokens == 8 or table.shape.attention.group == 8 else 0)
    products = [(first, last) for first, last in kernel.loops if any("HMMA" in line for line in kernel.lines[first : last + 1])]
    innermost = [
        loop
        for loop in products
        if not any(other != loop and loop[0] <= other[0] and other[1] <= loop[1] for other in products)
    ]
    assert len(innermost) >= 6  # five products, and the tiles of attention
    spilled = [line for first, last in innermost for line in kernel.lines[first : last + 1] if re.search("LDL|STL", line)]
    assert len(spilled) <= (5 if tokens == 8 else 0)  # at 8 tokens Triton 3.6 spills in a loop of 2,580 instructions
    of_unit = []
    for first, last in innermost:
        lines = kernel.lines[first : last + 1]
        count = sum("HMMA" in line for line in lines)
        assert count % 8 == 0
        of_unit.append(len(lines) / (count // 8))
    assert min(of_unit) <= 100 or options


# ---- on a GPU

GPU_SHAPES = {
    "llama": {"hidden": 1024, "intermediate": 3584, "heads": 8, "kv_heads": 2, "head_dim": 128, "layers": 3},
    "qwen": {"hidden": 896, "intermediate": 1152, "heads": 14, "kv_heads": 2, "head_dim": 64, "layers": 2},
    "smollm2": {"hidden": 576, "intermediate": 1536, "heads": 9, "kv_heads": 3, "head_dim": 64, "layers": 3},
    "qwen3 moe": {
        "hidden": 2048, "intermediate": 8 * 768, "heads": 16, "kv_heads": 2, "head_dim": 128, "layers": 2, "experts": 16,
        "top_k": 8,
    },
    "mixtral": {
        "hidden": 1024, "intermediate": 2 * 1792, "heads": 8, "kv_heads": 2, "head_dim": 128, "layers": 2, "experts": 8,
        "top_k": 2,
    },
}  # fmt: skip


def gpu_case(name, tokens=1, schemes=None, windows=(), **options):
    schemes = schemes or alike("w4a16_g64" if name == "smollm2" else "w4a16_g128", "w8a16")
    hidden, intermediate, heads, kv_heads, dim, layers = (
        GPU_SHAPES[name][key] for key in ("hidden", "intermediate", "heads", "kv_heads", "head_dim", "layers")
    )
    attention = AttentionShape(heads, kv_heads, dim, dim**-0.5, dim, norm_eps=1e-6)
    vocab = 5008 if schemes[4] else 0
    experts, top_k = (GPU_SHAPES[name].get(key, default) for key, default in (("experts", 0), ("top_k", 1)))
    step = StepShape(
        layers, hidden, intermediate * (tokens if experts else 1), attention, tokens, forms_of_schemes(schemes), vocab,
        bool(windows), experts, top_k,
    )  # fmt: skip
    table = step_table(step, machine_of("cuda"))
    return remembered(Case(table, schemes, windows=windows, device="cuda", **options))


def on_a_gpu(case, largest):
    vectors = torch.full((case.table.words,), 0x7FC07FC0, dtype=torch.int32, device="cuda")
    x, squares = plan_of(case)(*arguments(case, vectors, case.layers))
    torch.cuda.synchronize()
    compare(case, x, squares, vectors, largest)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen", "smollm2"])
@pytest.mark.parametrize("contexts", [(0,), (1,), (129,), (1000,), (5, 700), (0, 127, 128, 2000)], ids=str)
def test_on_a_gpu(name, contexts):
    options = {"biases": ("qkv",), "head_norms": True} if name == "qwen" else {}
    on_a_gpu(gpu_case(name, len(contexts), contexts=contexts, **options), 2e-3)


GPU_FORMS = {
    "16": ("smollm2", {"schemes": alike("16", "16"), "embedding_bits": 8}),
    "w8a16": ("llama", {"schemes": alike("w8a16", "16")}),
    "w6": ("qwen", {"schemes": alike("w6e3m2a16_g64")}),
    "mixed layers": (
        "llama",
        {"schemes": (("w4a16_g64", "16"), ("w4a16_g64",), ("w8a16", "16", "w4a16_g64"), ("w4a16_g64",), ("w8a16",))},
    ),
    "windows and sinks": ("smollm2", {"windows": (300, 0, 700), "sinks": True}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_forms_on_a_gpu(name, dtype):
    shape, options = GPU_FORMS[name]
    on_a_gpu(gpu_case(shape, contexts=(900,), dtype=dtype, **options), 2e-3 if dtype == torch.float16 else 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), [(name, (torch.bfloat16, torch.float16)[i % 2]) for i, name in enumerate(FORMATS)])
def test_formats_on_a_gpu(name, dtype):
    """Two layers in each format, in the type of x that is not emulated."""
    case = gpu_case("qwen", contexts=(300,), schemes=alike(FORMATS[name]), dtype=dtype, biases=("qkv",))
    on_a_gpu(case, 2e-3 if dtype == torch.float16 else 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3 moe", "mixtral"])
@pytest.mark.parametrize(
    ("scheme", "dtype", "contexts"),
    [
        ("w4a16_g128", torch.float16, (700,)),
        ("w8a16", torch.bfloat16, (700,)),
        ("w6e3m2a16_g64", torch.float16, (700,)),
        ("w4a16_g128", torch.float16, (5, 900, 64, 0)),
    ],
    ids=str,
)
def test_experts_on_a_gpu(name, scheme, dtype, contexts):
    options = {"head_norms": True, "normalize": name == "mixtral"}
    case = gpu_case(name, len(contexts), schemes=alike(scheme, "w8a16"), contexts=contexts, dtype=dtype, **options)
    on_a_gpu(case, 2e-3 if dtype == torch.float16 else 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3 moe"])
def test_equal_bits_on_a_gpu(name):
    """10,000 launches give the same bits, also beside a stream that loads the memory. Each launch's vectors and logits are
    compared on the device."""
    launched = RepeatedLaunch(gpu_case(name, contexts=(1000,)))
    side, large = torch.cuda.Stream(), torch.zeros(1 << 28, dtype=torch.uint8, device="cuda")
    for i in range(10_000):
        if i % 10 == 5:
            with torch.cuda.stream(side):
                large.add_(1)
        launched()
    launched.check()


class RepeatedLaunch:
    """Launches a step again and again on the current stream, and counts the launches with other bits than the first one."""

    def __init__(self, case):
        self.case, self.plan, self.layers = case, plan_of(case), case.layers
        self.vectors = torch.zeros(case.table.words, dtype=torch.int32, device="cuda")
        self.first, self.different = None, torch.zeros((), dtype=torch.int64, device="cuda")

    def __call__(self):
        self.plan(*arguments(self.case, self.vectors, self.layers))
        results = self.vectors, self.case.logits.view(torch.int16)
        if self.first is None:
            self.first = [each.clone() for each in results]
        for found, first in zip(results, self.first, strict=True):
            self.different += (found != first).any()

    def check(self):
        assert int(self.case.status) == 0 and int(self.different) == 0
        assert not self.case.logits.isnan().any()


@pytest.mark.gpu
def test_two_launches_at_once_on_a_gpu():
    """Launches on two streams, each of which needs all SMs, end with the bits that they have alone: a cooperative launch does
    not start before all of its blocks fit. A third stream has small kernels."""
    both = [RepeatedLaunch(gpu_case(name, contexts=(1000,))) for name in ("llama", "smollm2")]
    for launched in both:  # compiles
        launched()
    torch.cuda.synchronize()
    streams, side = [torch.cuda.Stream() for _ in both], torch.cuda.Stream()
    small = torch.zeros(1 << 16, device="cuda")
    for _ in range(1000):
        for launched, stream in zip(both, streams, strict=True):
            with torch.cuda.stream(stream):
                launched()
        with torch.cuda.stream(side):
            small.add_(1)
    ended, until = [stream.record_event() for stream in streams], time.monotonic() + 60
    while not all(event.query() for event in ended):
        assert time.monotonic() < until, "two launches at once have not ended within 60 s"
    for launched in both:
        launched.check()
