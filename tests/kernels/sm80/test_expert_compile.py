"""The expert kernels compiled without a GPU, and checks of their machine code."""

from __future__ import annotations

import re

import pytest
import torch

from lowbit.formats import number_format
from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose.experts import ExpertShape, choose, most_slots, ring_bytes, ring_candidate
from lowbit.kernels.choose.tiles import MmaTile, RingTile
from lowbit.pack import WeightForm
from tests.kernels.calls import expert_call
from tests.kernels.sass import batches, compile_plan

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.epilogue import Epilogue
from lowbit.kernels.sm80.expert_large_m_gemm import ExpertMmaPlan
from lowbit.kernels.sm80.expert_small_m_gemm import ExpertRingPlan
from tests.kernels.sm80.test_large_m_compile import check_loop

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
FORMATS = [("int2", 1), ("int3", 1), ("fp6_e3m2", 1), ("int8", 64)]
"""(format, tokens) for formats whose words are loaded in different ways. The other formats are in LARGEST."""


def compiled(
    fmt, tokens=1, dtype="fp16", group=128, zero="none", gate="none", bias=False, weighted=False, early=False, sm=90, tile=None,
):  # fmt: skip
    """(tile, kernel) for Qwen3-30B-A3B: the gate and up projection with a gate, else the down projection."""
    number, gated = number_format(fmt), gate != "none"
    rows = tile.tokens if tile else 8 if tokens <= 16 else 16
    n, k = (1536, 2048) if gated else (2048, 768)
    shape = ExpertShape(tokens, 8, 128, n, k, number.bits, rows, per_slot=not gated)
    machine = typical_machine(sm)
    tile = tile or choose(shape, typical_machine(90))
    twice = fmt in ("int2", "int3", "int4", "int5", "int6", "int7") and group > 0
    form = WeightForm(fmt, group, zero, "fp16", twice, twice)
    epilogue = Epilogue(form.channel_scale, bias, gate=gate)
    plan = ExpertRingPlan(shape, tile, form, HALVES[dtype], epilogue, machine, weighted=weighted, early=early)
    x, codes, scale, channel, biases, *routing, weights = expert_call(shape, HALVES[dtype], form)
    given = channel if form.channel_scale else None, biases if bias else None, *routing, weights if weighted else None
    return tile, compile_plan(plan, (x, codes, scale, *given), sm)


