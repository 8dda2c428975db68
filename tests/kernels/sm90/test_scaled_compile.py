"""The kernels for 8-bit activations compiled for sm_90a, and checks of their machine code."""

from __future__ import annotations

import re

import pytest
import torch

from lowbit.formats import parse_scheme
from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose.scaled_gemm import ScaledTile, candidates_scaled, choose_scaled
from lowbit.ops.byte_gemm import plan_for_scaled, scaled_shape
from tests.kernels.calls import scaled_call
from tests.kernels.sass import TRITON, compile_plan

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.sm90.scaled_gemm import scaled_config
from lowbit.kernels.sm90.sub_byte_scaled_gemm import narrow_config
from tests.kernels.sm90.test_compile import check_barriers, check_operands_in_flight, main_loop


def eight(
    scheme, m, n=8192, k=8192, dtype=torch.bfloat16, x_scale="token", x_zero=False, function="none", tile=None, fast=False
):
    return compiled(scheme, m, n, k, dtype, x_scale, x_zero, function, tile, fast)


def narrow(scheme, m, n=8192, k=8192, dtype=torch.bfloat16, x_zero=False, function="none", tile=None):
    return compiled(scheme, m, n, k, dtype, "token", x_zero, function, tile)


def compiled(scheme, m, n, k, dtype, x_scale, x_zero, function, tile, fast=False):
    parsed, machine = parse_scheme(scheme), typical_machine(90)
    shape = scaled_shape(parsed, m, n, k, x_scale == "block", fast)
    tile = tile or choose_scaled(shape, machine)
    plan = plan_for_scaled(tile, shape, parsed, dtype, x_scale, x_zero, True, machine, function)
    codes = dtype == torch.int8
    call = scaled_call(scheme, m, n, k, x_scale=x_scale, x_zero=x_zero, bias=torch.float16, codes_of_y=codes)
    return plan.config, compile_plan(plan, call, 90, ("y", "partial"))


def product_name(scheme):
    return "IGMMA" if parse_scheme(scheme).activation.name == "int8" else "QGMMA"


