"""The wgmma kernel compiled for sm_90a, and checks of its machine code."""

from __future__ import annotations

import re

import pytest
import torch

from lowbit.formats import IntFormat, number_format
from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose.gemm import choose
from lowbit.kernels.choose.tiles import GemmShape, WgmmaTile
from lowbit.pack import WeightForm
from tests.kernels.calls import mixed_call
from tests.kernels.sass import batches, compile_plan

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.epilogue import Epilogue
from lowbit.kernels.sm90.large_m_gemm import WgmmaGemm, WgmmaPlan

PRODUCT = re.compile(r"[HIQ]GMMA\S* R\d+, R(\d+),")
"""Matches a wgmma of fp16, int8 or fp8; the group is the first register of operand A."""

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}

FORMATS = ["int2", "int3", "int4", "int5", "int6", "int7", "int8", "fp6_e3m2", "fp6_e2m3", "fp5_e2m2", "fp4_e2m1", "fp8_e4m3"]


def compiled(
    fmt, dtype="fp16", m=4096, group=128, zero="none", scale_dtype="fp16", bias=False, n=8192, k=8192, scaled_twice=False,
    subnormal=False, tile=None,
):  # fmt: skip
    shape, machine = GemmShape(m, n, k, number_format(fmt).bits), typical_machine(90)
    tile = tile or choose(shape, machine)
    assert isinstance(tile, WgmmaTile)
    form = WeightForm(fmt, group, zero, scale_dtype, scaled_twice or subnormal, subnormal)
    plan = WgmmaPlan(shape, tile, form, HALVES[dtype], Epilogue(form.channel_scale, bias), machine.sm_count)
    x, codes, scale, channel, *rest = mixed_call(shape, HALVES[dtype], group, HALVES[scale_dtype])
    call = x, codes, scale, channel.to(torch.bfloat16) if subnormal else channel, *rest
    return plan.config, compile_plan(plan, call, 90, ("y", "scale", "partial"))


def registers_written(line: str) -> set[int]:
    """The numbers of the registers that an instruction writes; the opcode gives the width."""
    match = re.match(r"(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)\s+R(\d+)\b", line)
    if match is None or match[1].startswith(("ST", "RED", "SYNCS", "UTMA", "BAR", "R2UR", "HGMMA", "QGMMA", "IGMMA")):
        return set()
    width = 4 if ".128" in match[1] or match[1].endswith(".4") else 2 if ".64" in match[1] or "WIDE" in match[1] else 1
    return set(range(int(match[2]), int(match[2]) + width))


def main_loop(lines: list[str]) -> list[str]:
    """The lines of the main loop, from the wait for an iteration's first stage to the backward branch."""
    products = [i for i, line in enumerate(lines) if PRODUCT.search(line)]
    waited = next(i for i in range(products[-1], len(lines)) if "WARPGROUP.DEPBAR" in lines[i])
    end = next(i for i in range(waited, len(lines)) if "BRA" in lines[i])
    return lines[max(i for i in range(products[0]) if "PHASECHK" in lines[i]) : end + 1]


def check_operands_in_flight(lines: list[str]) -> None:
    """Asserts that no instruction writes a register of operand A before the products that read it have been waited for.

    Checks two iterations in a row, so that products still in flight at the loop's end are checked against its beginning.
    """
    check_straight_line(main_loop(lines) * 2)


def check_straight_line(lines: list[str]) -> None:
    """Asserts that no line writes a register of operand A of a product in flight."""
    groups: list[set[int]] = []
    current: set[int] = set()
    for line in lines:
        busy = set().union(current, *groups)
        assert not busy & registers_written(line), f"{line} writes operand A of a product under way"
        if PRODUCT.search(line):
            first = int(PRODUCT.search(line)[1])
            current |= set(range(first, first + 4))
            if "gsb0" in line:
                groups.append(current)
                current = set()
        waited = re.search(r"WARPGROUP.DEPBAR.LE gsb0, 0x(\w+)", line)
        if waited:
            groups = groups[len(groups) - int(waited[1], 16) :] if int(waited[1], 16) else []


def check_barriers(config, kernel) -> None:
    """Asserts that the PTX in this package and Triton's own operations use the same barrier addresses, that is, that the
    allocation is at offset 0."""
    # the waits of Triton's own operations: for the loader and for h
    waits = re.findall(r"mbarrier\.try_wait\S* complete, \[(%r\d+)\]", kernel.ptx)
    found = {int(at) for wait in waits for at in re.findall(rf"add\.s32\s+{wait}, %r\d+, (\d+);", kernel.ptx)}
    expected = {config.barriers.start + 8 * config.stages}
    if isinstance(config, WgmmaGemm) and config.epilogue.residual:
        expected.add(1024 * config.regions.start("h_there"))
    assert found == expected


