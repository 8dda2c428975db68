"""Codes as bytes: dense little-endian n-bit words, the layout on disk.

Code i of a row occupies bits i*bits .. i*bits + bits - 1 of that row's bit stream; bit j of the stream is bit j % 8 of
byte j // 8. No code is padded; only the last byte of a row may have unused high bits, which are zero. For 2, 4 and 8
bits this equals compressed-tensors' `weight_packed` words read as bytes; 3, 5, 6 and 7 bits cross byte boundaries.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def packed_bytes(k: int, bits: int) -> int:
    """Returns the number of bytes of a row of `k` codes of `bits` bits."""
    return -(-k * bits // 8)


def _period(bits: int) -> tuple[int, int]:
    """Returns (codes, bytes) of the shortest run of `bits`-bit codes that ends at a byte boundary."""
    return 8 // math.gcd(8, bits), bits // math.gcd(8, bits)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Returns codes uint8 [..., K], each below 2^bits, packed into bytes uint8 [..., ceil(K * bits / 8)]."""
    k = codes.shape[-1]
    if bits == 8:
        return codes.clone(memory_format=torch.contiguous_format)
    per_period, period_bytes = _period(bits)
    periods = -(-k // per_period)
    short = periods * per_period - k
    padded = torch.nn.functional.pad(codes, (0, short)) if short else codes
    c = padded.reshape(*codes.shape[:-1], periods, per_period)
    out = torch.zeros((*codes.shape[:-1], periods, period_bytes), dtype=torch.uint8, device=codes.device)
    for i in range(per_period):
        byte, shift = divmod(i * bits, 8)
        out[..., byte] |= c[..., i] << shift  # uint8 shifts drop the bits of the next byte
        if shift + bits > 8:
            out[..., byte + 1] |= c[..., i] >> (8 - shift)
    return out.flatten(-2)[..., : packed_bytes(k, bits)].contiguous()


def unpack_words(packed: Tensor, bits: int, k: int) -> Tensor:
    """Returns codes uint8 [..., k] from bytes uint8 [..., ceil(k * bits / 8)]; the inverse of `pack_words`.

    Raises ValueError for another number of bytes.
    """
    if packed.shape[-1] != packed_bytes(k, bits):
        raise ValueError(f"{k} codes of {bits} bits are {packed_bytes(k, bits)} bytes a row, got {packed.shape[-1]}")
    if bits == 8:
        return packed.clone(memory_format=torch.contiguous_format)
    per_period, period_bytes = _period(bits)
    periods = -(-k // per_period)
    short = periods * period_bytes - packed.shape[-1]
    padded = torch.nn.functional.pad(packed, (0, short)) if short else packed
    b = padded.reshape(*packed.shape[:-1], periods, period_bytes)
    mask = (1 << bits) - 1
    out = torch.empty((*packed.shape[:-1], periods, per_period), dtype=torch.uint8, device=packed.device)
    for i in range(per_period):
        byte, shift = divmod(i * bits, 8)
        code = b[..., byte] >> shift
        if shift + bits > 8:
            code = code | (b[..., byte + 1] << (8 - shift))
        out[..., i] = code & mask
    return out.flatten(-2)[..., :k].contiguous()
