"""Low-bit convolutions: the storage of codes, the windows, and the exact arithmetic.

Activations are codes in NCHW: "u4" holds 0..15 and "s8" holds -128..127; the value of a code is code * scale, and there is no
zero point anywhere, so that padding is code 0. Weights are "s8", or "s4" where all of them lie in -8..7.

    t = fma(float32(sum), s[o], b[o])            sum: exact, int32
    t = fma(float32(residual code), g, t)        conv + add, or fma(float32(second sum), s2[o], t) with a second product
    s8:  clamp(rne(t), 0 with ReLU else -128, 127)
    u4:  clamp(rne(t), 0, 255) >> 4              s, b, g (and s2) include a factor of 16, and b another 7.5: see `requantize`
    f16, f32:  t, max(t, 0) with ReLU            s, b, g give the value itself

`requantize` computes s and b of output channel o, and g, from the scales and the bias. rne rounds to the nearest integer, ties
to even. Every fma is float32 and rounds once. The u4 rounding needs one conversion instruction for ReLU, clamping and rounding:
with v the value in steps of a code, bits 4 to 7 of the rounded and saturated byte are floor(v + 0.5), clamped to 0..15.
`kernels/reference/conv.py` computes this in plain torch; the kernels of sm_80 and sm_90 return the same codes bit for bit.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowbit.formats.number import IntFormat, int_format, uint_format

CODES: dict[str, IntFormat] = {"u4": uint_format(4), "s4": int_format(4), "s8": int_format(8)}
"""The number formats of stored codes by their PTX names; in memory they are two's complement."""

FLOATS: dict[str, torch.dtype] = {"f16": torch.float16, "f32": torch.float32}
"""Output storages that hold values instead of codes."""

ACTIVATIONS = ("u4", "s8")
"""The codes that a convolution reads and writes."""

STORAGES = (*ACTIVATIONS, *FLOATS)
"""All storages of an output."""

U4_STEPS = 16.0
"""A u4 code is the upper half of a byte: one step of the code is 16 steps of the byte."""

Pair = tuple[int, int]


def code_range(storage: str) -> tuple[int, int]:
    """Returns the smallest and largest code: (0, 15) for u4."""
    return int(CODES[storage].min), int(CODES[storage].max)


def stored_dtype(storage: str) -> torch.dtype:
    """Returns the dtype of a stored tensor; packed codes are uint8."""
    return FLOATS.get(storage, torch.uint8)


def weight_storage(codes: Tensor) -> str:
    """Returns "s4" if all codes are in -8 to 7, else "s8"."""
    low, high = code_range("s4")
    return "s4" if codes.numel() == 0 or (int(codes.min()) >= low and int(codes.max()) <= high) else "s8"


@dataclass(frozen=True)
class ProductSpec:
    """One product of a convolution: storages of x and w, input channels, and windows as (height, width)."""

    x: str
    w: str
    channels: int
    kernel: Pair
    stride: Pair
    padding: Pair

    @property
    def taps(self) -> int:
        return self.kernel[0] * self.kernel[1]

    @property
    def keeps_size(self) -> bool:
        """True if the windows are square and the output is as large as the input."""
        half = self.kernel[0] // 2
        return self.kernel == (2 * half + 1,) * 2 and self.stride == (1, 1) and self.padding == (half, half)

    def output_size(self, height: int, width: int) -> Pair:
        """Returns height and width of the output for an input of this height and width."""
        return output_size((height, width), self.kernel, self.stride, self.padding)


@dataclass(frozen=True)
class ConvSpec(ProductSpec):
    """A convolution without its tensors; the choice of a kernel depends on it. `residual` is the storage of the tensor that is
    added. `channels` counts all input channels; each of `groups` groups reads channels / groups of them. Dilation is 1.
    """

    outputs: int
    y: str
    relu: bool
    residual: str | None = None
    second: ProductSpec | None = None
    groups: int = 1

    @property
    def products(self) -> tuple[ProductSpec, ...]:
        """The first product and the second, if there is one."""
        return (self,) if self.second is None else (self, self.second)

    def __str__(self) -> str:
        kernel = "x".join(map(str, self.kernel)) + (f"/{self.stride[0]}" if max(self.stride) > 1 else "")
        added = "" if self.residual is None else f" + {self.residual}"
        if self.second is not None:
            added = f" + {self.second.x} x {self.second.w} shortcut"
        groups = "" if self.groups == 1 else f" in {self.groups} groups"
        return f"{self.channels} > {self.outputs} {kernel}{groups}, {self.x} x {self.w}{added} > {self.y}"


@dataclass(frozen=True, eq=False)
class SecondProduct:
    """A convolution of another input, added before requantizing: a downsample branch folded into the last convolution.

    weight int8 [O, C2, R, S]; s float32 [O] multiplies its sum; `x` is the storage of its input.
    """

    weight: Tensor
    s: Tensor
    x: str
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)

    def __post_init__(self) -> None:
        _check_product("the second product", self.weight, self.s, self.x, self.stride, self.padding)

    def to(self, device: torch.device | str) -> SecondProduct:
        """Returns the same product with its tensors on `device`."""
        return replace(self, weight=self.weight.to(device), s=self.s.to(device))


