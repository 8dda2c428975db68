"""Stages of convolution windows: operands and byte counts of copies; dequantized codes are operand A of the pixels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts.pipeline import StageBarriers
from lowbit.kernels.parts.window_ring import WindowRing
from lowbit.pack.conv_weight import swizzled
from tests.kernels.parts.plain import check_operands, operands
from tests.kernels.parts.test_strip_ring import START, fragments
from tests.kernels.parts.threads import run


def ring(step_bytes, resident=False):
    return WindowRing(StageBarriers(30000, 3, 4), 2048, 20480, 64, step_bytes, 4096, resident)


@pytest.mark.parametrize("step_bytes", [32, 64])
def test_decoded_codes_are_operand_a(step_bytes):
    part = ring(step_bytes)
    pixels = torch.randint(0, 256, (3, 64, step_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    shared = np.zeros(32768, dtype=np.uint8)
    shared[2048 : 2048 + pixels.numel()] = swizzled(pixels.view(torch.int8)).numpy().view(np.uint8).ravel()
    made = run(part.decode, [np.full(128, 2), np.arange(128)], 2 * part.registers, shared, START)
    assert fragments(made[: part.registers], pixels[2].numpy() & 15)
    assert fragments(made[part.registers :], pixels[2].numpy() >> 4)
    check_operands(part.decode, part.decode_constraints)


@pytest.mark.parametrize("resident", [False, True])
def test_copies(resident):
    part = ring(32, resident)
    assert operands(part.copy) == set(range(11)) | (set() if resident else {11, 12})
    assert "[bar+30024], $3" in part.copy and part.copy.count("cp.async.bulk") == (1 if resident else 2)
    assert f"add.u32 to, {0 if resident else '$12'}, {64 * 32};" in part.copy, "bytes that the stage waits for"
    assert operands(part.copy_weights(30048)) == {0, 1, 2, 3, 4, 5}
