"""The small-M kernel with norm, gate and residual epilogues, compiled without a GPU: registers and the order of loads."""

from __future__ import annotations

import re

import pytest
import torch

from lowbit.formats import number_format
from lowbit.hardware.arch import arch_for
from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose.fused_gemm import chain_candidates
from lowbit.kernels.choose.tiles import DENSE_BITS, GemmShape, RingTile
from lowbit.pack import DENSE_FORM, WeightForm
from tests.kernels.calls import meta, mixed_call
from tests.kernels.sass import batches, compile_plan

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.epilogue import Epilogue
from lowbit.kernels.sm80.small_m_gemm import RingPlan

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def epilogue_of(end, form, bias, parts=128, h_type="fp16"):
    """The Epilogue for `end`: "residual", "norm" or the name of a gate."""
    if end == "residual":
        return Epilogue(form.channel_scale, bias, h_type=h_type)
    return Epilogue(form.channel_scale, bias, parts, "none" if end == "norm" else end)


def epilogue_inputs(plan, end, half):
    """The epilogue's arguments of a call: squares, h, gamma, x_factor, 1 / width and eps."""
    if end == "residual":
        return (
            meta((plan.squares_parts, plan.shape.m), torch.float32),
            meta((plan.shape.m, plan.shape.n), half),
            meta((plan.shape.n,), half),
            1.0,
            None,
            None,
        )
    squares = meta((plan.config.epilogue.norm_parts, plan.shape.m), torch.float32)
    return squares, None, None, 1.0, 1.0 / plan.shape.k, 1e-5


def ring_of(role, shape, machine):
    """The first feasible tile of the small-M kernel."""
    rows = chain_candidates(role, shape, machine)
    return next(row.tile for row in rows if not row.reasons and isinstance(row.tile, RingTile))


def compiled(
    end, fmt="int4", m=1, n=4096, k=4096, group=128, zero="none", dtype="fp16", bias=False, parts=128, tile=None, sm=90
):
    """(plan, kernel) of a GEMM with the epilogue `end`: "residual", "norm" or the name of a gate."""
    shape, half = GemmShape(m, n, k, number_format(fmt).bits), HALVES[dtype]
    role = end if end in ("residual", "norm") else "gated"
    tile = ring_of(role, shape, typical_machine(sm)) if tile is None else tile
    form, arch = WeightForm(fmt, group, zero, "fp16"), arch_for(sm)
    x, codes, scale, channel, of_bias, sums, arrived = mixed_call(shape, half, group, torch.float16)
    plan = RingPlan(shape, tile, form, half, epilogue_of(end, form, bias, parts, dtype), arch)
    product = x, codes, scale, channel if form.channel_scale else None, of_bias if bias else None, sums, arrived
    call = *product, *epilogue_inputs(plan, end, half)
    return plan, compile_plan(plan, call, sm, ("x", "w", "scale"))


LLAMA = [
    ("norm", 6144, 4096),
    ("residual", 4096, 4096),
    ("silu", 28672, 4096),
    ("residual", 4096, 14336),
    ("norm", 128256, 4096),
]


def main_loop(kernel):
    """First and last line of the main loop. If all of K is one iteration, the first and the last line with a product."""
    found = [i for i, line in enumerate(kernel.lines) if "HMMA" in line]
    loops = [loop for loop in kernel.loops if any(loop[0] <= i <= loop[1] for i in found)]
    return max(loops, key=lambda loop: loop[1] - loop[0]) if loops else (found[0], found[-1])


