"""Convolutions of codes, their sums and pools, in plain torch on integer codes, exact on any device.

`formats/conv.py` defines the operations. Tests and CPUs run these functions; the kernels return the same codes bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as functional
from torch import Tensor

from lowbit.formats.conv import FLOATS, Axis, ConvLayer, GateSpec, ResizeSpec, SumSpec, code_range

_FLOAT32_EXACT = 1 << 24


def conv_reference(x: Tensor, layer: ConvLayer, residual: Tensor | None = None, second: Tensor | None = None) -> Tensor:
    """Returns output codes int32 [N, O, Ho, Wo] (or values, for f16 and f32) of codes x [N, C, H, W], exact on any device.

    `residual` [N, O, Ho, Wo] are the codes to add, `second` [N, C2, H2, W2] the input of the second product. Each is given if
    and only if the layer has it. Raises ValueError for codes out of the storage's range.
    """
    _check_given("residual", residual, layer.residual is not None)
    _check_given("second", second, layer.second is not None)
    total = _sum(x, layer.weight, layer.x, layer.stride, layer.padding, layer.groups)
    t = fma(total, _channels(layer.s), _channels(layer.b))
    if residual is not None and layer.residual is not None:
        _check_codes(residual, layer.residual)
        t = fma(residual, torch.tensor(layer.g, dtype=torch.float32, device=x.device), t)
    if second is not None and layer.second is not None:
        p = layer.second
        t = fma(_sum(second, p.weight, p.x, p.stride, p.padding), _channels(p.s), t)
    return _stored(t, layer.y, layer.relu)


def _stored(t: Tensor, y: str, relu: bool) -> Tensor:
    """Converts t to its storage: codes, or values for f16 and f32."""
    if y == "u4":
        return t.round().clamp(0, 255).to(torch.int32) >> 4
    if y == "s8":
        return t.round().clamp(0 if relu else -128, 127).to(torch.int32)
    return (t.relu() if relu else t).to(FLOATS[y])


def sum_reference(x: Tensor, layer: SumSpec, other: Tensor | None = None) -> Tensor:
    """Returns output codes int32 [N, C, H, W] of codes x and, if the layer has one, of `other`."""
    _check_given("other", other, layer.other is not None)
    _check_codes(x, layer.x)
    t = fma(x, *(torch.tensor(value, dtype=torch.float32, device=x.device) for value in (layer.s, layer.b)))
    if other is not None and layer.other is not None:
        _check_codes(other, layer.other)
        t = fma(other, torch.tensor(layer.g, dtype=torch.float32, device=x.device), t)
    return _stored(t, layer.y, layer.relu)


def map_reference(codes: Tensor, table: Tensor) -> Tensor:
    """Returns the codes int32 table[code + 128] of s8 codes of any shape; the table is int8 [256]."""
    return table.to(codes.device)[codes.long() + 128].to(torch.int32)


def gate_reference(x: Tensor, gate: Tensor, layer: GateSpec) -> Tensor:
    """Returns the s8 codes int32 [N, C, H, W] of codes x times the codes of a gate [N, C, 1, 1]."""
    _check_codes(x, layer.x)
    _check_codes(gate, "s8")
    s, zero = (torch.tensor(value, dtype=torch.float32, device=x.device) for value in (layer.s, 0.0))
    return _stored(fma(x * gate, s, zero), "s8", False)


def resize_reference(codes: Tensor, layer: ResizeSpec, storage: str) -> Tensor:
    """Returns the codes int32 [N, C, Ho, Wo] of an image of codes [N, C, H, W] at another size. Raises ValueError for sizes
    that have no integer form."""
    _check_codes(codes, storage)
    height, width = codes.shape[2:]
    reasons = layer.refusals((height, width))
    if reasons:
        raise ValueError(reasons[0])
    rows, columns = layer.axes((height, width))
    first, second, weight = _axis(rows, height, layer.size[0], codes.device)
    if layer.mode == "nearest":
        return codes[:, :, first][..., _axis(columns, width, layer.size[1], codes.device)[0]].to(torch.int32)
    lines = codes[:, :, first] * (rows.whole - weight)[:, None] + codes[:, :, second] * weight[:, None]
    first, second, weight = _axis(columns, width, layer.size[1], codes.device)
    total = lines[..., first] * (columns.whole - weight) + lines[..., second] * weight
    s, b = (
        torch.tensor(value, dtype=torch.float32, device=codes.device) for value in layer.constants((height, width), storage)
    )
    return _stored(fma(total, s, b), storage, storage == "u4")


def _axis(axis: Axis, given: int, out: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the first and the second input pixel of each output pixel of an axis, and the weight of the second; int64."""
    n = (torch.arange(out, device=device) * axis.step + axis.shift).clamp(min=0)
    first = n // axis.whole
    return first, (first + 1).clamp(max=given - 1), n % axis.whole


