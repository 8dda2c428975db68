"""Bit planes: codes of odd width cut into fields of 8, 4, 2 and 1 bits, which fill 32-bit words without a seam.

A 6-bit code does not divide a word; a 4-bit and a 2-bit field do. The high-order bits of the code go to the widest
plane, the low-order bits to the narrowest:

    6-bit code, fp6_e3m2    s e e e m m          4-bit plane: s e e e (sign and exponent)    2-bit plane: m m
    7-bit code              b6 b5 b4 b3 b2 b1 b0  4-bit plane: b6-b3    2-bit plane: b2 b1    1-bit plane: b0

Each plane is aligned on its own, so a kernel reads whole words of each. Source: the split of 6 = 4 + 2 and 5 = 4 + 1 is
FP6-LLM's (arXiv:2401.14112).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.hardware.conversions import PLANES

WORD_BITS = 32


def plane_widths(bits: int) -> tuple[int, ...]:
    """Widths of the planes of a `bits`-bit code, widest first: 6 -> (4, 2). Raises ValueError unless 2 <= bits <= 8."""
    if bits not in PLANES:
        raise ValueError(f"codes have 2 to 8 bits, got {bits}")
    return PLANES[bits]


def check_codes(codes: Tensor, bits: int) -> None:
    """Raises ValueError unless `codes` is a uint8 matrix [N, K] of values below 2^bits."""
    plane_widths(bits)
    if codes.dtype != torch.uint8 or codes.dim() != 2:
        raise ValueError(f"codes are a uint8 tensor [N, K], got {codes.dtype} {list(codes.shape)}")
    if codes.numel() and int(codes.max()) >> bits:
        raise ValueError(f"codes of {bits} bits are below {1 << bits}, got {int(codes.max())}")


def split_planes(codes: Tensor, bits: int) -> tuple[Tensor, ...]:
    """Planes of codes uint8 [...], each uint8 [...] with fields of the widths of `plane_widths`."""
    planes = []
    low_bits = bits
    for width in plane_widths(bits):
        low_bits -= width
        planes.append((codes >> low_bits) & ((1 << width) - 1))
    return tuple(planes)


def join_planes(planes: tuple[Tensor, ...], bits: int) -> Tensor:
    """Codes uint8 [...] of planes uint8 [...]; the inverse of `split_planes`. Raises ValueError if planes are missing."""
    widths = plane_widths(bits)
    if len(planes) != len(widths):
        raise ValueError(f"codes of {bits} bits have planes of {widths} bits, got {len(planes)} planes")
    codes = torch.zeros_like(planes[0])
    for plane, width in zip(planes, widths, strict=True):
        codes = (codes << width) | plane
    return codes


def pack_plane(fields: Tensor, width: int) -> Tensor:
    """Words int32 [..., ceil(K * width / 32)] of fields uint8 [..., K] of `width` = 1, 2, 4 or 8 bits.

    Field i of a word lies at bit i * width; K is filled up to whole words with zero fields.
    """
    per_word = WORD_BITS // width
    words = -(-fields.shape[-1] // per_word)
    padded = torch.nn.functional.pad(fields, (0, words * per_word - fields.shape[-1]))
    slots = padded.reshape(*fields.shape[:-1], words, per_word)
    packed = torch.zeros(slots.shape[:-1], dtype=torch.int32, device=fields.device)
    for slot in range(per_word):
        packed |= slots[..., slot].to(torch.int32) << (slot * width)
    return packed


def unpack_plane(words: Tensor, width: int, k: int) -> Tensor:
    """Fields uint8 [..., k] of words int32 [..., ceil(k * width / 32)]; the inverse of `pack_plane`."""
    per_word = WORD_BITS // width
    if words.shape[-1] != -(-k // per_word):
        raise ValueError(f"{k} fields of {width} bits are {-(-k // per_word)} words a row, got {words.shape[-1]}")
    mask = (1 << width) - 1  # also clears what the arithmetic shift of a negative int32 drags in
    fields = [((words >> (slot * width)) & mask).to(torch.uint8) for slot in range(per_word)]
    return torch.stack(fields, dim=-1).flatten(-2)[..., :k].contiguous()
