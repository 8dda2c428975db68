"""Pooling on packed codes against the reference, on a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are Triton's")

from lowbit.formats.conv import code_range
from lowbit.kernels.elementwise.pool import average_codes, average_pool, average_pool_kernel, max_pool, max_pool_kernel
from lowbit.kernels.reference.conv import average_pool_reference, max_pool_reference, quantize_reference
from lowbit.pack.nhwc64 import Nhwc64
from tests.kernels.sass import compile_triton


@pytest.mark.parametrize("four", [True, False])
def test_maxima_move_16_bytes_at_a_time(four):
    constants = dict(VECTORS=2, KH=3, KW=3, SH=2, SW=2, PH=1, PW=1, FOUR=four, BLOCK=128)
    signature = {"y": "*i32", "x": "*i32"} | dict.fromkeys(("height", "width", "out_height", "out_width", "total"), "i32")
    kernel = compile_triton(max_pool_kernel, signature, constants, ("y", "x"), 4, 90)
    assert kernel.stack_bytes == 0 and kernel.count("LDG.E.128") == 9 and kernel.count("STG.E.128") == 1


def test_means_compile():
    kernels = {}
    for four, codes in itertools.product((True, False), repeat=2):
        constants = dict(ROW=1024, FOUR=four, CODES=codes, BLOCK=512, UNDER_WAY=49)
        signature = {"y": "*u8" if codes else "*fp32", "x": "*u8"} | dict.fromkeys(("pixels", "channels"), "i32")
        signature |= dict.fromkeys(("factor", "gain"), "fp32")
        kernels[four, codes] = compile_triton(average_pool_kernel, signature, constants, ("y", "x"), 4, 90)
    for case, kernel in kernels.items():
        assert kernel.stack_bytes == 0 and kernel.opcodes["LDG.E"] == 49, ("4 bytes of 49 pixels are under way", case)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["u4", "s8"])
@pytest.mark.parametrize(("window", "stride", "padding"), [(3, 2, 1), (2, 2, 0), (1, 1, 0), (5, 1, 2)])
def test_pools(storage, window, stride, padding):
    torch.manual_seed(0)
    low, high = code_range(storage)
    codes = torch.randint(low, high + 1, (3, 100, 15, 14), dtype=torch.int32, device="cuda")
    layout, pair = Nhwc64(storage), ((window, window), (stride, stride), (padding, padding))
    pooled = max_pool(layout.pack(codes), storage, *pair)
    assert torch.equal(layout.unpack(pooled, 100), max_pool_reference(codes, *pair))
    means = average_pool_reference(codes, 0.37)
    assert torch.equal(average_pool(layout.pack(codes), storage, 100, 0.37), means)
    out = torch.full((3, 1, 1, 128), 0xA5, dtype=torch.uint8, device="cuda")
    gain = 20.0 / 0.37 if storage == "s8" else 15.0 / 0.37  # some codes end at 127
    average_codes(layout.pack(codes), storage, 0.37, gain, out)
    gains, zeros = torch.full((100,), gain, device="cuda"), torch.zeros(100, device="cuda")
    wanted = quantize_reference(means[:, :, None, None], gains, zeros, "s8")
    assert torch.equal(Nhwc64("s8").unpack(out, 100), wanted) and wanted.unique().numel() > 5
    assert not bool(Nhwc64("s8").unpack(out, 128)[:, 100:].any())