@dataclass(frozen=True, eq=False)
class ConvLayer:
    """One lowered convolution: weight int8 [O, C / groups, R, S]; s, b float32 [O]; dilation 1.

    `x`, `y` and `residual` are storages; `residual` is None if nothing is added, and `g` is the scale of its codes. At most one
    of `residual` and `second` is given, and neither with several groups. `name` is for tables. Raises ValueError for other
    tensors and storages.
    """

    weight: Tensor
    s: Tensor
    b: Tensor
    x: str
    y: str
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    relu: bool = True
    residual: str | None = None
    g: float = 0.0
    second: SecondProduct | None = None
    name: str = ""
    groups: int = 1

    def __post_init__(self) -> None:
        _check_product(f"convolution {self.name!r}", self.weight, self.s, self.x, self.stride, self.padding)
        outputs = self.weight.shape[0]
        if self.b.dtype != torch.float32 or self.b.shape != (outputs,):
            raise ValueError(f"b is float32 [{outputs}], got {self.b.dtype} {list(self.b.shape)}")
        if self.y not in STORAGES:
            raise ValueError(f"the output is stored as one of {', '.join(STORAGES)}, got {self.y!r}")
        if self.y == "u4" and not self.relu:
            raise ValueError("u4 holds no negative values: an output without ReLU is stored as s8, f16 or f32")
        if self.residual is not None and self.residual not in ACTIVATIONS:
            raise ValueError(f"a residual is stored as one of {', '.join(ACTIVATIONS)}, got {self.residual!r}")
        if self.residual is not None and self.second is not None:
            raise ValueError("a convolution adds a residual or a second product, not both")
        if self.second is not None and self.second.weight.shape[0] != outputs:
            raise ValueError(f"both products have {outputs} outputs, the second has {self.second.weight.shape[0]}")
        if type(self.groups) is not int or self.groups < 1 or outputs % self.groups:
            raise ValueError(f"{outputs} outputs are in a number of groups that divides them, got {self.groups}")
        if self.groups > 1 and (self.residual is not None or self.second is not None):
            raise ValueError(f"a convolution in {self.groups} groups adds nothing: make the sum an operation of its own")

    @functools.cached_property
    def spec(self) -> ConvSpec:
        """The layer without its tensors."""
        second = None if self.second is None else ProductSpec(*_product(self.second))
        outputs = int(self.weight.shape[0])
        return ConvSpec(*_product(self), outputs, self.y, self.relu, self.residual, second, self.groups)

    @property
    def channels(self) -> int:
        """Number of input channels, of all groups."""
        return int(self.weight.shape[1]) * self.groups

    @property
    def kernel(self) -> Pair:
        return int(self.weight.shape[2]), int(self.weight.shape[3])

    def output_size(self, height: int, width: int) -> Pair:
        """Returns height and width of the output for an input of this height and width."""
        return output_size((height, width), self.kernel, self.stride, self.padding)

    def to(self, device: torch.device | str) -> ConvLayer:
        """Returns the same layer with its tensors on `device`."""
        second = None if self.second is None else self.second.to(device)
        return replace(self, weight=self.weight.to(device), s=self.s.to(device), b=self.b.to(device), second=second)


def _product(layer: ConvLayer | SecondProduct) -> tuple[str, str, int, Pair, Pair, Pair]:
    """Returns the fields of a `ProductSpec`."""
    _, channels, *kernel = layer.weight.shape
    channels *= layer.groups if isinstance(layer, ConvLayer) else 1
    return layer.x, weight_storage(layer.weight), channels, (kernel[0], kernel[1]), layer.stride, layer.padding


@dataclass(frozen=True)
class SumSpec:
    """A sum of two code tensors, or a ReLU or rescaling of one tensor, that is not fused into a convolution.

        t = fma(float32(x code), s, b); with `other`, t = fma(float32(other code), g, t); y from t as in `ConvLayer`

    `x`, `y` and `other` are u4 or s8; s, b and g come from `requantize`. Raises ValueError for other storages.
    """

    x: str
    y: str
    s: float
    b: float
    relu: bool = True
    other: str | None = None
    g: float = 0.0

    def __post_init__(self) -> None:
        stored = [name for name in (self.x, self.y, self.other) if name is not None]
        if any(name not in ACTIVATIONS for name in stored):
            raise ValueError(f"sums are of codes, {' or '.join(ACTIVATIONS)}, got {', '.join(map(str, stored))}")
        if self.y == "u4" and not self.relu:
            raise ValueError("u4 holds no negative values: a sum without ReLU is stored as s8")


@dataclass(frozen=True)
class GateSpec:
    """A product of codes [N, C, H, W] and of a gate's codes [N, C, 1, 1], as in squeeze-and-excite.

        t = fma(float32(x code * gate code), s, 0); y = clamp(rne(t), -128, 127), stored as s8

    `x` is u4 or s8, the gate s8. Raises ValueError for other storages.
    """

    x: str
    s: float

    def __post_init__(self) -> None:
        if self.x not in ACTIVATIONS:
            raise ValueError(f"gates multiply codes, {' or '.join(ACTIVATIONS)}, got {self.x}")


