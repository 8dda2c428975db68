"""4-bit weights of convolutions in the order of the B fragments of mma.m16n8k64: what each lane of a warp loads.

A step is one tap and 64 input channels, a tile 64 outputs: 8 fragments, for each of which lane 4 n + t holds, of column n, the
16 channels 16 t to 16 t + 15 in two words. The instruction calls them k 8 t to 8 t + 7 and k 32 + 8 t on; as K may be in any
order that both operands share, a lane so reads 8 neighbouring bytes of a pixel's packed codes as its part of operand A. Columns
are re-ordered as in conv_weight.py: a thread's 16 sums of a pixel are 16 neighbouring channels, 64 bits of output.
Source: PTX ISA, matrix fragments for mma.m16n8k64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from lowbit.pack.conv_weight import column_order
from lowbit.pack.nhwc64 import padded_channels

OUTPUTS = 64
STEP_CHANNELS = 64
FRAGMENTS = OUTPUTS // 8
LANE_WORDS = 2


def pack_conv_fragments(weight: Tensor, y: str) -> Tensor:
    """int32 [tiles of 64 outputs, steps, 32 lanes, 8 fragments * 2 words] of weights int8 [O, C, R, S] in -8..7.

    Raises ValueError for weights of more than 4 bits.
    """
    if weight.numel() and (int(weight.min()) < -8 or int(weight.max()) > 7):
        raise ValueError(f"4-bit weights lie in -8..7, got {int(weight.min())}..{int(weight.max())}")
    o, c, r, s = weight.shape
    o64, c64 = padded_channels(o), padded_channels(c)
    full = functional.pad(weight, (0, 0, 0, 0, 0, c64 - c, 0, o64 - o))
    columns = torch.tensor(column_order(y, OUTPUTS), device=weight.device)
    full = full.reshape(o64 // OUTPUTS, OUTPUTS, c64, r * s)[:, columns]
    # tiles, fragment, column, blocks, lane, word, nibble, taps -> tiles, taps, blocks, column, lane, fragment, word, nibble
    parts = full.reshape(-1, FRAGMENTS, 8, c64 // STEP_CHANNELS, 4, LANE_WORDS, 8, r * s).permute(0, 7, 3, 2, 4, 1, 5, 6)
    nibbles = (parts.to(torch.int64) & 15) << (4 * torch.arange(8, device=weight.device))
    words = nibbles.sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return words.reshape(o64 // OUTPUTS, -1, 32, FRAGMENTS * LANE_WORDS).contiguous()
