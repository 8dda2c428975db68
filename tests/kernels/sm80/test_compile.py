"""The small-M kernel compiled without a GPU, and checks of its machine code."""

from __future__ import annotations

import re

import pytest
import torch

from lowbit.formats import number_format
from lowbit.hardware.arch import arch_for
from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose.gemm import candidates
from lowbit.kernels.choose.tiles import GemmShape, RingTile
from lowbit.pack import WeightForm
from tests.kernels.calls import mixed_call
from tests.kernels.sass import batches, compile_plan

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.epilogue import Epilogue
from lowbit.kernels.sm80.small_m_gemm import RingPlan

FORMATS = ["int2", "int3", "int4", "int5", "int7", "int8", "fp6_e3m2", "fp4_e2m1", "fp8_e4m3"]


def compiled(fmt, dtype="fp16", m=1, group=128, zero="none", k=8192, n=8192, bias=False, sm=90):
    shape = GemmShape(m, n, k, number_format(fmt).bits)
    tile = next(
        row.tile for row in candidates(shape, typical_machine(90)) if isinstance(row.tile, RingTile) and not row.reasons
    )
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    # Symmetric integers of 2 to 7 bits with group scales also have a power of two per channel (pack/weight.py).
    twice = fmt in ("int2", "int3", "int4", "int5", "int6", "int7")
    form = WeightForm(fmt, group, zero, "fp16", twice, twice)
    plan = RingPlan(shape, tile, form, half, Epilogue(form.channel_scale, bias), arch_for(sm))
    return tile, compile_plan(plan, mixed_call(shape, half, group, torch.float16), sm, ("x", "w", "scale"))


@pytest.mark.parametrize(
    "cases",
    # With 16 tokens, a warp holds twice the rows of w and x and uses 170 registers or more, so all formats run. Formats of 5 or
    # 6 bits load alike, so one of each width suffices. With one token, kernels use 74 to 121 registers and spills are unlikely,
    # so three formats with very different loads suffice.
    batches([*((16, fmt) for fmt in FORMATS), *((1, fmt) for fmt in ("int4", "int7", "int8"))]),
)
def test_main_loop(cases):
    made = [(m, fmt, *compiled(fmt, m=m)) for m, fmt in cases]
    for each in made:
        check_main_loop(*each)


def check_main_loop(m, fmt, tile, kernel):
    assert kernel.count("LDL") == 0 and kernel.count("STL") == 0 and kernel.stack_bytes == 0, "registers spilled"
    # The loop body exists twice, since the last iteration starts no copies. Each row block and round has 8 products per 8
    # tokens.
    assert kernel.count("HMMA.16816") == 2 * tile.row_blocks * tile.rounds * 8 * (tile.tokens // 8)
    assert kernel.count("LDSM.16.M88.4") > 0 and kernel.count("LDGSTS") > 0
    if number_format(fmt).bits >= 4:
        assert kernel.opcodes["LDS.128"] > 0, "codes are read in 128-bit pieces"
    assert kernel.count("ACQBULK") > 0, "waits for the kernel before (programmatic dependent launch)"
    if m == 16:
        (first, last) = max(kernel.loops, key=lambda loop: loop[1] - loop[0])
        branches = [line for line in kernel.lines[first : last + 1] if re.search(r"\b(BRA|BSSY)\b", line)]
        assert len(branches) == 1, "one iteration is one stretch of code: copies that a branch skips cost 5 %"


def test_what_belongs_to_rows_is_on_its_way_before_the_main_loop():
    tile, kernel = compiled("int4", m=16, bias=True)
    assert tile.splits > 1
    loads = [i for i, line in enumerate(kernel.lines) if re.search(r"\bLDG\b", line)]
    (first, last) = max(kernel.loops, key=lambda loop: loop[1] - loop[0])
    assert sum(i < first for i in loads) == 4, "scales and biases of the two rows of a thread's sums"
    assert sum(i > last for i in loads) == 8 * tile.splits, "sums of all splits, and nothing else"


@pytest.mark.parametrize(
    ("sm", "dtype"),
    # bf16 has add and multiply instructions from sm_90 on, so it is compiled for a machine before and for one after. sm_86 is
    # left out: its instructions are those of 80 and 89.
    [(80, "fp16"), (80, "bf16"), (89, "fp16"), (90, "fp16"), (100, "fp16"), (120, "bf16")],
)
def test_every_machine(sm, dtype):
    _, kernel = compiled("int4", dtype, m=16, sm=sm)
    assert kernel.count("HMMA.16816") > 0 and kernel.stack_bytes == 0
    assert kernel.shared_bytes <= typical_machine(sm).arch.shared_per_block_bytes or sm in (89, 120)


@pytest.mark.parametrize(
    ("zero", "group", "dtype"),
    [("integer", 32, "fp16"), ("integer", 128, "bf16"), ("float", 64, "fp16"), ("float", 16, "bf16")],
)
def test_zero_points_and_groups(zero, group, dtype):
    _, kernel = compiled("uint4", dtype, m=8, group=group, zero=zero, k=4096, bias=True)
    assert kernel.stack_bytes == 0


def test_decoding_keeps_its_budget():
    """int4, one token: 5 integer and 4 half-precision instructions dequantize 8 codes. The rest of the loop has fewer
    instructions.
    """
    tile, kernel = compiled("int4", m=1)
    codes = 2 * tile.row_blocks * tile.rounds * 64  # per lane, in both copies of the loop body
    half = kernel.count("HADD2") + kernel.count("HFMA2")
    integer = kernel.count("LOP3") + kernel.count("SHF")
    assert codes / 2 <= half < 1.25 * codes / 2
    assert 0.625 * codes <= integer < 1.25 * codes