@pytest.mark.parametrize(
    ("scheme", "m"),
    [
        *(("w8a8", 1), ("w8a8", 4096), ("fp8_dynamic", 64), ("fp8_dynamic", 256), ("fp8_dynamic", 4096)),
        *(("fp8_block", 256), ("w8e4m3a8e5m2", 16)),
    ],
)
def test_eight_bits(scheme, m):
    config, kernel = eight(scheme, m, x_scale="block" if scheme == "fp8_block" else "token")
    assert kernel.stack_bytes == 0 and kernel.count("LDL") == kernel.count("STL") == 0, "registers spilled"
    products = [line for line in kernel.lines if product_name(scheme) in line]
    per_stage = 4 * (config.columns // config.accumulator.instr_shape[1])
    # With by_halves, products of one half stand before the loop, of two halves in it, and of one half after it.
    expected = 4 * 4 if config.by_halves else per_stage * config.iteration_stages
    assert len(products) == expected and all("gdesc" in line for line in products)
    # A kernel that ptxas serializes waits after every product (remark C7510 and similar).
    one_wait = config.promote and config.iteration_stages == 1
    assert kernel.count("WARPGROUP.DEPBAR") == (4 if config.by_halves else 1 if one_wait else 2)
    assert kernel.count("UTMALDG") > 0 and kernel.count("ACQBULK") > 0
    assert kernel.shared_bytes <= 227 * 1024
    check_barriers(config, kernel)


def test_fast_sums_stay_in_the_tensor_core():
    """Nothing is added between products, and the products of a stage are in flight while those of the next one start."""
    config, kernel = eight("fp8_dynamic", 4096, fast=True)
    _, exact = eight("fp8_dynamic", 4096)
    assert not config.promote and config.columns == 256 and kernel.stack_bytes == 0

    def additions(lines):
        products = [i for i, line in enumerate(lines) if "QGMMA" in line]
        return sum(line.startswith("FADD") for line in lines[products[0] : products[-1]])

    assert additions(kernel.lines) == 0 < additions(exact.lines)
    assert len([line for line in kernel.lines if "QGMMA" in line]) == 4 and kernel.count("WARPGROUP.DEPBAR") == 2
    check_barriers(config, kernel)


@pytest.mark.parametrize(
    ("scheme", "m"),
    [
        *(("w4a8_g128", 1), ("w4a8_g128", 4096), ("w4a8", 4096), ("w4a8e4m3_g128", 64), ("w4a8e4m3_g128", 4096)),
        *(("w6e3m2a8e4m3", 256), ("w6e3m2a8e4m3", 4096), ("w3a8", 16)),
    ],
)
def test_fewer_bits(scheme, m):
    config, kernel = narrow(scheme, m)
    assert kernel.stack_bytes <= 80, "a few values of the epilogue may wait in local memory"
    products = [line for line in kernel.lines if product_name(scheme) in line]
    per_stage = 4 * (config.columns // config.accumulator.instr_shape[1])
    assert len(products) == (4 * 2 if config.by_halves else 2 * per_stage), "two halves or two stages a turn"
    assert all(re.search(r"GMMA\S* R\d+, R\d+, gdesc", line) for line in products), "operand A comes from registers"
    assert kernel.count("WARPGROUP.DEPBAR") == (2 if config.promote else 3)
    assert not any("LDG" in line for line in main_loop(kernel.lines)), "scales come with the stage"
    check_operands_in_flight(kernel.lines)
    check_barriers(config, kernel)


@pytest.mark.parametrize(
    ("make", "scheme", "m", "columns"),
    [
        (eight, "fp8_dynamic", 256, 256),
        (eight, "w8a8", 100, 128),
        (narrow, "w4a8e4m3", 256, 256),
        (narrow, "w4a8_g128", 64, 64),
    ],
)
def test_pairs(make, scheme, m, columns):
    config, kernel = make(scheme, m, tile=ScaledTile(False, 2, columns, 4, 2, 8, True))
    assert kernel.stack_bytes <= (8 if TRITON >= (3, 9) else 0)
    # Every warp arrives at the cluster barrier: math warps, the loader and the two idle roles.
    assert kernel.count("UCGABAR_ARV") == 4 and kernel.count("UCGABAR_WAIT") == 1
    assert f".reqntid {config.threads + 4 * 32}" in kernel.ptx
    assert kernel.count("MEMBAR.ALL.GPU") == 0, "nothing waits for the memory of the whole GPU"
    assert kernel.count("STAS") == config.rows * columns // 2 // config.threads // 4, "one half goes to the other block"
    assert config.rows * columns // 2 * 4 <= config.stages * config.stage_bytes, "into its ring"
    assert kernel.count("ATOM") == 0


def test_other_outputs_and_scales_of_x():
    for dtype, x_scale in ((torch.float16, "tensor"), (torch.float32, "block")):
        _, kernel = eight("fp8_dynamic", 64, 1000, 576, dtype, x_scale)
        assert kernel.stack_bytes == 0
    _, kernel = eight("w8a8", 64, 1001, 576, x_zero=True)
    assert kernel.stack_bytes == 0
    _, kernel = narrow("w4a8_g128", 64, 1001, 576, torch.float32, x_zero=True)
    assert kernel.stack_bytes == 0


@pytest.mark.parametrize(("m", "function"), [(1, "gelu"), (4096, "silu")])
def test_functions_and_codes(m, function):
    _, kernel = eight("w8a8", m, dtype=torch.int8, function=function)
    assert kernel.stack_bytes == 0 and kernel.count("MUFU.EX2") > 0 and kernel.count("UTMASTG") > 0
    config, kernel = narrow("w4a8_g128", m, dtype=torch.int8, function="relu")
    # With tiles of 256 tokens (`by_halves`), Triton 3.9 keeps more of the epilogue in local memory than 3.6, but nothing of the
    # main loop.
    assert kernel.stack_bytes <= (144 if config.by_halves and TRITON >= (3, 9) else 80) and kernel.count("MUFU.EX2") == 0
    products = [i for i, line in enumerate(kernel.lines) if "GMMA" in line]
    spilled = [i for i, line in enumerate(kernel.lines) if re.search(r"\b(LDL|STL)\b", line)]
    assert not config.by_halves or not any(products[0] < i < products[-1] for i in spilled)
    assert (kernel.count("UTMASTG") > 0) == config.store_by_tma == (config.splits == 1)


@pytest.mark.parametrize("scheme", ["w8a8", "fp8_block", "w4a8_g128", "w6e3m2a8e4m3"])
def test_candidates_fit_the_machine(scheme):
    """The kernels' shared memory fits the GPU for every feasible tile."""
    parsed = parse_scheme(scheme)
    for m in (1, 40, 300, 4096):
        shape = scaled_shape(parsed, m, 5000, 3000)
        rows = [row.tile for row in candidates_scaled(shape, typical_machine(90)) if not row.reasons]
        assert rows
        for tile in rows:
            make = scaled_config if shape.bits == 8 else narrow_config
            config = make(shape, tile, parsed, torch.bfloat16, "token", False, False)
            assert config.regions.bytes <= 226 * 1024, str(tile)  # Triton adds about 100 bytes