@pytest.mark.parametrize(
    "cases",
    batches([
        # Dequantization is the same code in every tile. With 64 tokens four warpgroups share an SM, which leaves it the fewest
        # registers, so every format runs there. Beside the accumulators of 256 tokens it also has few: one format per number of
        # bits runs. Other tiles run two formats for each of the most different ways to load: one plane of 2 words, one of 4,
        # three planes, two vectors of 4.
        *(("fp16", 64, 28672, fmt) for fmt in FORMATS),
        *(("bf16", 4096, 8192, fmt) for fmt in ("int2", "int3", "int4", "fp5_e2m2", "fp6_e3m2", "int7", "fp8_e4m3")),
        *(
            (dtype, m, 8192, fmt)
            for dtype, m, formats in (("fp16", 32, "int2 fp7_e3m3"), ("bf16", 64, "int4 int8"), ("fp16", 256, "fp7_e3m3 int8"))
            for fmt in formats.split()
        ),
    ]),
)  # fmt: skip
def test_main_loop(cases):
    made = []
    for dtype, m, n, fmt in cases:
        number = number_format(fmt)  # integer codes as pack/weight.py packs them
        made.append((fmt, *compiled(fmt, dtype, m, n=n, subnormal=isinstance(number, IntFormat) and number.bits < 8)))
    for each in made:
        check_main_loop(*each)


def check_main_loop(fmt, config, kernel):
    # Some kernels keep one or two values of the epilogue in local memory during the loop.
    assert kernel.stack_bytes <= 32
    assert not any("LDL" in line or "STL" in line for line in main_loop(kernel.lines)), "registers spilled"
    products = [line for line in kernel.lines if "HGMMA" in line]
    assert len(products) == 8, "two stages of 64 k, four products each"
    assert all(re.search(r"HGMMA\S* R\d+, R\d+, gdesc", line) for line in products), "operand A comes from registers"
    # In some kernels ptxas serializes wgmma (remark C7510 and similar). They wait after every product.
    assert kernel.count("WARPGROUP.DEPBAR") == 3, "a wait for each stage and one at the end"
    check_operands_in_flight(kernel.lines)
    check_barriers(config, kernel)
    if number_format(fmt).bits >= 4:
        assert kernel.opcodes["LDS.128"] >= 2
    assert kernel.count("UTMALDG") > 0


@pytest.mark.parametrize(
    ("fmt", "dtype", "zero", "tile"),
    [
        ("int4", "fp16", "none", WgmmaTile(128, 2, 8, 1, 2, 4)), ("int4", "bf16", "float", WgmmaTile(128, 2, 8, 1, 2, 4)),
        ("int8", "bf16", "none", WgmmaTile(128, 2, 8, 1, 2, 2)), ("fp6_e3m2", "fp16", "none", WgmmaTile(32, 4, 8, 1, 2, 8)),
    ],
)  # fmt: skip
def test_parts_of_k_in_turn(fmt, dtype, zero, tile):
    """One block may compute several parts of K one after the other. They share one main loop, and registers hold two sets of
    accumulators."""
    config, kernel = compiled(fmt, dtype, 1024, zero=zero, subnormal=zero == "none" and fmt == "int4", tile=tile)
    assert kernel.stack_bytes == 0 and kernel.count("STL") == 0, "registers spilled"
    assert len([line for line in kernel.lines if "HGMMA" in line]) == 8 and kernel.count("WARPGROUP.DEPBAR") == 3
    check_operands_in_flight(kernel.lines)
    check_barriers(config, kernel)


@pytest.mark.parametrize(
    ("fmt", "dtype", "tile"),
    [
        ("int4", "fp16", WgmmaTile(256, 2, 4, 0, 2)), ("int4", "bf16", WgmmaTile(128, 2, 8, 0, 2)),
        ("fp6_e3m2", "fp16", WgmmaTile(256, 2, 4, 0, 2)), ("int8", "bf16", WgmmaTile(128, 2, 6, 0, 2)),
    ],
)  # fmt: skip
def test_equal_shares_of_the_last_wave(fmt, dtype, tile):
    """Stream-K leaves the main loop unchanged. Partial sums of other blocks are added without a second set of accumulators, and
    many of their loads are issued before the first addition.
    """
    config, kernel = compiled(fmt, dtype, 1024, n=5120, subnormal=fmt == "int4", tile=tile)
    assert kernel.stack_bytes == 0 and kernel.count("STL") == 0, "registers spilled"
    assert len([line for line in kernel.lines if "HGMMA" in line]) == 8 and kernel.count("WARPGROUP.DEPBAR") == 3
    check_operands_in_flight(kernel.lines)
    check_barriers(config, kernel)
    loads = [i for i, line in enumerate(kernel.lines) if "LDG.E.STRONG.GPU" in line]
    added = next(i for i in range(loads[0], len(kernel.lines)) if "FADD" in kernel.lines[i])
    assert len(loads) >= tile.tokens // 2 and len([i for i in loads if i < added]) >= 48


