"""A quantized matrix as the tensor-core kernels read it: codes in fragment order, scales beside them.

    codes           int32 [N/16, K/64, 32 * bits]            pack.fragment
    scale           fp16 or bf16 [N/16, G, 8, 2]             scales of groups along K: rows g and g + 8 for lane group g
                    fp16 or bf16 [N/16, G, 8, 4]             with zeros: those scales, then the zeros of both rows
    channel_scale   float32 [N]                              one scale per output channel, applied in the epilogue
                                                             (a power of two if there are scales of groups)
                    bf16 [N]                                 a power of two, if scales of groups are stored times 2^24

G is the number of groups along K. Lane group g of a warp is lanes 4g to 4g + 3. Zeros are subtracted from codes, so they are
stored by group even if scales are not. With integer zeros and a scale per channel or tensor, the scale is `channel_scale` in
float32, and each group has a scale of 1 and its zero; all are exact.

Scales of groups and floating-point zeros of 32 bits (GGUF's K types, DeepSeek's blocks) are rounded to fp16. Each row is first
divided by the power of two that makes its largest scale 1/2 to 1; the epilogue multiplies by that factor. The relative error of
a scale is at most 2^-11; for scales below 2^-13 of their row's maximum, the error is at most 2^-24 of the maximum. A module
saves the original scales. 16-bit scales are divided in the same way if they, or the weights, would leave fp16's normal range,
in which kernels with fp16 activations multiply codes by scales. For example, fp8_e5m2's scales are a 57344th of the largest
weight. Their dtype is kept; values are exact unless they are below 2^-13 of the row maximum.

Subnormal codes: scales of groups of symmetric integers of b = 2 to 7 bits are divided so that the largest of each row is 2^-9
to 2^-8, and stored multiplied by 2^24. A masked code is then a subnormal fp16 number, code * 2^-24, and one fma computes the
weight: this number times the stored scale, minus offset * scale, rounded once to fp16 (parts/dequantize.py). If a scale is at
least a 32nd of the row maximum, weights have the same bits as without this method. Down to 2^-(3 + b) of the row maximum, the
error of a weight is no larger than the errors of other weights in its group. A row with smaller scales, other than 0, is stored
as described above. With bf16 scales, bf16 uses code * 2^-133 in the same way: subnormal numbers and the first binade have the
same spacing, so 8 bits fit.

The kernels support groups of 16, 32, 64 and 128, which divide a k block of 128. Scales of other groups (48, 256, blocks of rows
and columns) are repeated for groups of these sizes. This takes more bytes and leaves the weights as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lowbit.formats import (
    FloatFormat,
    IntFormat,
    NumberFormat,
    PerBlock,
    PerChannel,
    PerGroup,
    PerTensor,
    QuantTensor,
    Scheme,
    ZeroPoint,
)
from lowbit.hardware.half import BIAS, HalfType
from lowbit.hardware.mma import MMA_M16N8K16_F16
from lowbit.pack.form import PackedMatrix
from lowbit.pack.fragment import ROW_BLOCK, FragmentOrder
from lowbit.pack.layout import Layout
from lowbit.pack.scales import pack_scales, unpack_scales

if TYPE_CHECKING:
    from typing_extensions import Self

STEP_K = 128
"""Number of columns in a k block of the kernels, a multiple of every group size."""

_GROUPS = (128, 64, 32, 16)
_HALVES = (torch.float16, torch.bfloat16)


def kernel_group(scheme: Scheme) -> int:
    """Returns the group size in the kernels: 0 (scales per channel), 128, 64, 32 or 16.

    Raises ValueError for a group size that no kernel has; `ops.table.weight_refusals` turns it into a reason.
    """
    granularity = scheme.granularity
    if isinstance(granularity, (PerGroup, PerBlock)):
        size = granularity.size if isinstance(granularity, PerGroup) else granularity.k
        for group in _GROUPS:
            if size % group == 0:
                return group
        raise ValueError(f"groups of the kernels are multiples of 16, got {size} ({scheme})")
    # The epilogue can apply one scale per channel, but no zeros, since they multiply sums of x.
    return 0 if scheme.zero is ZeroPoint.NONE else 128


def has_channel_scale(scheme: Scheme) -> bool:
    """True if the epilogue applies the scales: there is one per channel or tensor, and zeros, if any, are not
    floating-point."""
    return isinstance(scheme.granularity, (PerChannel, PerTensor)) and scheme.zero is not ZeroPoint.FLOAT


def may_be_subnormal(scheme: Scheme) -> bool:
    """True if kernels can use masked codes of a scheme as subnormal numbers: symmetric integers of 2 to 7 bits with scales of
    groups."""
    fmt = scheme.weight
    symmetric = isinstance(fmt, IntFormat) and fmt.signed and scheme.zero is ZeroPoint.NONE
    return symmetric and fmt.bits <= 7 and kernel_group(scheme) > 0


@dataclass(frozen=True)
class WeightForm:
    """The properties of a weight for which a kernel is compiled: number format, group size, kind of zeros, types of scales."""

    format: str
    group: int
    zero: Literal["none", "integer", "float"]
    scale_dtype: HalfType
    scaled_twice: bool = False
    """True if there are scales per channel in addition to scales of groups. (Without groups, scales are always per channel.)"""
    subnormal: bool = False
    """True if scales of groups are stored multiplied by 2^24, for codes that are used as subnormal numbers."""

    @property
    def channel_scale(self) -> bool:
        """True if there are scales per channel."""
        return self.scaled_twice or (self.group == 0 and self != DENSE_FORM)


DENSE_FORM = WeightForm("dense", 0, "none", "fp16")
"""The form of 16-bit weights in the type of x (pack/dense.py), which have no scales."""


def weight_form(scheme: Scheme, scale_dtype: torch.dtype | None, channel_scale: bool, subnormal: bool = False) -> WeightForm:
    """Returns the form of weights of a scheme. `scale_dtype`: type of the scales of groups, None if there are none.
    `channel_scale`: True if there are scales of channels. `subnormal`: True if scales of groups are stored for subnormal
    codes."""
    zeros: dict[ZeroPoint, Literal["none", "integer", "float"]]
    zeros = {ZeroPoint.NONE: "none", ZeroPoint.INTEGER: "integer", ZeroPoint.FLOAT: "float"}
    half: HalfType = "bf16" if scale_dtype == torch.bfloat16 else "fp16"
    group = kernel_group(scheme)
    return WeightForm(scheme.weight.name, group, zeros[scheme.zero], half, group > 0 and channel_scale, subnormal)


@dataclass(frozen=True, eq=False)
class FragmentWeight(PackedMatrix):
    """The tensors described in the module docstring, for a matrix of `shape` (N, K) under `scheme`; codes in the order of
    `layout`.

    With `subnormal`, scales of groups are stored multiplied by 2^24, and `channel_scale` is bf16; otherwise it is float32.
    """

    NAMES = ("codes", "scale", "channel_scale")

    codes: Tensor
    scale: Tensor | None
    channel_scale: Tensor | None
    scheme: Scheme
    shape: tuple[int, int]
    subnormal: bool = False

    @staticmethod
    def layout(fmt: NumberFormat) -> Layout:
        """Returns the fragment order of codes of a format, in one plane."""
        return FragmentOrder(MMA_M16N8K16_F16, fmt)

    @classmethod
    def pack(cls, q: QuantTensor, plane: Tensor | None = None, scaling: Scaling | None = None) -> Self:
        """Returns the kernels' form of `q`, on its device. `plane`: the codes in the layout's order, if they are already
        packed; the codes of `q` are then not read and may be on the meta device. `scaling`: how scales are stored; default: the
        result of `scaling_of`.

        Raises ValueError for groups that are no multiple of 16, scales that are not finite, and an input transform or a
        low-rank correction (`QuantTensor.require_product`).
        """
        q.require_product()
        group = kernel_group(q.scheme)
        for name, values in (("scales", q.scale), ("zeros", q.zero)):
            if values is not None and values.is_floating_point() and not bool(torch.isfinite(values).all()):
                raise ValueError(f"{q.scheme} {q.shape}: {name} must be finite, some are not")
        if plane is None:
            (plane,) = cls.layout(q.scheme.weight).pack(q.codes, q.scheme.weight.bits)
        channel = scale = None
        scaling = scaling or scaling_of(q)
        scales, zeros, subnormal = q.scale, q.zero, scaling == "subnormal"
        if scaling == "channels":
            channel = q.scale.float().expand(q.shape[0], 1).reshape(-1).contiguous()
            # Groups have scales of 1 and integer zeros, which are exact in bf16. Kernels with bf16 activations need not convert
            # bf16.
            scales = torch.ones_like(q.scale, dtype=torch.bfloat16)
        elif scaling != "groups":
            factor = _row_factors(q, 2.0**-16 if subnormal else 1.0)
            half = torch.bfloat16 if scales.dtype == torch.bfloat16 else torch.float16
            scales = (scales.float() / factor[:, None]).to(half)
            if zeros is not None and q.scheme.zero is ZeroPoint.FLOAT:
                zeros = (zeros.float() / factor[:, None]).to(half)
            channel = factor.repeat_interleave(q.scheme.granularity.block(q.shape)[0])[: q.shape[0]].contiguous()
            channel = channel.bfloat16() if subnormal else channel
        if group:
            parts = [_by_group(values.to(scales.dtype), q, group) for values in (scales, zeros) if values is not None]
            scale = torch.cat(parts, dim=-1).contiguous()
        return cls(plane.view(torch.int32), scale, channel, q.scheme, q.shape, subnormal)

    def unpack(self) -> QuantTensor:
        """Returns the matrix that `pack` packed. Scales per channel or tensor are float32. Scales of groups that were divided
        by a power of two per row are float32 too, as rounded by `pack`."""
        parts = [] if self.scale is None else [_from_groups(part, self) for part in self.scale.split(2, dim=-1)]
        zero = parts[1] if len(parts) == 2 else None
        if zero is not None and self.scheme.zero is ZeroPoint.INTEGER:
            zero = zero.to(torch.uint8)
        if self.channel_scale is None:
            scale = parts[0]
        elif not has_channel_scale(self.scheme):
            factor = self.channel_scale[:: self.scheme.granularity.block(self.shape)[0], None]
            scale = parts[0].float() * factor
            zero = zero.float() * factor if zero is not None and self.scheme.zero is ZeroPoint.FLOAT else zero
        else:
            rows = 1 if isinstance(self.scheme.granularity, PerTensor) else self.shape[0]
            scale = self.channel_scale[:rows, None].clone()
        return QuantTensor(self.unpack_codes(), scale, zero, self.scheme)

    def unpack_codes(self) -> Tensor:
        """Returns the codes uint8 [N, K]."""
        layout = self.layout(self.scheme.weight)
        return layout.unpack((self.codes.view(layout.plane_dtype),), self.scheme.weight.bits, self.shape)

    def row_axes(self) -> dict[str, tuple[int, int]]:
        return {name: (0, 1 if name == "channel_scale" else ROW_BLOCK) for name in self.tensors()}

    def _kind(self) -> dict[str, Any]:
        return {**super()._kind(), "subnormal": self.subnormal}

    @property
    def form(self) -> WeightForm:
        """The constants for which a kernel that reads this weight is compiled."""
        scale_dtype = None if self.scale is None else self.scale.dtype
        return weight_form(self.scheme, scale_dtype, self.channel_scale is not None, self.subnormal)


Scaling = Literal["channels", "groups", "divided", "subnormal"]
"""How scales are stored: one for each channel; scales of groups unchanged; scales of groups divided by a power of two for each
row; or divided for subnormal codes."""


def scaling_of(q: QuantTensor) -> Scaling:
    """Returns how `FragmentWeight.pack` stores the scales of a matrix."""
    if has_channel_scale(q.scheme):
        return "channels"
    if _as_subnormals(q):
        return "subnormal"
    return "groups" if q.scale.dtype in _HALVES and _normal_in_fp16(q) else "divided"


def common_scaling(weights: Iterable[QuantTensor]) -> Scaling:
    """Returns one way of storing the scales of several matrices of the same scheme: that of `scaling_of`, or "divided", which
    every matrix supports, if the matrices differ."""
    kinds = {scaling_of(q) for q in weights}
    return kinds.pop() if len(kinds) == 1 else "divided"


def _normal_in_fp16(q: QuantTensor) -> bool:
    """True if scales of groups, the products of codes and scales, and floating-point zeros are 0 or in fp16's normal range,
    with a factor of 2 left for sums with zeros."""
    fmt = q.scheme.weight
    # Kernels read codes of floats as halves that are too small by this factor, which the scale makes up for.
    shift = 2.0 ** (BIAS["fp16"] - fmt.bias) if isinstance(fmt, FloatFormat) else 1.0
    scale = q.scale.float().abs()
    normal = (scale == 0) | ((scale >= 2.0**-14) & (scale * max(fmt.max, -fmt.min, shift) <= 2.0**15))
    if q.zero is not None and q.scheme.zero is ZeroPoint.FLOAT:
        normal &= q.zero.float().abs() <= 2.0**15
    return bool(normal.all())


def _as_subnormals(q: QuantTensor) -> bool:
    """True if codes may be used as subnormal numbers; see the module docstring."""
    if not may_be_subnormal(q.scheme):
        return False
    scale = q.scale.float().abs()
    largest = scale.amax(dim=1, keepdim=True)
    least = largest * 2.0 ** -(3 + q.scheme.weight.bits)
    return bool(((scale == 0) | (scale >= least)).all() and (largest < 2.0**100).all())


def _row_factors(q: QuantTensor, of: float = 1.0) -> Tensor:
    """Returns `of` (a power of two) times a power of two for each row of scales, float32. The row's largest scale divided by
    the latter is 1/2 to 1, or less if a zero is more than 256 times as large."""
    largest = q.scale.float().abs().amax(dim=1)
    if q.zero is not None and q.scheme.zero is ZeroPoint.FLOAT:
        largest = torch.maximum(largest, q.zero.float().abs().amax(dim=1) / 256)
    # With `of` = 2^-16, the largest stored scale is below 2^16. One that fp16 would round up to 2^16, which overflows, counts
    # as 2^16.
    largest = largest if of == 1 else largest * (1 + 2.0**-11)
    exponent = torch.frexp(largest).exponent.clamp(min=-126 if of == 1 else -110, max=127)
    return torch.ldexp(torch.full_like(largest, of), exponent)


def _by_group(values: Tensor, q: QuantTensor, group: int) -> Tensor:
    """Returns scales or zeros of `q` for the kernels' groups: [N/16, G, 8, 2], with G padded to whole k blocks."""
    n, k = q.shape
    # Kernel groups lie within groups of `q`, so the value at a kernel group's first column is the value of the whole group.
    starts = torch.arange(0, k, group, device=values.device)
    size = q.scheme.granularity.block((n, k))
    rows = values.repeat_interleave(size[0], dim=0)[:n] if values.shape[0] != n else values
    spread_k = rows[:, starts // size[1]]
    steps = -(-k // STEP_K)
    padded = torch.nn.functional.pad(spread_k, (0, steps * (STEP_K // group) - spread_k.shape[1]))
    return pack_scales(padded).unflatten(-1, (8, 2))


def _from_groups(part: Tensor, w: FragmentWeight) -> Tensor:
    n, k = w.shape
    size = w.scheme.granularity.block((n, k))
    values = unpack_scales(part.flatten(-2), n)
    starts = torch.arange(0, k, size[1], device=values.device)
    return values[:: size[0], starts // kernel_group(w.scheme)].contiguous()
