"""A quantized matrix as the tensor-core kernels read it: codes in fragment order, scales beside them.

    codes           int32 [N/16, K/64, 32 * bits]            pack.fragment
    scale           fp16 or bf16 [N/16, G, 8, 2]             groups along K: scales of rows g and g + 8 for lane group g
                    fp16 or bf16 [N/16, G, 8, 4]             with zeros: those scales, then the zeros of both rows
    channel_scale   float32 [N]                              one scale per output channel, applied at the end
                                                             (beside scales of groups: a power of two)
    order           int32 [K]                                channel of x that each column of codes meets, where not the same
    pre_quant_scale fp32, fp16 or bf16 [K]                   what each channel of x is multiplied by first, where there is one

Zeros go with the codes, so they stand in groups even where scales do not: with integer zeros, a scale per channel or tensor
stays `channel_scale` in float32, and the groups hold scales of 1 and the zeros, all exact.

Scales of groups and floating-point zeros of 32 bits (GGUF's K types, DeepSeek's blocks) are rounded to fp16, each row divided
by the power of two that brings its largest scale to 1/2 or beyond; that factor waits for the end. A scale is then off by 2^-11
of itself at most, as a weight in fp16 is, or by 2^-24 of the largest of its row where it is 2^-13 of that and less. What a
module saves are the scales as they were. Scales of 16 bits are divided in the same way where they, or the weights they make,
would leave fp16's normal range, in which a kernel with fp16 activations multiplies codes by them: fp8_e5m2's are a 57344th of
the largest weight. They stay of their type, and exact, but for such as are 2^-13 of the largest of their row and less.

The kernels know groups of 16, 32, 64 and 128, a whole number of which make a step of 128 k. Scales of other groups (48,
256, blocks of rows and k) are repeated until they are such groups: more bytes, the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lowbit.formats import (
    FloatFormat,
    PerBlock,
    PerChannel,
    PerGroup,
    PerTensor,
    QuantTensor,
    Scheme,
    ZeroPoint,
    is_permutation,
)
from lowbit.hardware.half import BIAS, HalfType
from lowbit.hardware.mma import MMA_M16N8K16_F16
from lowbit.pack.fragment import FragmentOrder
from lowbit.pack.scales import pack_scales, unpack_scales

STEP_K = 128
"""K of a step of the kernels; a step has a whole number of groups."""

_GROUPS = (128, 64, 32, 16)


def kernel_group(scheme: Scheme) -> int:
    """Size of the groups that the kernels see: 0 (scales per channel), 128, 64, 32 or 16; ValueError if there is none."""
    granularity = scheme.granularity
    if isinstance(granularity, (PerGroup, PerBlock)):
        size = granularity.size if isinstance(granularity, PerGroup) else granularity.k
        for group in _GROUPS:
            if size % group == 0:
                return group
        raise ValueError(f"groups of the kernels are multiples of 16, got {size} ({scheme})")
    # One scale per channel can wait for the end; zeros cannot, since they multiply sums of x.
    return 0 if scheme.zero is ZeroPoint.NONE else 128


def has_channel_scale(scheme: Scheme) -> bool:
    """Whether scales of a scheme wait for the end: one per channel or tensor, unless its zeros are added to scaled codes."""
    return isinstance(scheme.granularity, (PerChannel, PerTensor)) and scheme.zero is not ZeroPoint.FLOAT


@dataclass(frozen=True)
class WeightForm:
    """What a kernel must know of weights when it is compiled: names of formats, size of the kernels' groups, kind of zeros."""

    format: str
    group: int
    zero: Literal["none", "integer", "float"]
    scale_dtype: HalfType
    scaled_twice: bool = False
    """Whether scales per channel follow those of the groups; without groups they are the only ones."""

    @property
    def channel_scale(self) -> bool:
        """Whether there are scales per channel."""
        return self.group == 0 or self.scaled_twice


def weight_form(scheme: Scheme, scale_dtype: torch.dtype | None, channel_scale: bool) -> WeightForm:
    """The form of weights of a scheme; `scale_dtype` is the type of their group scales, None without; `channel_scale` says
    whether they have scales per channel."""
    zeros: dict[ZeroPoint, Literal["none", "integer", "float"]]
    zeros = {ZeroPoint.NONE: "none", ZeroPoint.INTEGER: "integer", ZeroPoint.FLOAT: "float"}
    half: HalfType = "bf16" if scale_dtype == torch.bfloat16 else "fp16"
    group = kernel_group(scheme)
    return WeightForm(scheme.weight.name, group, zeros[scheme.zero], half, group > 0 and channel_scale)


