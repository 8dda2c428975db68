"""A quantized matrix as the tensor-core kernels read it: codes in fragment order, scales beside them.

    codes           int32 [N/16, K/64, 32 * bits]            pack.fragment
    scale           fp16 or bf16 [N/16, G, 8, 2]             groups along K: scales of rows g and g + 8 for lane group g
                    fp16 or bf16 [N/16, G, 8, 4]             with zeros: those scales, then the zeros of both rows
    channel_scale   float32 [N]                              one scale per output channel, applied at the end

The kernels know groups of 16, 32, 64 and 128, a whole number of which make a step of 128 k. Scales of other groups (48,
256, blocks of rows and k) are repeated until they are such groups: more bytes, the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lowbit.formats import PerBlock, PerGroup, PerTensor, QuantTensor, Scheme, ZeroPoint
from lowbit.hardware.half import HalfType
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


@dataclass(frozen=True)
class WeightForm:
    """What a kernel must know of weights when it is compiled: names of formats, size of the kernels' groups, kind of zeros."""

    format: str
    group: int
    zero: Literal["none", "integer", "float"]
    scale_dtype: HalfType


def weight_form(scheme: Scheme, scale_dtype: torch.dtype | None) -> WeightForm:
    """The form of weights of a scheme; `scale_dtype` is the type of their group scales, None without."""
    zeros: dict[ZeroPoint, Literal["none", "integer", "float"]]
    zeros = {ZeroPoint.NONE: "none", ZeroPoint.INTEGER: "integer", ZeroPoint.FLOAT: "float"}
    half: HalfType = "bf16" if scale_dtype == torch.bfloat16 else "fp16"
    return WeightForm(scheme.weight.name, kernel_group(scheme), zeros[scheme.zero], half)


@dataclass(frozen=True, eq=False)
class KernelWeight:
    """The tensors described in the module, for a matrix of `shape` (N, K) under `scheme`."""

    codes: Tensor
    scale: Tensor | None
    channel_scale: Tensor | None
    scheme: Scheme
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, padding included."""
        return sum(t.nbytes for t in (self.codes, self.scale, self.channel_scale) if t is not None)

    def clone(self) -> KernelWeight:
        """An equal weight in memory of its own."""
        scale = None if self.scale is None else self.scale.clone()
        channel = None if self.channel_scale is None else self.channel_scale.clone()
        return KernelWeight(self.codes.clone(), scale, channel, self.scheme, self.shape)


def pack_weight(q: QuantTensor) -> KernelWeight:
    """The kernels' form of `q`, on its device.

    Raises ValueError for groups that are no multiple of 16, group scales that are not 16 bits wide, and scales that are
    not finite.
    """
    group = kernel_group(q.scheme)
    for name, values in (("scales", q.scale), ("zeros", q.zero)):
        if values is not None and values.is_floating_point() and not bool(torch.isfinite(values).all()):
            raise ValueError(f"{q.scheme} {q.shape}: {name} must be finite, some are not")
    order = FragmentOrder(MMA_M16N8K16_F16, q.scheme.weight)
    (codes,) = order.pack(q.codes, q.scheme.weight.bits)
    if group == 0:
        per_row = q.scale.float().expand(q.shape[0], 1).reshape(-1).contiguous()
        return KernelWeight(codes, None, per_row, q.scheme, q.shape)
    if q.scale.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"{q.scheme}: the kernels take scales of groups and with zeros in fp16 or bf16, got {q.scale.dtype}")
    parts = [_by_group(q.scale, q, group)]
    if q.zero is not None:
        parts.append(_by_group(q.zero.to(q.scale.dtype), q, group))
    return KernelWeight(codes, torch.cat(parts, dim=-1).contiguous(), None, q.scheme, q.shape)


def unpack_weight(w: KernelWeight) -> QuantTensor:
    """The matrix that `pack_weight` packed; its inverse."""
    order = FragmentOrder(MMA_M16N8K16_F16, w.scheme.weight)
    codes = order.unpack((w.codes,), w.scheme.weight.bits, w.shape)
    if w.scale is None:
        assert w.channel_scale is not None
        rows = 1 if isinstance(w.scheme.granularity, PerTensor) else w.shape[0]
        return QuantTensor(codes, w.channel_scale[:rows, None].clone(), None, w.scheme)
    parts = [_from_groups(part, w) for part in w.scale.split(2, dim=-1)]
    zero = None
    if len(parts) == 2:
        zero = parts[1].to(torch.uint8) if w.scheme.zero is ZeroPoint.INTEGER else parts[1]
    return QuantTensor(codes, parts[0], zero, w.scheme)


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


def _from_groups(part: Tensor, w: KernelWeight) -> Tensor:
    n, k = w.shape
    size = w.scheme.granularity.block((n, k))
    values = unpack_scales(part.flatten(-2), n)
    starts = torch.arange(0, k, size[1], device=values.device)
    return values[:: size[0], starts // kernel_group(w.scheme)].contiguous()