def test_shares_are_of_tiles_that_fill_no_whole_wave():
    form = WeightForm("int4", 128, "none", "fp16", False, True)
    epilogue = Epilogue(form.channel_scale, False)
    for m, n, k in ((1024, 128 * 33, 4096), (256, 256, 4096)):
        with pytest.raises(ValueError, match=r"tiles of 32 x 128 k beside \d whole waves are too little for 132 blocks"):
            WgmmaPlan(GemmShape(m, n, k, 4), WgmmaTile(256, 2, 4, 0, 2), form, torch.float16, epilogue, 132)
    plan = WgmmaPlan(GemmShape(1024, 5120, 4096, 4), WgmmaTile(256, 2, 4, 0, 2), form, torch.float16, epilogue, 132)
    assert plan.grid == (132, 1, 1) and plan.workspace == (132 * 128 * 256, 28), "of 160 tiles"


# Zeros convert by dtype; scales convert by dtype and load by group. Every pair of zero, dtypes and group occurs.
@pytest.mark.parametrize(
    "cases",
    batches([
        ("integer", "fp16", "fp16", 16), ("integer", "fp16", "bf16", 128), ("integer", "bf16", "bf16", 16),
        ("integer", "bf16", "fp16", 128), ("float", "fp16", "fp16", 128), ("float", "fp16", "bf16", 16),
        ("float", "bf16", "bf16", 128), ("float", "bf16", "fp16", 16),
    ]),
)  # fmt: skip
def test_zero_points_and_scale_types(cases):
    made = [compiled("uint4", dtype, 256, group, zero, scale_dtype, bias=True) for zero, dtype, scale_dtype, group in cases]
    for case, (_, kernel) in zip(cases, made, strict=True):
        assert kernel.stack_bytes == 0, case
        check_operands_in_flight(kernel.lines)


def test_per_channel():
    _, kernel = compiled("int8", group=0)
    assert kernel.stack_bytes == 0 and kernel.count("HMUL2") == 0, "no scale in the main loop"


def test_the_check_of_operands_finds_a_violation():
    loop = ["SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3", "HGMMA.64x64x16.F32 R24, R152, gdesc[UR4], R24, gsb0"]
    wrong = [*loop, "LOP3.LUT R153, R8, 0xf, R9, 0xea, !PT", "WARPGROUP.DEPBAR.LE gsb0, 0x0", "@P0 BRA 0x40"]
    with pytest.raises(AssertionError, match="R153"):
        check_operands_in_flight(wrong)
    check_operands_in_flight([*loop, "WARPGROUP.DEPBAR.LE gsb0, 0x0", "LOP3.LUT R153, R8, 0xf, R9, 0xea, !PT", "@P0 BRA x"])


@pytest.mark.parametrize(
    ("fmt", "m"), [("int4", 64), ("fp8_e5m2", 4096)]
)  # an integer format, and the float format whose scales need the factor
def test_a_power_of_two_beside_group_scales_is_not_in_the_main_loop(fmt, m):
    """The channel factor adds at most four moves to the main loop."""
    loops = []
    made = [compiled(fmt, "fp16", m, scale_dtype="bf16", scaled_twice=scaled_twice) for scaled_twice in (False, True)]
    for scaled_twice, (config, kernel) in enumerate(made):
        assert config.epilogue.channel_scale == scaled_twice and kernel.stack_bytes == 0 and kernel.count("STL") == 0
        loops.append(len(main_loop(kernel.lines)))
    assert loops[1] <= loops[0] + 4


def test_codes_as_subnormal_numbers():
    """Nine instructions dequantize 8 codes, instead of 13. The loop has two stages of 32 codes each."""
    counts = []
    made = [compiled("int4", m=64, n=28672, k=4096, subnormal=subnormal) for subnormal in (False, True)]
    for _, kernel in made:
        assert kernel.stack_bytes == 0
        check_operands_in_flight(kernel.lines)
        counts.append([kernel.count(name) for name in ("HADD2", "HMUL2", "HFMA2", "LOP3")])
    plain, masked = counts
    assert plain[0] >= 16 and plain[1] == 32 and masked[0] + masked[1] <= 8 and masked[2] >= 32
