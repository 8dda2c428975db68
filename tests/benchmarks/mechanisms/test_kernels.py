"""The benchmark's plain Triton kernels: in Triton's interpreter, compiled for sm_90, and rows of every part on a GPU."""

from __future__ import annotations

import pytest
import torch

from lowbit.quantize import rtn
from tests.kernels.interpreter import interpreted
from tests.kernels.sass import compile_triton

pytest.importorskip("triton.experimental.gluon", reason="the kernels are Triton's")

from benchmarks.mechanisms import layouts
from benchmarks.mechanisms.fused import BLOCK, GROUP, TwoKernels, dequantize_kernel
from benchmarks.mechanisms.layouts import BLOCKS, TILE, arranged, sum_channels


def check_weights_written_out() -> None:
    """Checks dequantization of int4 with groups, bit-equal in fp16."""
    q = rtn(torch.randn(16, 512, generator=torch.Generator().manual_seed(1)), "w4a16_g128")
    two = TwoKernels(q)
    w = torch.full((16, 512), float("nan"), dtype=torch.float16)
    dequantize_kernel[(two.n * two.k // (GROUP * BLOCK),)](w, two.codes, two.scale, GROUP, BLOCK)
    assert torch.equal(w, q.dequantize(torch.float16))


def check_sums_of_channels() -> None:
    """Checks sums over channels for every layout, with a partial last tile."""
    images, channels, pixels = 2, 128, 100
    codes = torch.randint(0, 16, (images, channels, pixels), dtype=torch.uint8)
    wanted = codes.view(images, channels // TILE, TILE, pixels).sum(2, dtype=torch.int32)
    for block in BLOCKS:
        y = torch.full(wanted.shape, -1, dtype=torch.int32)
        grid = (-(-pixels // TILE), channels // TILE, images)
        sum_channels[grid](y, arranged(codes, block), pixels, channels, block, TILE)
        assert torch.equal(y, wanted), block


def test_the_arithmetic_in_tritons_interpreter():
    interpreted(check_weights_written_out, check_sums_of_channels)


def test_weights_are_written_in_pieces_of_16_bytes():
    signature = {"w": "*fp16", "codes": "*i32", "scale": "*fp16"}
    kernel = compile_triton(dequantize_kernel, signature, {"GROUP": GROUP, "BLOCK": BLOCK}, tuple(signature), 4, 90)
    assert kernel.count("STG.E.128") > 0 and kernel.count("STG.E.U16") == 0 and kernel.stack_bytes == 0


@pytest.mark.parametrize("block", BLOCKS)
def test_channels_are_read_as_wide_as_they_lie(block):
    signature = {"y": "*i32", "x": "*u8", "pixels": "i32", "channels": "i32"}
    constants = {"BLOCK": block, "TILE": TILE}
    kernel = compile_triton(sum_channels, signature, constants, ("y", "x", "pixels", "channels"), 4, 90)
    assert kernel.stack_bytes == 0 and (block < 32 or kernel.count("LDG.E.128") + kernel.count("LDG.E.64") > 0)


@pytest.mark.gpu
def test_rows_on_a_gpu(monkeypatch):
    """One row of each kind has figures, and its error is within the row's bound."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the bench measures sm_90")
    from benchmarks.mechanisms import fused, loops, products, sums

    monkeypatch.setattr(layouts, "IMAGES", 4)
    trials = [next(loops.conversion_trials(4)), next(loops.step_trials(4)), next(products.scale_trials())]
    trials += [next(products.tile_trials()), *list(layouts.trials())[::5]]
    trials += list(sums.trials())[2:4]
    trials += [trial for trial in fused.trials(fused.Ceilings(4e12, 6e14)) if trial.row["m"] == 16]
    for trial in trials:
        trial.once()
        row = {**trial.row, **trial.measure()}
        assert row["rel_err"] is not None and row["rel_err"] < 1e-2 and (row["us"] or row["figures"]["clocks"]) > 0, row
