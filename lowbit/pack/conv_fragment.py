"""Weights of convolutions in the order of the B fragments of mma.sync: what each lane of a warp loads.

A step is one tap and 32 bytes of a packed pixel, a tile 64 outputs: 8 fragments of 8 columns. Lane 4 n + t holds, of column n,
the channels whose codes are in bytes 8 t to 8 t + 7 of the step, so that it reads 8 neighbouring bytes of a pixel as its part
of operand A: K may be in any order that both operands share. Three ways, by what is stored:

    u4 x 4 bits   m16n8k64: words of channels 16 t on and 16 t + 8 on
    s8            m16n8k32: words of channels 8 t on and 8 t + 4 on
    u4 x 8 bits   m16n8k32 twice: even channels of both words, as low halves of bytes are decoded together, then odd ones

Columns are re-ordered as in conv_weight.py: a thread's 16 sums of a pixel are 16 neighbouring channels, 64 bits in 4-bit codes.
Source: PTX ISA, matrix fragments for mma.m16n8k64 and mma.m16n8k32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from lowbit.formats.conv import CODES
from lowbit.pack.conv_weight import column_order
from lowbit.pack.nhwc64 import padded_channels

OUTPUTS = 64
STEP_BYTES = 32
FRAGMENTS = OUTPUTS // 8


def fragment_words(x: str, bits: int) -> int:
    """Words of a lane and fragment for inputs stored as `x` and weights of so many bits."""
    return 4 if x == "u4" and bits == 8 else 2


def pack_conv_fragments(weight: Tensor, x: str, bits: int, y: str) -> Tensor:
    """int32 [tiles of 64 outputs, steps, 8 fragments, words / 2, 32 lanes, 2] of weights int8 [O, C, R, S].

    `bits` are 4 or 8; inputs in s8 take 8. Raises ValueError for weights of more bits.
    """
    if bits == 4 and weight.numel() and (int(weight.min()) < -8 or int(weight.max()) > 7):
        raise ValueError(f"4-bit weights lie in -8..7, got {int(weight.min())}..{int(weight.max())}")
    o, c, r, s = weight.shape
    o64, c64 = padded_channels(o), padded_channels(c)
    full = functional.pad(weight, (0, 0, 0, 0, 0, c64 - c, 0, o64 - o))
    columns = torch.tensor(column_order(y, OUTPUTS), device=weight.device)
    full = full.reshape(o64 // OUTPUTS, OUTPUTS, c64, r * s)[:, columns]
    channels = STEP_BYTES * 8 // CODES[x].bits
    # tiles, fragment, column, blocks, t, channels of a lane, taps -> tiles, taps, blocks, fragment, column, t, channels
    parts = full.reshape(-1, FRAGMENTS, 8, c64 // channels, 4, channels // 4, r * s).permute(0, 6, 3, 1, 2, 4, 5)
    if x == "u4" and bits == 8:  # 2 words of 4 pairs -> even of both words, odd of both words
        parts = parts.reshape(*parts.shape[:-1], 2, 4, 2).permute(0, 1, 2, 3, 4, 5, 8, 6, 7).flatten(-3)
    each = 32 // bits
    fields = parts.reshape(*parts.shape[:-1], -1, each).to(torch.int64) & ((1 << bits) - 1)
    words = (fields << (bits * torch.arange(each, device=weight.device))).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    # tiles, taps, blocks, fragment, column, t, words -> tiles, steps, fragment, pairs, lanes, 2
    pairs = words.shape[-1] // 2
    words = words.reshape(o64 // OUTPUTS, -1, FRAGMENTS, 32, pairs, 2).transpose(3, 4)
    return words.contiguous()
