"""A quantized matrix: codes, scales, zeros and what they mean. What `dequantize` returns is the truth that every
kernel, layout and file is compared with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.codec import decode
from lowbit.formats.granularity import scale_shape, spread
from lowbit.formats.scheme import Scheme, ZeroPoint


@dataclass(frozen=True, eq=False)
class QuantTensor:
    """codes uint8 [N, K], scale float [scale_shape], zero None or [scale_shape], and their scheme.

    zero is uint8 for `ZeroPoint.INTEGER` and has the scale's dtype for `ZeroPoint.FLOAT`. Two more belong to the input x of
    the layer: `order` int32 [K], a permutation, says that column i of codes multiplies channel order[i] of x (GPTQ's act-order
    groups channels by importance); `input_scale` float [K] is what each channel of x is multiplied by first (AWQ's, where it
    is not folded into the layer before). Raises ValueError when shapes or dtypes do not fit the scheme.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    scheme: Scheme
    order: Tensor | None = None
    input_scale: Tensor | None = None

    def __post_init__(self) -> None:
        if self.codes.dim() != 2 or self.codes.dtype != torch.uint8:
            raise ValueError(f"codes are uint8 [N, K], got {self.codes.dtype} {tuple(self.codes.shape)}")
        expected = scale_shape(self.scheme.granularity, self.shape)
        if tuple(self.scale.shape) != expected or not self.scale.is_floating_point():
            raise ValueError(
                f"{self.scheme} of {self.shape} has floating-point scales {expected}, "
                f"got {self.scale.dtype} {tuple(self.scale.shape)}"
            )
        if (self.zero is None) != (self.scheme.zero is ZeroPoint.NONE):
            raise ValueError(f"{self.scheme} {'has no' if self.zero is not None else 'needs'} zeros")
        if self.zero is not None:
            dtype = torch.uint8 if self.scheme.zero is ZeroPoint.INTEGER else self.scale.dtype
            if tuple(self.zero.shape) != expected or self.zero.dtype != dtype:
                raise ValueError(f"{self.scheme}: zeros are {dtype} {expected}, got {self.zero.dtype} {tuple(self.zero.shape)}")
        for name, values in (("order", self.order), ("input_scale", self.input_scale)):
            if values is not None and tuple(values.shape) != self.shape[1:]:
                raise ValueError(f"{self.scheme} of {self.shape}: {name} is [{self.shape[1]}], got {tuple(values.shape)}")
        if self.order is not None and self.order.dtype != torch.int32:
            raise ValueError(f"{self.scheme}: order is int32, got {self.order.dtype}")
        if self.input_scale is not None and not self.input_scale.is_floating_point():
            raise ValueError(f"{self.scheme}: input_scale is floating-point, got {self.input_scale.dtype}")

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of codes (dense) and everything beside them."""
        n, k = self.shape
        beside = (self.scale, self.zero, self.order, self.input_scale)
        return n * (-(-k * self.scheme.weight.bits // 8)) + sum(t.nbytes for t in beside if t is not None)

    @property
    def bits_per_weight(self) -> float:
        """Bits stored per weight, scales and zeros included."""
        return 8 * self.nbytes / max(self.codes.numel(), 1)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights [N, K] that multiply x as it comes, `order` and `input_scale` applied: computed in float32 (float64 when
        asked for it) and rounded once to `dtype`."""
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        weight = self.dequantize_codes(compute)
        if self.order is not None:
            weight = torch.empty_like(weight).index_copy_(1, self.order.long(), weight)
        if self.input_scale is not None:
            weight *= self.input_scale.to(compute)
        return weight.to(dtype)

    def dequantize_codes(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights [N, K] in the order of the codes, `input_scale` left out: what the codes, scales and zeros alone mean."""
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        values = decode(self.codes, self.scheme.weight, compute)
        scale = spread(self.scale.to(compute), self.scheme.granularity, self.shape)
        if self.zero is None:
            return (values * scale).to(dtype)
        zero = spread(self.zero.to(compute), self.scheme.granularity, self.shape)
        if self.scheme.zero is ZeroPoint.INTEGER:
            return ((values - zero) * scale).to(dtype)
        return (values * scale + zero).to(dtype)

    def to(self, device: torch.device | str) -> QuantTensor:
        """The same tensor on `device`."""
        held = {name: getattr(self, name) for name in ("codes", "scale", "zero", "order", "input_scale")}
        moved: dict[str, Any] = {name: None if t is None else t.to(device) for name, t in held.items()}
        return replace(self, **moved)


def is_permutation(order: Tensor) -> bool:
    """Whether `order`, integers [K], holds each of 0 to K - 1 once."""
    return torch.equal(order.sort().values, torch.arange(order.numel(), dtype=order.dtype, device=order.device))
