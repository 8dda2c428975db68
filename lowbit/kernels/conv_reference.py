"""What one lowered convolution is, and exactly what it computes, in plain torch on integer codes.

Activations are codes in NCHW, int32: "u4" holds 0..15 and "s8" holds -128..127; the value of a code is code * scale, and
there is no zero point anywhere, so that padding is code 0. Weights are int8 codes; 4-bit ones lie in -8..7. The kernels of
sm_80 and sm_90 compute the same codes bit for bit.

    t = fma(float32(sum), s[o], b[o])            sum: exact, int32
    t = fma(float32(residual code), g, t)        conv + add, or fma(float32(second sum), s2[o], t) with a second product
    s8:  clamp(rne(t), 0 with ReLU else -128, 127)
    u4:  clamp(rne(t), 0, 255) >> 4              s, b, g (and s2) hold 16 times the scale, b another 7.5: see `requantize`
    f16, f32:  t, max(t, 0) with ReLU            s, b, g give the value itself

Every fma is float32 and rounds once. Source of the u4 rounding: bits 4 to 7 of a byte that has been rounded and saturated are
floor(v + 0.5) saturated to 0..15, so ReLU, clamping and rounding come with one conversion instruction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as functional
from torch import Tensor

Storage = Literal["u4", "s8", "f16", "f32"]

CODE_RANGE: dict[Storage, tuple[int, int]] = {"u4": (0, 15), "s8": (-128, 127)}
"""Smallest and largest code of the storages that a convolution reads; f16 and f32 are written only."""

DTYPES: dict[Storage, torch.dtype] = {"u4": torch.int32, "s8": torch.int32, "f16": torch.float16, "f32": torch.float32}
"""What `conv_reference` returns for an output storage."""

U4_STEPS = 16.0
"""Steps of the byte from which a u4 code is cut for one step of the code."""

_FLOAT32_EXACT = 1 << 24


@dataclass(frozen=True, eq=False)
class SecondProduct:
    """A convolution of another input, added before requantizing: the downsample branch folded into the last convolution.

    weight int8 [O, C2, R, S]; s float32 [O] multiplies its sum; `x` is the storage of its input.
    """

    weight: Tensor
    s: Tensor
    x: Storage
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        _check_product("the second product", self.weight, self.s, self.x, self.stride, self.padding)


@dataclass(frozen=True, eq=False)
class ConvLayer:
    """One lowered convolution: weight int8 [O, C, R, S]; s, b float32 [O]; groups 1, dilation 1.

    `x`, `y` and `residual` are storages; `residual` is None where nothing is added, and `g` is what its codes count. At most
    one of `residual` and `second` is given. `name` is for tables. Raises ValueError for anything that is not so.
    """

    weight: Tensor
    s: Tensor
    b: Tensor
    x: Storage
    y: Storage
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    relu: bool = True
    residual: Storage | None = None
    g: float = 0.0
    second: SecondProduct | None = None
    name: str = ""

    def __post_init__(self) -> None:
        _check_product(f"convolution {self.name!r}", self.weight, self.s, self.x, self.stride, self.padding)
        outputs = self.weight.shape[0]
        if self.b.dtype != torch.float32 or self.b.shape != (outputs,):
            raise ValueError(f"b is float32 [{outputs}], got {self.b.dtype} {list(self.b.shape)}")
        if self.y not in DTYPES:
            raise ValueError(f"the output is stored as one of {', '.join(DTYPES)}, got {self.y!r}")
        if self.y == "u4" and not self.relu:
            raise ValueError("u4 holds no negative values: an output without ReLU is stored as s8, f16 or f32")
        if self.residual is not None and self.residual not in CODE_RANGE:
            raise ValueError(f"a residual is stored as one of {', '.join(CODE_RANGE)}, got {self.residual!r}")
        if self.residual is not None and self.second is not None:
            raise ValueError("a convolution adds a residual or a second product, not both")
        if self.second is not None and self.second.weight.shape[0] != outputs:
            raise ValueError(f"both products have {outputs} outputs, the second has {self.second.weight.shape[0]}")

    @property
    def kernel(self) -> tuple[int, int]:
        return int(self.weight.shape[2]), int(self.weight.shape[3])

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the output for an input of this height and width."""
        return output_size((height, width), self.kernel, self.stride, self.padding)

    def to(self, device: torch.device | str) -> ConvLayer:
        """The same layer with its tensors on `device`."""
        second = self.second
        if second is not None:
            second = SecondProduct(second.weight.to(device), second.s.to(device), second.x, second.stride, second.padding)
        return ConvLayer(
            self.weight.to(device), self.s.to(device), self.b.to(device), self.x, self.y, self.stride, self.padding, self.relu,
            self.residual, self.g, second, self.name,
        )  # fmt: skip


