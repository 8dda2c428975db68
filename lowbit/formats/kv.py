"""Number formats of keys and values in the cache: 16, fp8, int8 and int4, with one scale for each token and head.

A row is the key or the value of one token and kv head, head_dim elements. Its scale is computed from the row itself when the
token is appended, never read from a file:

    fp8    value = e4m3(code) * scale        scale = amax / 448
    int8   value = (code - 128) * scale      scale = amax / 127; codes 1 to 255
    int4   value = (code - 7.5) * scale      scale = amax / 7.5; 16 levels, none of them 0

Scales are rounded to fp16 first, and codes are chosen for the rounded scale. Scales above 65504, the largest fp16 number,
become 65504: such rows saturate. Rows of zeros have scale 0 and are read as zeros. A row with an infinity or NaN has the scale
NaN and is read as NaN in all its elements; other rows are not affected.

A rotated format multiplies blocks of the row by a Hadamard matrix before rounding, so that outliers spread over the block. The
block is the largest power of two that divides head_dim. int4 is rotated by default. Source: S. Ashkboos et al., "QuaRot:
Outlier-Free 4-Bit Inference in Rotated LLMs", arXiv:2404.00456.

Formats and their names need no torch; functions of rows import it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MOST_SCALE = 65504.0
"""Largest scale: the largest fp16 number."""

_KV_NAME = re.compile(r"(?:int([48])|(fp8))(-rotated|-plain)?")
_SHORT = {"8": "int8", "4": "int4"}

KV_GRAMMAR = (
    "16 (the model's type), fp8, int8 or int4 for keys and values, or both apart as k<format>v<format>, such as k8v4 (int8"
    " keys, int4 values) or kfp8vint4; -rotated or -plain after a format changes its rotation, such as int4-plain"
)
"""The names that `parse_kv` takes, in words."""


@dataclass(frozen=True)
class KVFormat:
    """A number format of keys or values: its name ("16", "fp8", "int8" or "int4"), the bits of a code, and whether rows are
    rotated. "16" means the model's own type, which is not quantized."""

    name: str
    bits: int
    rotated: bool = False

    def __post_init__(self) -> None:
        if {"16": 16, "fp8": 8, "int8": 8, "int4": 4}.get(self.name) != self.bits or (self.name == "16" and self.rotated):
            raise ValueError(
                f"formats of keys and values are {KV_GRAMMAR}; got {self.name!r}, {self.bits} bits, {self.rotated=}"
            )

    @property
    def quantized(self) -> bool:
        """False for 16 bits."""
        return self.name != "16"

    @property
    def largest(self) -> float:
        """The scale is the row's largest magnitude divided by this."""
        return {"fp8": 448.0, "int8": 127.0, "int4": 7.5}[self.name]

    @property
    def offset(self) -> float:
        """The number that is subtracted from an integer code; 0 for fp8."""
        return {"fp8": 0.0, "int8": 128.0, "int4": 7.5}[self.name]

    def __str__(self) -> str:
        return self.name + ("" if self.rotated == (self.name == "int4") else "-rotated" if self.rotated else "-plain")


@dataclass(frozen=True)
class KVScheme:
    """The formats of keys and of values. `str()` is the name that `parse_kv` takes."""

    k: KVFormat
    v: KVFormat

    def __post_init__(self) -> None:
        if self.k.quantized != self.v.quantized:
            raise ValueError(f"keys and values are both quantized or both in 16 bits, got {self.k} and {self.v}")

    @property
    def quantized(self) -> bool:
        """False if keys and values have the model's type."""
        return self.k.quantized

    def __str__(self) -> str:
        if self.k == self.v:
            return str(self.k)
        short = {name: digit for digit, name in _SHORT.items()}
        k, v = (short.get(str(part), str(part)) for part in (self.k, self.v))
        return f"k{k}v{v}"


KV16 = KVScheme(KVFormat("16", 16), KVFormat("16", 16))
"""Keys and values in the model's own type."""


