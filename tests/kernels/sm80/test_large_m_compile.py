"""The large-M mma.sync kernel compiled without a GPU, and checks of its machine code."""

from __future__ import annotations

import re

import pytest
import torch

from lowbit.formats import IntFormat, number_format
from lowbit.hardware.machine import MACHINES, typical_machine
from lowbit.kernels.choose.gemm import choose
from lowbit.kernels.choose.large_m import mma_tiles
from lowbit.kernels.choose.tiles import GemmShape, MmaTile
from lowbit.pack import WeightForm
from tests.kernels.calls import mixed_call
from tests.kernels.sass import TRITON, batches, compile_plan

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.epilogue import Epilogue
from lowbit.kernels.sm80.large_m_gemm import MmaPlan

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
BF16 = ("int4", "int7", "int8", "fp6_e3m2")
FORMATS = ["int2", "int3", "int4", "int5", "int6", "int7", "int8", "fp6_e3m2", "fp6_e2m3", "fp5_e2m2", "fp4_e2m1", "fp8_e4m3"]


def compiled(
    fmt, dtype="fp16", m=4096, group=128, zero="none", scale_dtype="fp16", bias=False, n=8192, k=8192, sm=80, tile=None,
):  # fmt: skip
    """(tile, kernel); integer codes are packed as pack/weight.py packs them (subnormal dequantization where possible)."""
    number = number_format(fmt)
    shape = GemmShape(m, n, k, number.bits)
    tile = tile or choose(shape, typical_machine(sm))
    assert isinstance(tile, MmaTile)
    subnormal = group > 0 and zero == "none" and isinstance(number, IntFormat) and number.bits < 8
    form = WeightForm(fmt, group, zero, scale_dtype, subnormal, subnormal)
    plan = MmaPlan(shape, tile, form, HALVES[dtype], Epilogue(form.channel_scale, bias))
    x, codes, scale, channel, *rest = mixed_call(shape, HALVES[dtype], group, HALVES[scale_dtype])
    call = x, codes, scale, channel.to(torch.bfloat16) if subnormal else channel, *rest
    return tile, compile_plan(plan, call, sm)


def main_loop(kernel) -> list[str]:
    first, last = max(kernel.loops, key=lambda loop: sum("HMMA" in line for line in kernel.lines[loop[0] : loop[1] + 1]))
    return kernel.lines[first : last + 1]


def check_loop(tile, kernel) -> None:
    """The main loop has all products and reads of x for 64 elements of K, one barrier, and copies for a later stage. Nothing
    spills.
    """
    loop = main_loop(kernel)

    def count(name: str) -> int:
        return sum(name in line for line in loop)

    assert count("LDL") == 0 and count("STL") == 0, "registers spilled"
    n8_tiles = tile.tokens // tile.warps_m // 8
    assert count("HMMA.16816") == 4 * tile.row_blocks * n8_tiles
    assert count("LDSM") == 4 * max(n8_tiles // 2, 1) and count("BAR.SYNC") == 1
    assert count("DEPBAR.LE") == 1 and count("LDGSTS") >= tile.tokens * 8 // 256 + 1
    branches = [line for line in loop if re.search(r"\b(BRA|BSSY)\b", line)]
    assert len(branches) <= 2, "one stretch of code"


# bf16 dequantizes with other instructions, so the formats that differ most in codes per word run in bf16. Formats of equally
# many bits load alike: such a format runs only in bf16 if fp16 runs another format of these bits.
@pytest.mark.parametrize(
    "cases",
    batches([*((fmt, "fp16") for fmt in FORMATS if fmt not in ("int8", "fp6_e3m2")), *((fmt, "bf16") for fmt in BF16)]),
)
def test_main_loop(cases):
    for tile, kernel in [compiled(fmt, dtype, scale_dtype=dtype) for fmt, dtype in cases]:
        assert kernel.stack_bytes <= 32, cases
        check_loop(tile, kernel)


SLICED = [MmaTile(64, 2, 4, 1, 4, 1, warps_k=2), MmaTile(32, 2, 2, 1, 3, 2, warps_k=4)]
TILES = [tile for tile in mma_tiles(GemmShape(4096, 8192, 8192, 4), typical_machine(80)) if tile.splits == 1] + SLICED


@pytest.mark.parametrize("tiles", batches(TILES))
def test_every_tile(tiles):
    for each in [compiled("int4", tile=tile) for tile in tiles]:
        check_loop(*each)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.product)
