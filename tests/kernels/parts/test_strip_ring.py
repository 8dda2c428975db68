"""Strips of pixels: the PTX uses its operands, and the registers read for a tap are operand A of the pixels under that tap."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.hardware.mma import wgmma_s8
from lowbit.kernels.parts.pipeline import StageBarriers
from lowbit.kernels.parts.strip_ring import StripRing
from lowbit.pack.conv_weight import swizzled
from tests.kernels.parts.plain import check_operands, operands
from tests.kernels.parts.threads import run

START, ROWS = 1024, 96


def ring(bits, row_bytes):
    strips = StageBarriers(40000, 2, 4)
    return StripRing(strips, StageBarriers(40032, 1, 4), 39936, 2048, 30000, ROWS, row_bytes, 9 * 4096, bits)


def memory(rows, ring):
    """Shared memory that holds two strips [2, ROWS, row_bytes], swizzled as TMA writes them, and 128 zero bytes."""
    shared = np.full(41000, 0xEE, dtype=np.uint8)
    shared[ring.x_start : ring.x_start + rows.numel()] = swizzled(rows.view(torch.int8)).numpy().view(np.uint8).ravel()
    shared[ring.zeros : ring.zeros + 128] = 0
    return shared


def fragments(registers, rows):
    """Whether the registers equal operand A of rows [64, bytes]: four registers per thread for each step of 32 bytes."""
    steps = [wgmma_s8(64).a.gather(rows[:, 32 * i : 32 * i + 32]) for i in range(rows.shape[1] // 32)]
    wanted = np.concatenate(steps, axis=1).reshape(128, -1, 4).astype(np.uint8)
    return np.array_equal(np.stack(registers, 1).view(np.uint8).reshape(128, -1, 4), wanted)


@pytest.mark.parametrize(("bits", "row_bytes"), [(4, 32), (4, 64), (8, 64), (8, 128)])
def test_a_tap_is_operand_a(bits, row_bytes):
    """Reads 64 pixels from row 7 of strip 1 on, some of them outside the image."""
    part = ring(bits, row_bytes)
    rows = torch.randint(0, 256, (2, ROWS, row_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    thread = np.arange(128)
    row = 7 + (thread >> 5) * 16 + (thread & 15)
    inside = (row % 5 > 0).astype(np.uint32)
    made = run(part.read, [np.ones(128), row, inside, thread], part.registers, memory(rows, part), START)
    pixels = rows[1, 7:71].numpy().copy()
    pixels[np.arange(7, 71) % 5 == 0] = 0
    if bits == 8:
        assert fragments(made, pixels)
    else:
        assert fragments(made[: part.loaded], pixels & 15) and fragments(made[part.loaded :], pixels >> 4)
    check_operands(part.read, part.read_constraints)


def test_ptx_names_its_operands():
    part = ring(4, 32)
    wanted = {"clear": {0, 1}, "copy_strip": {0, 1, 2, 3, 4, 5, 6}, "copy_weights": {0, 1, 2}}
    for name, numbers in wanted.items():
        assert operands(getattr(part, name)) == numbers, name
    assert "[bar+40016], $3" in part.copy_strip and f"[bar+40000], {ROWS * 32};" in part.copy_strip, "waits to be empty, fills"
    assert f"[at], {9 * 4096};" in part.copy_weights and "[at+39936], 0;" in part.clear
