"""Functions of one code by a table of 256, and products of codes with a gate, on packed NHWC codes. Plain Triton.

The table is in global memory and stays in L1. Each code is looked up by a load of its own; all these loads take less time than
reading the codes from memory. Exact bit for bit as `MapCodes` (vision/program.py) and `GateSpec` (formats/conv.py). Tested:
tests/kernels/elementwise/test_code_table.py
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.formats.conv import GateSpec
from lowbit.kernels.parts.code_pairs import pairs, stored

MAP_BLOCK = 2048
"""Codes per block of 128 threads: 16 bytes per thread."""
GATE_BLOCK = 1024
"""Pairs of codes per block."""


@triton.jit(do_not_specialize=["channels"])  # `total` is a multiple of 16, which 16-byte stores need
def map_kernel(y, x, table, channels, total, PIXEL: tl.constexpr, BLOCK: tl.constexpr):
    """Maps BLOCK of `total` codes; the first `channels` of each PIXEL are mapped, the others are 0."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    inside = i < total - first
    codes = tl.load(x + first + i, mask=inside, other=0).to(tl.int32)
    mapped = tl.load(table + codes + 128, mask=inside, other=0)
    channel = ((first % PIXEL).to(tl.int32) + i) % PIXEL
    tl.store(y + first + i, tl.where(channel < channels, mapped, 0), mask=inside)


@triton.jit(do_not_specialize=["s", "pixels"])
def gate_kernel(y, x, gate, s, pixels, total, PAIRS: tl.constexpr, FOUR: tl.constexpr, BLOCK: tl.constexpr):
    """Multiplies BLOCK of `total` pairs of codes; a pixel has PAIRS of them, an image `pixels` pixels."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    even, odd = pairs(x, i, total, FOUR)
    image = i // PAIRS // pixels
    of_gate = tl.where(i < total, image * PAIRS + i % PAIRS, 0)
    even_gate, odd_gate = pairs(gate, of_gate, total, False)
    low = stored(even * even_gate * s, False, -128.0)  # products of codes are exact
    high = stored(odd * odd_gate * s, False, -128.0)
    tl.store(y.to(tl.pointer_type(tl.int16)) + i, ((low & 255) | (high << 8)).to(tl.int16), mask=i < total)


def map_to_codes(x: Tensor, table: Tensor, channels: int, out: Tensor) -> Tensor:
    """Writes table[code + 128] for packed s8 codes uint8 [N, H, W, bytes] to `out`, on x's device."""
    total = x.numel()
    map_kernel[(triton.cdiv(total, MAP_BLOCK),)](
        out.view(torch.int8), x.view(torch.int8), table, channels, total, x.shape[3], MAP_BLOCK
    )  # fmt: skip
    return out


def multiply_by_gate(x: Tensor, gate: Tensor, layer: GateSpec, out: Tensor) -> Tensor:
    """Writes the products of packed codes uint8 [N, H, W, bytes] and of a gate's packed s8 codes [N, 1, 1, bytes] to `out`."""
    total = out.numel() // 2
    gate_kernel[(triton.cdiv(total, GATE_BLOCK),)](
        out, x, gate, layer.s, x.shape[1] * x.shape[2], total, out.shape[3] // 2, layer.x == "u4", GATE_BLOCK
    )  # fmt: skip
    return out