@dataclass(frozen=True)
class SumLayer:
    """A sum of codes, or one value's ReLU or other scale, that no convolution has inside: what `ConvLayer` says of its sums
    and residuals, of codes and scalars.

        t = fma(float32(x code), s, b), then fma(float32(other code), g, t) with another value; y from t as everywhere

    `x`, `y` and `other` are u4 or s8; s, b and g come from `requantize`. Raises ValueError for anything that is not so.
    """

    x: Storage
    y: Storage
    s: float
    b: float
    relu: bool = True
    other: Storage | None = None
    g: float = 0.0

    def __post_init__(self) -> None:
        stored = [name for name in (self.x, self.y, self.other) if name is not None]
        if any(name not in CODE_RANGE for name in stored):
            raise ValueError(f"sums are of codes, {' or '.join(CODE_RANGE)}, got {', '.join(stored)}")
        if self.y == "u4" and not self.relu:
            raise ValueError("u4 holds no negative values: a sum without ReLU is stored as s8")


def output_size(
    size: tuple[int, int], kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
) -> tuple[int, int]:
    """Height and width that a window of `kernel` leaves of `size`; raises ValueError where nothing is left."""
    out = tuple((size[i] + 2 * padding[i] - kernel[i]) // stride[i] + 1 for i in (0, 1))
    if min(out) < 1:
        raise ValueError(f"a window of {kernel} with padding {padding} does not fit into {size[0]} x {size[1]} pixels")
    return out[0], out[1]


def requantize(
    weight_scale: Tensor, bias: Tensor | None, x_scale: float, y_scale: float, y: Storage, residual_scale: float | None = None
) -> tuple[Tensor, Tensor, float]:
    """(s, b, g) of a `ConvLayer` from real scales, rounded to float32 once: value = code * scale everywhere.

    weight_scale [O] per output channel, bias [O] or None, x_scale, y_scale and residual_scale per tensor; y_scale is 1 for f16
    and f32, whose output is the value itself. The weight scale of a second product gives its s in the same way.
    """
    steps = U4_STEPS if y == "u4" else 1.0
    s = weight_scale.double() * (x_scale * steps / y_scale)
    b = torch.zeros_like(s) if bias is None else bias.double() * (steps / y_scale)
    if y == "u4":
        b = b + (U4_STEPS - 1) / 2
    g = 0.0 if residual_scale is None else residual_scale * steps / y_scale
    return s.float(), b.float(), float(torch.tensor(g, dtype=torch.float32))


def conv_reference(x: Tensor, layer: ConvLayer, residual: Tensor | None = None, second: Tensor | None = None) -> Tensor:
    """Output codes int32 [N, O, Ho, Wo] (or values, for f16 and f32) of codes x [N, C, H, W], exact on any device.

    `residual` [N, O, Ho, Wo] are the codes added, `second` [N, C2, H2, W2] the input of the second product; each is given
    exactly where the layer has one. Raises ValueError for codes that the storage does not hold.
    """
    _check_given("residual", residual, layer.residual is not None)
    _check_given("second", second, layer.second is not None)
    t = fma(_sum(x, layer.weight, layer.x, layer.stride, layer.padding), _channels(layer.s), _channels(layer.b))
    if residual is not None and layer.residual is not None:
        _check_codes(residual, layer.residual)
        t = fma(residual, torch.tensor(layer.g, dtype=torch.float32, device=x.device), t)
    if second is not None and layer.second is not None:
        p = layer.second
        t = fma(_sum(second, p.weight, p.x, p.stride, p.padding), _channels(p.s), t)
    return _stored(t, layer.y, layer.relu)


def _stored(t: Tensor, y: Storage, relu: bool) -> Tensor:
    """What is stored of t: codes, or values for f16 and f32."""
    if y == "u4":
        return t.round().clamp(0, 255).to(torch.int32) >> 4
    if y == "s8":
        return t.round().clamp(0 if relu else -128, 127).to(torch.int32)
    return (t.relu() if relu else t).to(DTYPES[y])


def sum_reference(x: Tensor, layer: SumLayer, other: Tensor | None = None) -> Tensor:
    """Output codes int32 [N, C, H, W] of codes x, and of those of `other`, which is given where the layer has one."""
    _check_given("other", other, layer.other is not None)
    _check_codes(x, layer.x)
    t = fma(x, *(torch.tensor(value, dtype=torch.float32, device=x.device) for value in (layer.s, layer.b)))
    if other is not None and layer.other is not None:
        _check_codes(other, layer.other)
        t = fma(other, torch.tensor(layer.g, dtype=torch.float32, device=x.device), t)
    return _stored(t, layer.y, layer.relu)


def max_pool_reference(
    codes: Tensor, window: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int] = (0, 0)
) -> Tensor:
    """Largest code of each window of codes [N, C, H, W]; what lies outside the image does not count."""
    pooled = functional.max_pool2d(codes.float(), window, stride, padding)
    return pooled.to(codes.dtype)