def test_every_machine(machine):
    sm = machine.arch.sm
    if TRITON < (3, 9) and sm == 110:
        pytest.skip("ptxas of CUDA 12.9 does not know sm_110")
    shape = GemmShape(4096, 8192, 8192, 4)
    tile = mma_tiles(shape, machine)[0]
    tile, kernel = compiled("int4", sm=sm, tile=tile)
    assert kernel.shared_bytes <= machine.arch.shared_per_block_bytes and kernel.stack_bytes == 0
    assert all(name in kernel.ptx for name in ("mma.sync.aligned.m16n8k16", "ldmatrix.sync", "cp.async.cg.shared"))
    if TRITON >= (3, 9) or sm not in (103, 121):  # nvdisasm of CUDA 12.8 cannot read these
        assert all(kernel.count(name) > 0 for name in ("HMMA.16816", "LDSM", "LDGSTS"))


# Before sm_90 bf16 has only fma, so each kind of zero, and each scale dtype other than that of x, converts in its own way. That
# does not depend on whether a step has one scale or four, so each case runs with one of the two.
@pytest.mark.parametrize(
    "cases",
    batches([
        ("none", "bf16", "fp16", 128), ("integer", "fp16", "fp16", 16), ("integer", "bf16", "bf16", 128),
        ("integer", "bf16", "fp16", 16), ("float", "fp16", "bf16", 128), ("float", "bf16", "fp16", 16),
    ], 3),
)  # fmt: skip
def test_zero_points_and_scale_types(cases):
    made = [
        compiled("uint4" if zero != "none" else "int4", dtype, 512, group, zero, scale_dtype, bias=True)
        for zero, dtype, scale_dtype, group in cases
    ]
    for each in made:
        check_loop(*each)


def test_stores_are_vectors_of_16_bytes():
    (_, even), (_, odd) = compiled("int4", bias=True), compiled("int4", n=8191)
    assert even.count("STG.E.128") > 0 and even.count("STG.E.U16") == 0
    assert odd.count("STG.E.U16") > 0


def products_ahead(loop) -> list[int]:
    """For each ldmatrix of x, the number of products issued between it and the first product that uses its registers."""
    found = []
    for at, line in enumerate(loop):
        if read := re.search(r"LDSM\S* R(\d+)", line):
            own = {f"R{int(read[1]) + i}" for i in range(4)}
            behind = [re.findall(r"R\d+", later) for later in loop[at + 1 :] + loop if "HMMA" in later]
            found.append(next(count for count, registers in enumerate(behind) if registers[2] in own))
    return found


def test_x_is_read_ahead():
    """At least five products (8 cycles each on an A100) separate an ldmatrix from its first use. The source reads four chunks
    ahead; ptxas sinks some reads, but not past a copy. A loop over whole steps left only two products.
    """
    for sm in (80, 100):
        _, kernel = compiled("int4", tile=MmaTile(128, 2, 8, 1, 4, 1), sm=sm)
        assert min(products_ahead(main_loop(kernel))) >= 5, sm


def test_decoding_keeps_its_budget():
    """int4: issuing the dequantization takes at most a tenth of the tensor cores' cycles (8 per product on an A100). The whole
    loop, over 64 elements of K, has at most 2.6 instructions per product.
    """
    _, kernel = compiled("int4", tile=MmaTile(128, 2, 8, 1, 4, 1))
    loop = main_loop(kernel)
    products = sum("HMMA" in line for line in loop)
    decoding = sum(any(name in line for name in ("LOP3", "SHF", "HFMA2", "HMUL2", "PRMT")) for line in loop)
    assert products == 128 and decoding <= 0.1 * 8 * products and len(loop) <= 2.6 * products