def parse_kv(text: str) -> KVScheme:
    """Returns the scheme of a name (see `KV_GRAMMAR`), such as "16", "fp8", "int4" or "k8v4". Raises ValueError for others."""
    if text == "16":
        return KV16
    if _KV_NAME.fullmatch(text):
        return KVScheme(_format(text), _format(text))
    apart = re.fullmatch(r"k([a-z0-9-]+?)v([a-z0-9-]+)", text)
    names = [_SHORT.get(name, name) for name in apart.groups()] if apart else []
    if not names or not all(map(_KV_NAME.fullmatch, names)):
        raise ValueError(f"formats of keys and values are {KV_GRAMMAR}; got {text!r}")
    return KVScheme(_format(names[0]), _format(names[1]))


def _format(text: str) -> KVFormat:
    name, _, rotation = text.partition("-")
    return KVFormat(name, 4 if name == "int4" else 8, name == "int4" if not rotation else rotation == "rotated")


def head_block(head_dim: int) -> int:
    """Returns the block of a rotation: the largest power of two that divides head_dim."""
    return head_dim & -head_dim


def rotate_heads(x: Tensor, block: int) -> Tensor:
    """Returns x [.., head_dim] times Sylvester's Hadamard matrix / sqrt(block), block by block; its own inverse.

    x is float32 or float64. The butterfly steps are for elements 1, 2, 4, .. apart, in this order, and the factor comes last.
    Kernels compute in the same order, so their float32 results have the same bits.
    """
    import torch

    apart = 1
    while apart < block:
        a, b = x.unflatten(-1, (-1, 2, apart)).unbind(-2)
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        apart *= 2
    return x * block**-0.5


def quantize_rows(x: Tensor, fmt: KVFormat) -> tuple[Tensor, Tensor]:
    """Returns codes uint8 [.., head_dim] and scales fp16 [..] of rows x [.., head_dim] of any float type.

    Computed in float32, or in float64 for float64 rows. Codes of rows with an infinity or NaN, whose scale is NaN, are 0.
    Raises ValueError for the format "16".
    """
    import torch

    _check_quantized(fmt)
    wide = x if x.dtype == torch.float64 else x.float()
    if fmt.rotated:
        wide = rotate_heads(wide, head_block(x.shape[-1]))
    amax = wide.abs().amax(-1)
    amax = torch.where(torch.isfinite(wide).all(-1), amax, torch.nan)
    scale = (amax * torch.tensor(1 / fmt.largest, dtype=wide.dtype)).clamp(max=MOST_SCALE).half()
    inverse = torch.where(scale > 0, 1 / scale.to(wide.dtype), 0.0)  # 0 if the scale is 0 or NaN
    ratio = wide.nan_to_num(0.0, 0.0, 0.0) * inverse[..., None]
    if fmt.name == "fp8":
        return ratio.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8), scale
    if fmt.name == "int8":
        return (ratio.round().clamp(-127, 127) + 128).to(torch.uint8), scale
    return (ratio + 7.5).round().clamp(0, 15).to(torch.uint8), scale


def dequantize_rows(codes: Tensor, scale: Tensor, fmt: KVFormat, dtype: torch.dtype) -> Tensor:
    """Returns rows [.., head_dim] in `dtype` of codes uint8 [.., head_dim] and scales fp16 [..], with the rotation undone.

    Computed in float32, or in float64 for float64, and rounded once. Raises ValueError for the format "16".
    """
    import torch

    _check_quantized(fmt)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = codes.view(torch.float8_e4m3fn).to(wide) if fmt.name == "fp8" else codes.to(wide) - fmt.offset
    rows = values * scale.to(wide)[..., None]
    return (rotate_heads(rows, head_block(rows.shape[-1])) if fmt.rotated else rows).to(dtype)


def _check_quantized(fmt: KVFormat) -> None:
    if not fmt.quantized:
        raise ValueError("16-bit keys and values have no codes: the formats with codes are fp8, int8 and int4")