def concat_reference(parts: Sequence[Tensor], layers: Sequence[SumSpec]) -> Tensor:
    """Returns the codes int32 [N, C, H, W] of the channels of all parts, each rescaled by its layer to the same scale."""
    return torch.cat([sum_reference(x, layer) for x, layer in zip(parts, layers, strict=True)], 1)


def max_pool_reference(
    codes: Tensor, window: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int] = (0, 0)
) -> Tensor:
    """Largest code of each window of codes [N, C, H, W]; padding does not count."""
    pooled = functional.max_pool2d(codes.float(), window, stride, padding)
    return pooled.to(codes.dtype)


def average_pool_reference(codes: Tensor, scale: float) -> Tensor:
    """Mean value float32 [N, C] of all pixels: float32(sum of codes) * float32(scale / pixels), one product."""
    pixels = codes.shape[2] * codes.shape[3]
    factor = torch.tensor(scale / pixels, dtype=torch.float32, device=codes.device)
    return codes.sum(dim=(2, 3), dtype=torch.int64).float() * factor


def quantize_reference(x: Tensor, gain: Tensor, shift: Tensor, storage: str) -> Tensor:
    """Codes int32 clamp(rne(fma(float32(x), gain[c], shift[c]))) of values x [N, C, H, W]; gain, shift float32 [C]. NaN becomes
    the smallest code."""
    low, high = code_range(storage)
    return fma(x, _channels(gain), _channels(shift)).nan_to_num(nan=low).round().clamp(low, high).to(torch.int32)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """float32(a) * b + c in float32, rounded once, on any device; a may be integer.

    A product of two float32 numbers is exact in float64. Where float64 had to round the sum, its last bit is set (Boldo and
    Melquiond, "Emulation of a FMA and correctly rounded sums", 2008), so that rounding it to float32 gives the same number as
    rounding the exact sum.
    """
    product = a.float().double() * b.double()
    addend = c.double()
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(torch.int64)
    odd = torch.where((error < 0) != (total < 0), bits - 1, bits) | 1
    return torch.where((error != 0) & total.isfinite(), odd, bits).view(torch.float64).float()


def _sum(x: Tensor, weight: Tensor, storage: str, stride: tuple[int, int], padding: tuple[int, int], groups: int = 1) -> Tensor:
    """The convolution of codes, exact: the floating-point type represents every partial sum, which is an integer."""
    _check_codes(x, storage)
    largest = max(abs(limit) for limit in code_range(storage))
    bound = largest * int(weight.abs().to(torch.int32).flatten(1).sum(1).max()) if weight.numel() else 0
    # On a GPU a float32 convolution may use tf32 or an algorithm with inexact sums; a float64 one does not.
    dtype = torch.float32 if x.device.type == "cpu" and bound < _FLOAT32_EXACT else torch.float64
    y = functional.conv2d(x.to(dtype), weight.to(x.device, dtype), None, stride, padding, groups=groups)
    return y.to(torch.int32)


def _channels(per_channel: Tensor) -> Tensor:
    return per_channel[:, None, None]


def _check_given(name: str, tensor: Tensor | None, wanted: bool) -> None:
    if (tensor is not None) != wanted:
        raise ValueError(f"the layer has {'a' if wanted else 'no'} {name}, got {'none' if tensor is None else 'one'}")


def _check_codes(codes: Tensor, storage: str) -> None:
    low, high = code_range(storage)
    if codes.is_floating_point() or codes.dim() != 4:
        raise ValueError(f"codes are an integer tensor [N, C, H, W], got {codes.dtype} {list(codes.shape)}")
    if codes.numel() and (int(codes.min()) < low or int(codes.max()) > high):
        raise ValueError(f"{storage} codes lie in {low}..{high}, got {int(codes.min())}..{int(codes.max())}")