@dataclass(frozen=True, eq=False)
class FragmentWeight:
    """The tensors described in the module, for a matrix of `shape` (N, K) under `scheme`."""

    codes: Tensor
    scale: Tensor | None
    channel_scale: Tensor | None
    scheme: Scheme
    shape: tuple[int, int]
    order: Tensor | None = None
    pre_quant_scale: Tensor | None = None

    @classmethod
    def pack(cls, q: QuantTensor, plane: Tensor | None = None) -> FragmentWeight:
        """The kernels' form of `q`, on its device. `plane`: its codes, if they are in fragment order already; those of `q` are
        not looked at then and may be on the meta device.

        Raises ValueError for groups that are no multiple of 16, scales that are not finite, an order that is no permutation,
        and a low-rank correction, which the layer adds (`nn.QuantLinear`).
        """
        if q.low_rank is not None:
            raise ValueError(
                f"{q.scheme} {q.shape}: a low-rank correction is no part of the kernels' form; pack the weight without"
            )
        group = kernel_group(q.scheme)
        for name, values in (("scales", q.scale), ("zeros", q.zero), ("factors of x", q.pre_quant_scale)):
            if values is not None and values.is_floating_point() and not bool(torch.isfinite(values).all()):
                raise ValueError(f"{q.scheme} {q.shape}: {name} must be finite, some are not")
        if q.order is not None and not is_permutation(q.order):
            raise ValueError(f"{q.scheme} {q.shape}: order is a permutation of 0 to {q.shape[1] - 1}, this one is not")
        if plane is None:
            (plane,) = FragmentOrder(MMA_M16N8K16_F16, q.scheme.weight).pack(q.codes, q.scheme.weight.bits)
        channel = scale = None
        scales, zeros = q.scale, q.zero
        if has_channel_scale(q.scheme):
            channel = q.scale.float().expand(q.shape[0], 1).reshape(-1).contiguous()
            # Integers of 8 bits are exact in bf16, which a kernel with bf16 activations need not convert.
            scales = torch.ones_like(q.scale, dtype=torch.bfloat16)
        elif scales.dtype not in (torch.float16, torch.bfloat16) or not _normal_in_fp16(q):
            factor = _row_factors(q)
            half = torch.bfloat16 if scales.dtype == torch.bfloat16 else torch.float16
            scales = (scales.float() / factor[:, None]).to(half)
            if zeros is not None and q.scheme.zero is ZeroPoint.FLOAT:
                zeros = (zeros.float() / factor[:, None]).to(half)
            channel = factor.repeat_interleave(q.scheme.granularity.block(q.shape)[0])[: q.shape[0]].contiguous()
        if group:
            parts = [_by_group(values.to(scales.dtype), q, group) for values in (scales, zeros) if values is not None]
            scale = torch.cat(parts, dim=-1).contiguous()
        return cls(plane, scale, channel, q.scheme, q.shape, q.order, q.pre_quant_scale)

    def unpack(self) -> QuantTensor:
        """The matrix that `pack` packed; its inverse, but for scales that are float32 then: those per channel or tensor, and
        those of groups beside a power of two for each row, which are as they were rounded."""
        order = FragmentOrder(MMA_M16N8K16_F16, self.scheme.weight)
        codes = order.unpack((self.codes,), self.scheme.weight.bits, self.shape)
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
        return QuantTensor(codes, scale, zero, self.scheme, self.order, self.pre_quant_scale)

    @property
    def _tensors(self) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in ("codes", "scale", "channel_scale", "order", "pre_quant_scale")}
        return {name: t for name, t in named.items() if t is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, padding included."""
        return sum(t.nbytes for t in self._tensors.values())

    def clone(self) -> FragmentWeight:
        """An equal weight in memory of its own."""
        return replace(self, **{name: t.clone() for name, t in self._tensors.items()})


def _normal_in_fp16(q: QuantTensor) -> bool:
    """Whether scales of groups, what they make of the codes, and floating-point zeros are 0 or in fp16's normal range, half of
    the largest number apart, which is left to sums with zeros."""
    fmt = q.scheme.weight
    # Codes of floats are halves that are too small by this much, which the kernels give to the scale.
    shift = 2.0 ** (BIAS["fp16"] - fmt.bias) if isinstance(fmt, FloatFormat) else 1.0
    scale = q.scale.float().abs()
    normal = (scale == 0) | ((scale >= 2.0**-14) & (scale * max(fmt.max, -fmt.min, shift) <= 2.0**15))
    if q.zero is not None and q.scheme.zero is ZeroPoint.FLOAT:
        normal &= q.zero.float().abs() <= 2.0**15
    return bool(normal.all())


def _row_factors(q: QuantTensor) -> Tensor:
    """A power of two for each row of scales, float32: the largest scale is 1/2 to 1 of it (less where zeros are more than 256
    times as large)."""
    largest = q.scale.float().abs().amax(dim=1)
    if q.zero is not None and q.scheme.zero is ZeroPoint.FLOAT:
        largest = torch.maximum(largest, q.zero.float().abs().amax(dim=1) / 256)
    exponent = torch.frexp(largest).exponent.clamp(min=-126, max=127)
    return torch.ldexp(torch.ones_like(largest), exponent)


def _by_group(values: Tensor, q: QuantTensor, group: int) -> Tensor:
    """Scales or zeros of `q` for the kernels' groups: [N/16, G, 8, 2], G filled up to whole steps."""
    n, k = q.shape
    # One value per 16 k is the finest there is; of those, take the first of each of the kernels' groups.
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