def check(plan, kernel, end, of_rows, parts, stack_bytes=0):
    """The main loop uses no local memory, and the epilogue's loads are early. `of_rows` tensors (scales, bias, gamma) are
    loaded before the wait for the previous kernel; h or squares after it, before the loop. No load is in the loop or after it.

    With split-K, the last block loads the partial sums and h after the loop. ptxas may spill a few words of the epilogue before
    the loop to keep more blocks per SM (`stack_bytes`).
    """
    tile, config = plan.tile, plan.config
    first, last = main_loop(kernel)
    assert not re.search(r"\b(LDL|STL)\b", " ".join(kernel.lines[first : last + 1])), "registers spilled in the main loop"
    # ptxas may reserve a stack that the kernel does not use
    used = kernel.stack_bytes if kernel.count("LDL") or kernel.count("STL") else 0
    assert used <= stack_bytes, "registers spilled"
    wait = next(i for i, line in enumerate(kernel.lines) if "ACQBULK" in line)
    copies = [i for i, line in enumerate(kernel.lines) if "LDGSTS" in line]
    assert copies[0] < wait < copies[-1], "copies of weights, wait, copies of x"
    cleared = 4 * max(1, tile.depth // tile.row_blocks) if tile.tokens == 8 else 0
    assert kernel.ptx.count("@absent st.shared") == cleared, "places of no token are cleared once, of 16 tokens by every copy"
    stores = [i for i, line in enumerate(kernel.lines) if re.search(r"\b(STG|ATOMG|RED)\b", line)]
    assert min(stores) > last
    loads = [i for i, line in enumerate(kernel.lines) if re.search(r"\bLDG\b", line)]
    rows = len({config.first_of_row(i) for i in range(config.outputs)})
    squares = -(-parts // 8) * tile.tokens // 4
    of_others = config.outputs if end == "residual" else squares
    h_early = tile.splits == 1
    assert config.rows_early
    assert sum(i < wait for i in loads) == of_rows * rows
    assert sum(wait < i < first for i in loads) == (of_others if h_early or end != "residual" else 0)
    assert not [i for i in loads if first <= i <= last], "loads sank into the loop"
    assert h_early == (not [i for i in loads if i > last])


@pytest.mark.parametrize("cases", batches([(*case, m) for case in LLAMA for m in (1, 16)], 3))
def test_llama_3_8b(cases):
    made = []
    for end, n, k, m in cases:
        head = n > 100000
        made.append((end, head, *compiled(end, "int8" if head else "int4", m, n, k, group=0 if head else 128)))
    for end, head, plan, kernel in made:
        tile = plan.tile
        check(plan, kernel, end, head + (end == "residual"), 128)
        assert kernel.count("HMMA.16816") == 2 * tile.row_blocks * tile.rounds * 8 * (tile.tokens // 8)
        if tile.blocks_per_sm == 1:
            assert 2 * (kernel.shared_bytes + 1024) > arch_for(90).shared_per_sm_bytes >= kernel.shared_bytes + 1024


FORMATS = [
    ("int4", 64, "none", "bf16"), ("int4", 0, "none", "fp16"), ("uint4", 128, "integer", "fp16"),
    ("uint4", 64, "float", "bf16"),
    ("fp6_e3m2", 0, "none", "fp16"), ("int8", 128, "none", "fp16"), ("int5", 64, "none", "fp16"), ("int3", 128, "none", "bf16"),
]  # fmt: skip


MODELS = {"residual": (896, 4864), "norm": (1152, 896), "gelu_tanh": (9728, 896)}
"""(N, K) for each epilogue, from a narrow model, with a tail of K."""


@pytest.mark.parametrize(
    "cases",
    # The epilogue does not depend on codes. 13 tokens need the most registers, and gates more than other epilogues: 155 to 182
    # (residual 95 to 146, norm 70 to 118). So every format runs with a gate, and the other epilogues with the formats of most
    # registers and with channel scales. 4 tokens take at most 106.
    batches([
        *((*case, 13, "gelu_tanh") for case in FORMATS),
        *((*FORMATS[i], 13, end) for end, i in (("residual", 1), ("residual", 3), ("norm", 1), ("norm", 3))),
        *((*FORMATS[i], 4, end) for end, i in (("residual", 3), ("gelu_tanh", 3), ("norm", 4))),
    ]),
)  # fmt: skip
def test_formats(cases):
    made = [
        (end, group, *compiled(end, fmt, m, *MODELS[end], group, zero, dtype, bias=True, parts=56))
        for fmt, group, zero, dtype, m, end in cases
    ]
    for end, group, plan, kernel in made:
        check(plan, kernel, end, 1 + (group == 0) + (end == "residual"), 56, stack_bytes=32)


@pytest.mark.parametrize(
    ("tile", "end"),
    # Each tile runs with the epilogue that takes most registers. Only a residual loads h after the partial sums: two tiles.
    [
        (RingTile(8, 3, 1, 2, 4, 2), "residual"), (RingTile(16, 5, 1, 1, 8, 2), "residual"),
        (RingTile(16, 5, 1, 1, 8, 2), "silu"), (RingTile(16, 8, 1, 1, 8, 4), "norm"),
    ],
    ids=str,
)  # fmt: skip
def test_splits(tile, end):
    """With split-K the last block computes the epilogue. With 3 or 5 row blocks for 4 or 8 warps, some warps finish no
    output.
    """
    plan, kernel = compiled(end, "int4", tile.tokens, 4096, 4096, tile=tile, bias=True)
    check(plan, kernel, end, 1 + (end == "residual"), 128, stack_bytes=32)
    assert kernel.count("ATOMG") == 1


def compiled_rows(end, m, n, k, dtype="fp16", bias=False, tile=None, sm=90):
    """(plan, kernel) of a GEMM with the 16-bit weight of an nn.Linear."""
    shape, half, arch = GemmShape(m, n, k, DENSE_BITS), HALVES[dtype], arch_for(sm)
    role = end if end in ("residual", "norm") else "gated"
    tile = ring_of(role, shape, typical_machine(sm)) if tile is None else tile
    x, w, added = meta((m, k), half), (meta((n, k), half), None, None), meta((n,), half) if bias else None
    room = meta((1,), torch.float32), meta((1,), torch.int32)
    plan = RingPlan(shape, tile, DENSE_FORM, half, epilogue_of(end, DENSE_FORM, bias, h_type=dtype), arch)
    call = x, *w, added, *room, *epilogue_inputs(plan, end, half)
    return plan, compile_plan(plan, call, sm, ("x", "w", "scale"))


# fp16 and bf16 take equally many registers.
@pytest.mark.parametrize("cases", batches([(*case, *of) for case in LLAMA for of in ((1, "fp16"), (16, "bf16"))], 3))
def test_rows_of_16_bits(cases):
    """16-bit weights are copied once and not converted: for 16 rows and 128 elements of K, a lane does 8 copies and 8 reads of
    16 bytes.
    """
    for each in [(end, *compiled_rows(end, m, n, k, dtype)) for end, n, k, m, dtype in cases]:
        check_rows(*each)


def check_rows(end, plan, kernel):
    tile = plan.tile
    check(plan, kernel, end, int(end == "residual"), 128)
    steps = 2 * tile.row_blocks * tile.rounds  # the loop and its last iteration, which starts no copies
    assert kernel.count("HMMA.16816") == steps * 8 * (tile.tokens // 8)
    of_x = 2 * tile.rounds * tile.tokens // 2
    assert kernel.count("LDSM.16.M88.4") == steps * 8 + of_x
    first, last = main_loop(kernel)
    assert not re.search(r"\b(HFMA2|HADD2|PRMT)\b", " ".join(kernel.lines[first : last + 1])), "nothing is converted"
    assert kernel.registers <= (168 if tile.tokens == 8 else 255)


@pytest.mark.parametrize(
    "tile", [RingTile(8, 8, 1, 2, 4, 1, 1, 4), RingTile(16, 6, 1, 1, 8, 2, 0, 2), RingTile(8, 3, 2, 1, 4, 1, 0, 1)], ids=str
)
def test_rows_with_fewer_slots_than_row_blocks(tile):
    """Fewer slots than row blocks, with absent rows and a tail of K."""
    cases = ("residual", 4099, 4104), ("silu", 9728, 896)
    for plan, kernel in [compiled_rows(end, tile.tokens, n, k, bias=True, tile=tile) for end, n, k in cases]:
        first, last = main_loop(kernel)
        assert not re.search(r"\b(LDL|STL)\b", " ".join(kernel.lines[first : last + 1])) and kernel.stack_bytes <= 40
        assert plan.tile.depth == (tile.slots or tile.row_blocks * tile.rounds)
        waits = {int(found) for found in re.findall(r"cp\.async\.wait_group (\d+)", kernel.ptx)}
        assert waits == set(range(tile.depth)), "never more under way than slots, at the end fewer and fewer"


# 8 tokens take 94 to 128 registers, 16 take 168 to 178
@pytest.mark.parametrize(("sm", "m"), [(80, 8), (80, 16), (89, 16), (120, 16)])
def test_rows_on_every_machine(sm, m):
    _, kernel = compiled_rows("residual", m, 4096, 4096, sm=sm)
    assert kernel.stack_bytes == 0 and kernel.shared_bytes <= arch_for(sm).shared_per_block_bytes


def test_most_parts():
    for each in [compiled("norm", m=m, n=10240, k=8192, parts=256) for m in (8, 16)]:
        check(*each, "norm", 0, 256)


@pytest.mark.parametrize(
    ("end", "sm"),
    # Two tiles are chosen: one by sm_80, 89 and 120, the other by sm_86. Every machine and, for both tiles, every epilogue
    # runs.
    [("residual", 80), ("norm", 89), ("silu", 120), ("residual", 86), ("norm", 86), ("silu", 86)],
)
def test_every_machine(end, sm):
    _, kernel = compiled(end, m=8, sm=sm)
    assert kernel.stack_bytes == 0 and kernel.shared_bytes <= arch_for(sm).shared_per_block_bytes
    assert (kernel.count("ACQBULK") > 0) == (sm >= 90)


def test_arguments_arrive_under_their_names():
    """The operators pass 25 positional values; each must arrive in the kernel parameter of its name."""
    shape, tile, form = GemmShape(3, 64, 256, 4), RingTile(8, 1, 1, 1, 8, 1), WeightForm("int4", 128, "none", "fp16", True)
    half, float32 = torch.float16, torch.float32
    x, h, gamma, bias = (meta(size, half) for size in ((3, 256), (3, 64), (64,), (64,)))
    weight, squares = (meta((4, 4, 128), torch.int32), meta((4, 2, 8, 2), half), meta((64,), float32)), meta((5, 3), float32)
    room = meta((1,), float32), meta((1,), torch.int32)
    for end in ("norm", "residual"):
        epilogue = epilogue_of("silu" if end == "norm" else end, form, True, 5)
        plan = RingPlan(shape, tile, form, half, epilogue, arch_for(90))
        noted, names = [], [param.name for param in plan.launch.function.params]
        plan.launch = lambda *arguments, noted=noted: noted.append(arguments)
        if end == "norm":
            y = plan(x, *weight, bias, *room, squares, None, None, 0.25, 1 / 128, 1e-5)
            own = {"y": y, "squares": squares, "h": None, "gamma": None, "inverse_width": 1 / 128, "eps": 1e-5}
            assert y.shape == (3, 32)
        else:
            following = plan(x, *weight, bias, *room, squares, h, gamma, 0.25)
            own = {"y": following, "squares": squares, "h": h, "gamma": gamma, "inverse_width": None, "eps": None}
            assert following.shape == (3, 64) and plan.squares_parts == 4
        given = dict(zip(names, noted[0], strict=True))
        own |= {"x": x, "w": weight[0], "scale": weight[1], "channel_scale": weight[2], "bias": bias, "x_factor": 0.25}
        own |= {"partial": room[0], "arrived": room[1], "C": plan.config, "factor": plan.factor}
        own |= dict.fromkeys(("t", "b", "adapter_of"))  # no adapters
        assert all(given[name] is value or given[name] == value for name, value in own.items())
        sizes = {"M": 3, "N": 64, "K": 256, "x_stride": 256, "row_blocks": 4, "tiles": 4, "scale_stride": 32, "iterations": 1}
        assert {name: given[name] for name in sizes} == sizes and set(given) == set(own) | set(sizes)
