"""Activations of convolutions in memory: NHWC, channels in blocks of 64, codes of 4 or 8 bits.

A pixel is a sequence of blocks; a block holds the codes of 64 channels in order. Byte i of a 4-bit block (32 bytes) has channel
2i in its low half and channel 2i + 1 in its high half; byte i of an 8-bit block (64 bytes) is channel i. Channels that pad the
last block have code 0. The blocks of a pixel are contiguous, unlike in NCHW64, which has the same blocks. So the rows of the
implicit GEMM are contiguous, and reading them needs no permutation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from lowbit.formats.conv import ACTIVATIONS, CODES, code_range

CHANNEL_BLOCK = 64


def padded_channels(channels: int) -> int:
    """Returns the number of channels, rounded up to a multiple of 64."""
    return -(-channels // CHANNEL_BLOCK) * CHANNEL_BLOCK


@dataclass(frozen=True)
class Nhwc64:
    """The layout of codes stored as "u4" or "s8": `unpack(pack(codes), C)` equals codes."""

    storage: str

    def __post_init__(self) -> None:
        if self.storage not in ACTIVATIONS:
            raise ValueError(f"packed codes are stored as one of {', '.join(ACTIVATIONS)}, got {self.storage!r}")

    def pixel_bytes(self, channels: int) -> int:
        """Returns the bytes of one pixel, a multiple of 32 (u4) or 64 (s8)."""
        return padded_channels(channels) * CODES[self.storage].bits // 8

    def shape(self, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Returns the shape [N, H, W, bytes] of packed codes [N, C, H, W]."""
        n, c, h, w = shape
        return n, h, w, self.pixel_bytes(c)

    def pack(self, codes: Tensor) -> Tensor:
        """Returns integer codes [N, C, H, W] packed to uint8 [N, H, W, bytes], on any device. Raises ValueError for codes out
        of range."""
        low, high = code_range(self.storage)
        if codes.is_floating_point() or codes.dim() != 4:
            raise ValueError(f"codes are an integer tensor [N, C, H, W], got {codes.dtype} {list(codes.shape)}")
        if codes.numel() and (int(codes.min()) < low or int(codes.max()) > high):
            raise ValueError(f"{self.storage} codes are in {low}..{high}, got {int(codes.min())}..{int(codes.max())}")
        c = codes.shape[1]
        rows = functional.pad(codes.permute(0, 2, 3, 1), (0, padded_channels(c) - c)).to(torch.int8).contiguous()
        if self.storage == "s8":
            return rows.view(torch.uint8)
        return (rows[..., 0::2] | rows[..., 1::2] << 4).view(torch.uint8)

    def unpack(self, packed: Tensor, channels: int) -> Tensor:
        """Returns the codes int32 [N, C, H, W] of packed uint8 [N, H, W, bytes]; the inverse of `pack`. Raises ValueError for
        another shape."""
        if packed.dtype != torch.uint8 or packed.dim() != 4 or packed.shape[3] != self.pixel_bytes(channels):
            raise ValueError(
                f"{channels} channels of {self.storage} are uint8 [N, H, W, {self.pixel_bytes(channels)}], "
                f"got {packed.dtype} {list(packed.shape)}"
            )
        if self.storage == "s8":
            codes = packed.view(torch.int8)
        else:
            codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(3)
        return codes[..., :channels].to(torch.int32).permute(0, 3, 1, 2).contiguous()


def pixel_elements(storage: str, channels: int) -> int:
    """Returns the number of elements of a pixel in memory: bytes of packed codes, or values, whose channels are not padded."""
    return Nhwc64(storage).pixel_bytes(channels) if storage in ACTIVATIONS else channels
