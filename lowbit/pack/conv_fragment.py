"""Weights of convolutions in the order of the B fragments of mma.sync: what each lane of a warp loads.

A step is one tap and 32 bytes of a packed pixel. A tile is 64 outputs: 8 fragments of 8 columns. For column n, lane 4 n + t
holds the channels whose codes are in bytes 8 t to 8 t + 7 of the step. So its part of operand A is 8 neighbouring bytes of a
pixel; this works because K may be in any order that both operands share. The words depend on storage and weight bits:

    u4 x 4 bits   m16n8k64: two words, of the channels from 16 t on and from 16 t + 8 on
    s8            m16n8k32: two words, of the channels from 8 t on and from 8 t + 4 on
    u4 x 8 bits   m16n8k32 twice: even channels of both words (the low halves of bytes are unpacked together), then odd channels

Columns are in the order of pack/conv_layout.py: a thread's 16 sums of a pixel are 16 neighbouring channels (64 bits of 4-bit
codes). Source: PTX ISA, matrix fragments for mma.m16n8k64 and mma.m16n8k32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.conv import CODES, ProductSpec, code_range
from lowbit.pack.conv_layout import ConvLayout, Shape, by_columns, column_constants
from lowbit.pack.stem import StemImages

OUTPUTS = 64
STEP_BYTES = 32
FRAGMENTS = OUTPUTS // 8


def fragment_words(x: str, bits: int) -> int:
    """Returns the number of words per lane and fragment, for inputs stored as `x` and weights of `bits` bits."""
    return 4 if x == "u4" and bits == 8 else 2


def fragment_bits(product: ProductSpec, int4: bool) -> int:
    """Returns the bits per packed weight of a product: 4 for `int4` tensor cores if both operands have 4 bits, else 8."""
    return 4 if int4 and (product.x, product.w) == ("u4", "s4") else 8


@dataclass(frozen=True)
class MmaFragments(ConvLayout):
    """int32 [tiles of 64 outputs, steps, 8 fragments, words / 2, 32 lanes, 2] for inputs stored as `x`, outputs as `y`.

    Weights have `bits` bits, 4 or 8; with s8 inputs they have 8. `int4`: True if a second product's weights may have 4 bits.
    With `images` the weights are those of a stem.
    """

    x: str
    bits: int
    y: str
    int4: bool = False
    images: StemImages | None = None

    def refusals(self, shape: Shape) -> tuple[str, ...]:
        return ("inputs in s8 take weights of 8 bits",) if self.bits == 4 and self.x != "u4" else ()

    def arrange(self, weight: Tensor) -> Tensor:
        full = by_columns(weight if self.images is None else self.images.arrange(weight), self.y, OUTPUTS)
        tiles, _, c64, taps = full.shape
        channels = STEP_BYTES * 8 // CODES[self.x].bits
        # tiles, fragment, column, blocks, t, channels of a lane, taps -> tiles, taps, blocks, fragment, column, t, channels
        parts = full.reshape(tiles, FRAGMENTS, 8, c64 // channels, 4, channels // 4, taps).permute(0, 6, 3, 1, 2, 4, 5)
        if self.x == "u4" and self.bits == 8:  # 2 words of 4 pairs -> even of both words, odd of both words
            parts = parts.reshape(*parts.shape[:-1], 2, 4, 2).permute(0, 1, 2, 3, 4, 5, 8, 6, 7).flatten(-3)
        # tiles, taps, blocks, fragment, column, t, pairs, 2, fields -> tiles, steps, fragment, pairs, lanes, 2, fields
        each = 32 // self.bits
        return parts.reshape(tiles, -1, FRAGMENTS, 32, channels // 4 // (2 * each), 2, each).transpose(3, 4).contiguous()

    def pack(self, weight: Tensor) -> Tensor:
        """As `ConvLayout.pack`; also raises ValueError for weights of more bits."""
        low, high = code_range(f"s{self.bits}")
        if weight.numel() and (int(weight.min()) < low or int(weight.max()) > high):
            found = f"{int(weight.min())}..{int(weight.max())}"
            raise ValueError(f"{self.bits}-bit weights are in {low}..{high}, got {found}")
        fields = super().pack(weight).to(torch.int64) & ((1 << self.bits) - 1)
        words = (fields << self._shifts(weight.device)).sum(-1)
        return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)

    def unpack(self, packed: Tensor, shape: Shape) -> Tensor:
        fields = (packed.to(torch.int64)[..., None] >> self._shifts(packed.device)) & ((1 << self.bits) - 1)
        signed = torch.where(fields >= 1 << self.bits - 1, fields - (1 << self.bits), fields)
        return super().unpack(signed.to(torch.int8), shape)

    def constants(self, values: Tensor) -> Tensor:
        return column_constants(values, self.y, OUTPUTS)

    def of_second(self, product: ProductSpec) -> MmaFragments:
        return MmaFragments(product.x, fragment_bits(product, self.int4), self.y, self.int4)

    def _shifts(self, device: torch.device) -> Tensor:
        return self.bits * torch.arange(32 // self.bits, device=device)