@dataclass(frozen=True)
class Axis:
    """The positions of output pixels along one axis of the input, as fractions with the denominator `whole`.

    Output pixel j is at n / whole with n = max(j * step + shift, 0). It lies between the input's pixels n // whole and
    n // whole + 1 (at most the last one). The second of them has the weight n % whole, of `whole` in all.
    """

    step: int
    shift: int
    whole: int


MOST_RESIZE_STEPS = 1 << 16
"""Largest product of both axes' `whole`. Up to it, weighted sums of 8-bit codes are exact in float32."""


@dataclass(frozen=True)
class ResizeSpec:
    """Resizes an image of codes: repeats nearest pixels a whole number of times, or interpolates bilinearly.

        nearest:   y = x code
        bilinear:  sum of 4 codes, weighted by integers that add up to the product of both axes' `whole`; exact, int32
                   t = fma(float32(sum), s, b); y from t as in `ConvLayer`, u4 with ReLU; s and b from `constants`

    `size` is (height, width) of the output. `aligned`: the centres of the corner pixels stay where they are (align_corners of
    torch); otherwise the corners of the image do. The output has the scale and the storage of x.
    """

    mode: str
    size: Pair
    aligned: bool = False

    def refusals(self, size: Pair) -> tuple[str, ...]:
        """Returns why an image of `size` pixels cannot be resized in integers; empty if it can."""
        if self.mode not in ("nearest", "bilinear"):
            return (f"images are resized by nearest or bilinear, not by {self.mode}",)
        if min(*size, *self.size) < 1:
            return (f"images have at least one pixel, got {size} and {self.size}",)
        if self.mode == "nearest":
            whole = all(out % given == 0 for out, given in zip(self.size, size, strict=True))
            return () if whole else (f"nearest pixels are repeated a whole number of times, not from {size} to {self.size}",)
        rows, columns = self.axes(size)
        steps = rows.whole * columns.whole
        return () if steps <= MOST_RESIZE_STEPS else (f"bilinear weights of {size} to {self.size} are in 1 / {steps:,}",)

    def axes(self, size: Pair) -> tuple[Axis, Axis]:
        """Returns the vertical and the horizontal axis for an input of `size` pixels."""
        rows, columns = (self._axis(given, out) for given, out in zip(size, self.size, strict=True))
        return rows, columns

    def _axis(self, given: int, out: int) -> Axis:
        if self.mode == "nearest":
            return Axis(1, 0, out // given)
        if self.aligned:
            step, shift, whole = (given - 1, 0, out - 1) if out > 1 else (0, 0, 1)
        else:  # the centre of pixel j is at (j + 1/2) * given / out - 1/2
            step, shift, whole = 2 * given, given - out, 2 * out
        common = math.gcd(step, shift, whole)
        return Axis(step // common, shift // common, whole // common)

    def constants(self, size: Pair, storage: str) -> tuple[float, float]:
        """Returns (s, b) of the mode "bilinear" for codes stored as `storage`, rounded to float32."""
        rows, columns = self.axes(size)
        one = torch.tensor([1.0 / (rows.whole * columns.whole)], dtype=torch.float64)
        s, b, _ = requantize(one, None, 1.0, 1.0, storage)
        return float(s), float(b)


def output_size(size: Pair, kernel: Pair, stride: Pair, padding: Pair) -> Pair:
    """Returns the output height and width; raises ValueError if the window does not fit."""
    out = tuple((size[i] + 2 * padding[i] - kernel[i]) // stride[i] + 1 for i in (0, 1))
    if min(out) < 1:
        raise ValueError(f"a window of {kernel} with padding {padding} does not fit into {size[0]} x {size[1]} pixels")
    return out[0], out[1]


def requantize(
    weight_scale: Tensor, bias: Tensor | None, x_scale: float, y_scale: float, y: str, residual_scale: float | None = None
) -> tuple[Tensor, Tensor, float]:
    """Returns (s, b, g) of a `ConvLayer`, rounded to float32 once, from the scales of its tensors (value = code * scale).

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


def _check_product(what: str, weight: Tensor, s: Tensor, x: str, stride: Pair, padding: Pair) -> None:
    if weight.dtype != torch.int8 or weight.dim() != 4:
        raise ValueError(f"{what}: weights are int8 [O, C, R, S], got {weight.dtype} {list(weight.shape)}")
    if s.dtype != torch.float32 or s.shape != weight.shape[:1]:
        raise ValueError(f"{what}: s is float32 [{weight.shape[0]}], got {s.dtype} {list(s.shape)}")
    if x not in ACTIVATIONS:
        raise ValueError(f"{what}: its input is stored as one of {', '.join(ACTIVATIONS)}, got {x!r}")
    if min(stride) < 1 or min(padding) < 0 or any(math.floor(v) != v for v in (*stride, *padding)):
        raise ValueError(f"{what}: strides are 1 or more and paddings 0 or more, got {stride} and {padding}")
