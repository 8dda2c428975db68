"""The plain kernel for 8-bit activations compiled for machines that are not here."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.sass import compile_kernel

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.epilogue import TYPES
from lowbit.kernels.sm80.scaled_gemm import PlainGemm, plain_scaled_gemm

E4M3 = torch.float8_e4m3fn


def compiled(sm, narrow="", dtype=torch.int8, grouped=False, blocks=False, x_scale="token", x_zero=False, y="bf16",
             function="none"):  # fmt: skip
    y_type = {"bf16": torch.bfloat16, "i8": torch.int8}[y]
    config = PlainGemm(narrow, dtype, dtype, y_type, 64, grouped, blocks, x_scale, x_zero, True, function)
    signature = {
        "y": "*" + y,
        "x": "*" + TYPES[dtype][1],
        "w": "*i32" if narrow else "*" + TYPES[dtype][1],
        "x_scale": "*fp32",
        "x_zero": "*i32" if x_zero else None,
        "scale": "*fp16" if grouped else "*fp32",
        "channel_scale": "*fp32" if config.channel_scale else None,
        "sums": "*fp32",
        "bias": "*bf16",
        "y_scale": "*fp32" if y == "i8" else None,
    }
    signature |= dict.fromkeys(("M", "N", "K", "x_stride", "w_stride", "strips", "tiles", "scale_stride"), "i32")
    return compile_kernel(plain_scaled_gemm, signature, config, ("y", "x", "w", "x_stride", "w_stride"), config.warps, sm)


@pytest.mark.parametrize("sm", [80, 86, 89, 120])
def test_int8(sm):
    to_codes = compiled(sm, y="i8", function="gelu")
    for kernel in (compiled(sm), compiled(sm, "int4", grouped=True, x_zero=True), to_codes):
        # 64 rows x 64 tokens x 128 k for 4 warps: 4 k steps x 8 tiles of 8 tokens
        assert kernel.count("IMMA.16832") == 32 and kernel.stack_bytes == 0


@pytest.mark.parametrize("sm", [89, 120])
def test_fp8(sm):
    for kernel in (compiled(sm, dtype=E4M3, blocks=True, x_scale="block"), compiled(sm, "fp6_e3m2", E4M3)):
        assert kernel.count("QMMA.16832") == 32 and kernel.stack_bytes == 0
