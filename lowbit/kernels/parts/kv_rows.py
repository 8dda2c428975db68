"""Rows of packed keys and values in plain Triton: rotation, scale, codes, and the places of bytes in pages (pack/kv_pages.py).

Tensors are [rows, lanes], where the number of lanes is a power of two; elements beyond the head are zero. `C` is a `KVRows`.
For equal rows, rotation, scales and codes have the same bits as those of formats/kv.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from lowbit.formats.kv import KVScheme, head_block
from lowbit.pack.kv_pages import padded_head

MAGIC = tl.constexpr(12582912.0)
"""1.5 * 2^23: x + MAGIC has the integer nearest to x, ties to even, in its low bits."""

MAGIC_BITS = tl.constexpr(0x4B400000)

MOST_SCALE = tl.constexpr(65504.0)


@dataclass(frozen=True)
class KVRows:
    """Formats of packed keys and values of heads of `head_dim` elements, for device code."""

    head_dim: int
    k: str
    v: str
    k_rotated: bool
    v_rotated: bool

    @classmethod
    def of(cls, kv: KVScheme, head_dim: int) -> KVRows | None:
        """Returns the formats of a scheme; None for 16 bits."""
        if not kv.quantized:
            return None
        return cls(head_dim, kv.k.name, kv.v.name, kv.k.rotated, kv.v.rotated)

    @property
    def packed_dim(self) -> int:
        return padded_head(self.head_dim)

    @property
    def rotation_steps(self) -> int:
        return head_block(self.head_dim).bit_length() - 1

    @property
    def rotation_factor(self) -> float:
        return head_block(self.head_dim) ** -0.5


@triton.jit
def rotated_row(x, C: tl.constexpr):
    """Multiplies rows by a Hadamard matrix, block by block; this is its own inverse. A block is the largest power of two that
    divides the head."""
    ROWS: tl.constexpr = x.shape[0]
    LANES: tl.constexpr = x.shape[1]
    STEPS: tl.constexpr = C.rotation_steps
    for step in tl.static_range(STEPS):
        pairs = tl.reshape(x, (ROWS, LANES // (2 << step), 2, 1 << step))
        bits = pairs.to(tl.int32, bitcast=True)
        other = (tl.xor_sum(bits, axis=2, keep_dims=True) ^ bits).to(tl.float32, bitcast=True)
        sign = 1.0 - 2.0 * tl.arange(0, 2).to(tl.float32)
        x = tl.reshape(tl.fma(pairs, sign[None, None, :, None], other), (ROWS, LANES))
    return x * C.rotation_factor


@triton.jit
def scale_of(x, FORMAT: tl.constexpr):
    """Returns the fp16 scale [rows] of each row; NaN for rows with an infinity or NaN."""
    INVERSE: tl.constexpr = 1.0 / 448.0 if FORMAT == "fp8" else 1.0 / 127.0 if FORMAT == "int8" else 1.0 / 7.5
    scale = tl.minimum(tl.max(tl.abs(x), 1) * INVERSE, MOST_SCALE)
    return (scale + tl.sum(x * 0.0, 1)).to(tl.float16)


@triton.jit
def nearest(x):
    """Returns the nearest integers, ties to even, of numbers below 2^22. Results for larger numbers are meaningless."""
    return (x + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS


@triton.jit
def codes_of(x, scale, FORMAT: tl.constexpr):
    """Returns codes int32 of rows with scales fp16 [rows]."""
    wide = scale.to(tl.float32)
    inverse = tl.where(wide > 0, tl.div_rn(1.0, wide), 0.0)
    # For the integer formats `nearest` adds to this product. The compiler would fuse a plain product with that addition; a fma
    # with 0 is rounded on its own.
    ratio = x * inverse[:, None] if FORMAT == "fp8" else tl.fma(x, inverse[:, None], 0.0)
    if FORMAT == "int4":
        return tl.minimum(tl.maximum(nearest(ratio + 7.5), 0), 15)
    elif FORMAT == "int8":
        return tl.minimum(tl.maximum(nearest(ratio), -127), 127) + 128
    else:
        size = tl.abs(ratio)
        bits = size.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
        code = tl.where(size < 0.015625, nearest(size * 512.0), normal)
        return tl.where(ratio.to(tl.int32, bitcast=True) < 0, 128, 0) | tl.minimum(tl.maximum(code, 0), 126)


@triton.jit
def values_of(codes, FORMAT: tl.constexpr):
    """Returns the float32 values of codes int32, without scale."""
    if FORMAT == "int4":
        return codes.to(tl.float32) - 7.5
    elif FORMAT == "int8":
        return codes.to(tl.float32) - 128.0
    else:
        half = ((codes & 128) << 8 | (codes & 127) << 7).to(tl.int16).to(tl.float16, bitcast=True)
        return half.to(tl.float32) * 256.0


@triton.jit
def byte_place(place, d, FORMAT: tl.constexpr, VALUES: tl.constexpr, C: tl.constexpr):
    """Returns the index, within a page of a head, of the byte with the code of element d of token `place`. For 4-bit codes, d
    must be an element whose code is in the lower half of its byte (`low_elements`)."""
    W: tl.constexpr = 1 if FORMAT == "int4" else 2  # words of a lane for 8 elements of a token
    CHUNKS: tl.constexpr = C.packed_dim // 32
    octet, inside, chunk = place % 32 // 8, place % 8, d // 8
    word = (octet * CHUNKS + chunk // 4) * W
    if VALUES:
        lane = d % 8 * 4 + inside // 2
        if W == 1:
            byte = inside % 2 * 2 + chunk % 4 // 2
        else:
            word += chunk % 4 // 2
            byte = inside % 2 * 2 + chunk % 2
    else:
        lane = inside * 4 + chunk % 4
        if W == 1:
            byte = d % 2 * 2 + d % 8 // 4
        else:
            word += d % 8 // 4
            byte = d % 2 * 2 + d % 4 // 2
    return ((place // 32 * (CHUNKS * W) + word // 4) * 32 + lane) * 16 + word % 4 * 4 + byte


@triton.jit
def scale_place(place):
    """Returns the index of the scale of a token of a page."""
    return place // 32 * 32 + place % 8 * 4 + place % 32 // 8


@triton.jit
def low_elements(LANES: tl.constexpr, FORMAT: tl.constexpr, VALUES: tl.constexpr):
    """Returns the element of each byte of a row. A byte of 4-bit codes has two elements: the returned one in its lower half,
    and in its upper half the one 8 (values) or 2 (keys) higher."""
    if FORMAT != "int4":
        return tl.arange(0, LANES)
    else:
        i = tl.arange(0, LANES // 2)
        return i // 8 * 16 + i % 8 if VALUES else i // 2 * 4 + i % 2


@triton.jit
def joined_bytes(codes, FORMAT: tl.constexpr, VALUES: tl.constexpr):
    """Returns the bytes [rows, lanes or lanes / 2] of codes int32 [rows, lanes], in the order of `low_elements`."""
    APART: tl.constexpr = 8 if VALUES else 2
    if FORMAT != "int4":
        return codes.to(tl.uint8)
    else:
        pairs = tl.reshape(codes, (codes.shape[0], codes.shape[1] // (2 * APART), 2, APART))
        low, high = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        return tl.reshape(low | high << 4, (codes.shape[0], codes.shape[1] // 2)).to(tl.uint8)


@triton.jit
def parted_bytes(packed, FORMAT: tl.constexpr, VALUES: tl.constexpr):
    """Returns the codes int32 [rows, lanes] of bytes; the inverse of `joined_bytes`."""
    APART: tl.constexpr = 8 if VALUES else 2
    both = packed.to(tl.int32)
    if FORMAT != "int4":
        return both
    else:
        pairs = tl.reshape(both, (both.shape[0], both.shape[1] // APART, APART))
        codes = tl.permute(tl.join(pairs & 15, pairs >> 4), (0, 1, 3, 2))
        return tl.reshape(codes, (both.shape[0], both.shape[1] * 2))


@triton.jit
def store_rows(pages, scales, x, start, place, exist, FORMAT: tl.constexpr, ROTATED: tl.constexpr, VALUES: tl.constexpr,
               C: tl.constexpr):  # fmt: skip
    """Quantizes rows float32 [rows, lanes] and stores them at index `place` of a page. `start` int64 [rows] is page * kv_heads
    + head of each; only rows whose `exist` [rows] is True are stored."""
    LANES: tl.constexpr = x.shape[1]
    HEAD_BYTES: tl.constexpr = 128 * C.packed_dim // (2 if FORMAT == "int4" else 1)
    if ROTATED:
        x = rotated_row(x, C)
    scale = scale_of(x, FORMAT)
    packed = joined_bytes(codes_of(x, scale, FORMAT), FORMAT, VALUES)
    d = low_elements(LANES, FORMAT, VALUES)
    to = start[:, None] * HEAD_BYTES + byte_place(place, d, FORMAT, VALUES, C)[None, :]
    tl.store(pages + to, packed, mask=exist[:, None] & (d < C.packed_dim)[None, :])
    tl.store(scales + start * 128 + scale_place(place), scale, mask=exist)


@triton.jit
def load_rows(pages, scales, start, place, exist, LANES: tl.constexpr, FORMAT: tl.constexpr, ROTATED: tl.constexpr,
              VALUES: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Returns dequantized rows float32 [rows, lanes], with the rotation undone, at index `place` [rows] of a page. `start`
    int64 [rows] is page * kv_heads + head of each; rows whose `exist` [rows] is False are zeros."""
    HEAD_BYTES: tl.constexpr = 128 * C.packed_dim // (2 if FORMAT == "int4" else 1)
    d = low_elements(LANES, FORMAT, VALUES)
    at = start[:, None] * HEAD_BYTES + byte_place(place[:, None], d[None, :], FORMAT, VALUES, C)
    packed = tl.load(pages + at, mask=exist[:, None] & (d < C.packed_dim)[None, :], other=0)
    scale = tl.load(scales + start * 128 + scale_place(place), mask=exist, other=0.0).to(tl.float32)
    x = values_of(parted_bytes(packed, FORMAT, VALUES), FORMAT) * scale[:, None]
    x = tl.where((tl.arange(0, LANES) < C.head_dim)[None, :], x, 0.0)
    if ROTATED:
        x = rotated_row(x, C)
    return x