def average_pool_reference(codes: Tensor, scale: float) -> Tensor:
    """Mean value float32 [N, C] of all pixels: float32(sum of codes) * float32(scale / pixels), one product."""
    pixels = codes.shape[2] * codes.shape[3]
    factor = torch.tensor(scale / pixels, dtype=torch.float32, device=codes.device)
    return codes.sum(dim=(2, 3), dtype=torch.int64).float() * factor


def quantize_reference(x: Tensor, gain: Tensor, shift: Tensor, storage: Storage) -> Tensor:
    """Codes int32 clamp(rne(fma(float32(x), gain[c], shift[c]))) of values x [N, C, H, W]; gain, shift float32 [C]. NaN has the
    smallest code."""
    low, high = CODE_RANGE[storage]
    return fma(x, _channels(gain), _channels(shift)).nan_to_num(nan=low).round().clamp(low, high).to(torch.int32)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """float32(a) * b + c in float32, rounded once, on any device; a may be integer.

    A product of two float32 numbers is exact in float64. The sum is made odd where float64 had to round it (Boldo and
    Melquiond, "Emulation of a FMA and correctly rounded sums", 2008), so that rounding it to float32 is rounding the exact sum.
    """
    product = a.float().double() * b.double()
    addend = c.double()
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(torch.int64)
    odd = torch.where((error < 0) != (total < 0), bits - 1, bits) | 1
    return torch.where((error != 0) & total.isfinite(), odd, bits).view(torch.float64).float()


def _sum(x: Tensor, weight: Tensor, storage: Storage, stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
    """The convolution of codes, exact: every partial sum is an integer that the floating-point type holds."""
    _check_codes(x, storage)
    largest = max(abs(limit) for limit in CODE_RANGE[storage])
    bound = largest * int(weight.abs().to(torch.int32).flatten(1).sum(1).max()) if weight.numel() else 0
    # On a GPU float32 may mean tf32 and a fast algorithm may mean other sums; float64 does not.
    dtype = torch.float32 if x.device.type == "cpu" and bound < _FLOAT32_EXACT else torch.float64
    return functional.conv2d(x.to(dtype), weight.to(x.device, dtype), None, stride, padding).to(torch.int32)


def _channels(per_channel: Tensor) -> Tensor:
    return per_channel[:, None, None]


def _check_given(name: str, tensor: Tensor | None, wanted: bool) -> None:
    if (tensor is not None) != wanted:
        raise ValueError(f"the layer has {'a' if wanted else 'no'} {name}, got {'none' if tensor is None else 'one'}")


def _check_codes(codes: Tensor, storage: Storage) -> None:
    low, high = CODE_RANGE[storage]
    if codes.is_floating_point() or codes.dim() != 4:
        raise ValueError(f"codes are an integer tensor [N, C, H, W], got {codes.dtype} {list(codes.shape)}")
    if codes.numel() and (int(codes.min()) < low or int(codes.max()) > high):
        raise ValueError(f"{storage} codes lie in {low}..{high}, got {int(codes.min())}..{int(codes.max())}")


def _check_product(what: str, weight: Tensor, s: Tensor, x: Storage, stride: tuple[int, int], padding: tuple[int, int]) -> None:
    if weight.dtype != torch.int8 or weight.dim() != 4:
        raise ValueError(f"{what}: weights are int8 [O, C, R, S], got {weight.dtype} {list(weight.shape)}")
    if s.dtype != torch.float32 or s.shape != weight.shape[:1]:
        raise ValueError(f"{what}: s is float32 [{weight.shape[0]}], got {s.dtype} {list(s.shape)}")
    if x not in CODE_RANGE:
        raise ValueError(f"{what}: its input is stored as one of {', '.join(CODE_RANGE)}, got {x!r}")
    if min(stride) < 1 or min(padding) < 0 or any(math.floor(v) != v for v in (*stride, *padding)):
        raise ValueError(f"{what}: strides are 1 or more and paddings 0 or more, got {stride} and {padding}")