def check(tile, kernel, sums=0):
    """Nothing spills. With 16 tokens and more than 4 row blocks, spills are allowed outside the main loop. Both copies of the
    loop body have all products, plus `sums` for sums of x. Copies and waits are for single slots."""
    if tile.tokens == 16 and tile.row_blocks > 4:
        products = [i for i, line in enumerate(kernel.lines) if "HMMA.16816" in line]
        loop = kernel.lines[products[0] : products[len(products) // 2 - 1]]
        assert not any(re.search(r"\b(LDL|STL)\b", line) for line in loop), "registers spilled in the main loop"
    else:
        assert kernel.count("LDL") == 0 and kernel.count("STL") == 0 and kernel.stack_bytes == 0, "registers spilled"
    iteration = tile.row_blocks * tile.rounds
    assert kernel.count("HMMA.16816") == 2 * (iteration * 8 + sums) * (tile.tokens // 8)
    assert kernel.count("LDGDEPBAR") == 3 * iteration, "start of the first task, and both iterations"
    assert kernel.count("LDSM.16.M88.4") > 0 and kernel.count("LDGSTS") > 0
    check_products_between_waits(tile, kernel)


def check_products_between_waits(tile, kernel):
    """In the second copy of the loop body, the wait for slot i follows the products of at least the first i - 1 slots."""
    lines = [line for line in kernel.lines if re.search(r"HMMA|DEPBAR\.LE SB0", line)]
    waits = [i for i, line in enumerate(lines) if "DEPBAR" in line]
    products = (len(lines) - len(waits)) // 2
    before = [at - i - products for i, at in enumerate(waits)][-tile.row_blocks * tile.rounds :]
    assert all(count >= 8 * (i - 1) for i, count in enumerate(before)), f"{tile}: products before each wait: {before}"


def test_every_format():
    made = [
        compiled(fmt, tokens, group=0 if fmt.startswith("fp") else 128, gate="silu" if i % 2 else "none", weighted=not i % 2)
        for i, (fmt, tokens) in enumerate(FORMATS)
    ]
    for each in made:
        check(*each)


SIXTEEN = RingTile(16, 4, 1, 1, 8, 1)


@pytest.mark.parametrize("sm", [80, 90, 120])
def test_every_machine(sm):
    """Before sm_90 there are no bf16 add and multiply instructions and no programmatic dependent launch."""
    cases = [
        compiled("int4", dtype="bf16", gate="clamped_swiglu", bias=True, sm=sm, tile=RingTile(8, 6, 1, 1, 8, 1)),
        compiled("int4", dtype="fp16", weighted=True, early=True, sm=sm, tile=SIXTEEN),
    ]
    for tile, kernel in cases:
        check(tile, kernel)
        assert kernel.count("ACQBULK") == (1 if sm >= 90 else 0)


LARGEST = [
    (RingTile(16, 3, 2, 4, 2, 1), "uint4", "integer", 16), (RingTile(16, 4, 1, 4, 2, 1), "uint4", "float", 32),
    (RingTile(16, 4, 1, 2, 4, 1), "int5", "none", 32), (RingTile(8, 6, 2, 4, 2, 1), "uint4", "float", 16),
    (RingTile(16, 8, 1, 4, 2, 1), "uint4", "float", 16), (RingTile(16, 6, 1, 1, 8, 1), "int4", "none", 128),
    (RingTile(8, 8, 1, 8, 1, 1), "uint8", "integer", 16), (RingTile(8, 4, 1, 8, 1, 1), "int7", "none", 16),
]  # fmt: skip
"""The tiles with most slots and the formats that take most registers."""


@pytest.mark.parametrize("cases", batches(LARGEST, 3))
def test_the_largest_tiles(cases):
    for tile, fmt, zero, group in cases:
        tile, kernel = compiled(fmt, 1, "bf16", group, zero, gate="silu", bias=True, tile=tile)
        assert tile.depth <= most_slots(tile.tokens, number_format(fmt).bits, tile.row_blocks), "a tile that can be chosen"
        shape = ExpertShape(1, 8, 128, 1536, 2048, number_format(fmt).bits, tile.tokens)
        assert not ring_candidate(tile, shape, typical_machine(90)).reasons, "a tile that fits"
        assert kernel.shared_bytes <= ring_bytes(tile, shape), "no more than the choice counts with"
        check(tile, kernel, sums=0 if zero == "none" else 8 * tile.rounds)


def test_the_first_loads_are_on_their_way_early():
    """Weight copies start before slots are loaded, and slots and x are loaded before the first wait for a copy. Only stores
    follow a task's products. With `early`, weight copies start before the wait for the previous kernel.
    """
    tile, kernel = compiled("int4", gate="silu", tile=RingTile(8, 6, 1, 1, 8, 1))
    lines = kernel.lines

    def places(name):
        return [i for i, line in enumerate(lines) if re.search(name, line)]

    copies, x_loads, waits = places(r"LDGSTS\.E\.BYPASS"), places(r"LDG\.E\.128"), places(r"DEPBAR\.LE SB0")
    slots = [i for i in places(r"LDG\.E\.STRONG") if i > copies[0]]
    assert places("ACQBULK")[0] < copies[0] < slots[0] < x_loads[0] < x_loads[-1] < waits[0]
    assert len(x_loads) == 4 * tile.rounds
    barriers, products = places(r"BAR\.SYNC"), places("HMMA")
    assert max(places(r"LDG\.")) < barriers[0] and products[-1] < barriers[0], "no load is exposed behind the sums"
    later = [i for i in places(r"LDG\.E\.STRONG") if waits[0] < i < barriers[0]]
    assert sum(i < products[0] for i in later) >= 3, "the tile two tasks on, before the products"
    _, kernel = compiled("int4", gate="silu", early=True, tile=RingTile(8, 6, 1, 1, 8, 1))
    early = kernel.lines[: next(i for i, line in enumerate(kernel.lines) if "ACQBULK" in line)]
    assert sum("LDGSTS" in line for line in early) == 3 * tile.row_blocks * tile.rounds


# ---- many rows


def compiled_many(fmt, tile, dtype="fp16", group=128, zero="none", gate="none", sm=90):
    number, gated = number_format(fmt), gate != "none"
    shape = ExpertShape(1024, 8, 128, 1536, 2048, number.bits, tile.tokens, per_slot=not gated)
    twice = fmt in ("int2", "int3", "int4", "int5", "int6", "int7") and group > 0
    form = WeightForm(fmt, group, zero, "fp16", twice, twice)
    epilogue = Epilogue(form.channel_scale, True, gate=gate)
    plan = ExpertMmaPlan(shape, tile, form, HALVES[dtype], epilogue, weighted=not gated)
    return tile, compile_plan(plan, expert_call(shape, HALVES[dtype], form), sm)


MANY = [MmaTile(64, 2, 8, 1, 4, 1), MmaTile(128, 2, 4, 2, 4, 1), MmaTile(64, 1, 4, 2, 4, 1), MmaTile(128, 1, 4, 2, 4, 1)]


def check_many(tile, kernel):
    assert kernel.stack_bytes <= 32
    check_loop(tile, kernel)
    assert kernel.count("STG.E.128") > 0 and kernel.count("STG.E.U16") == 0, "8 channels at a time"


def test_tiles_of_many_rows():
    for i, tile in enumerate(MANY):
        check_many(*compiled_many("int4", tile, gate=("silu", "none")[i % 2], sm=(80, 90)[i % 2]))


def test_formats_of_many_rows():
    check_many(*compiled_many("uint4", MANY[0], "bf16", 32, "integer", gate="clamped_swiglu", sm=120))
    check_many(*compiled_many("fp6_e3m2", MANY[1], "bf16", 0, gate="silu"))
