"""A quantized matrix: codes, scales, zeros and what they mean. What `dequantize` returns is the truth that every
kernel, layout and file is compared with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.codec import decode
from lowbit.formats.granularity import scale_shape, spread
from lowbit.formats.hadamard import check_block, rotate_blocks
from lowbit.formats.scheme import Scheme, ZeroPoint


@dataclass(frozen=True, eq=False)
class LowRank:
    """A correction beside a quantized weight [N, K]: up [N, r] and down [r, K], floats of 16 or 32 bits, whose product is added
    to it. The layer computes y = x dequant(w)^T + (x down^T) up^T, with x as it comes. Raises ValueError for factors that do
    not fit each other."""

    up: Tensor
    down: Tensor

    def __post_init__(self) -> None:
        shapes, types = (tuple(self.up.shape), tuple(self.down.shape)), {self.up.dtype, self.down.dtype}
        if not (self.up.dim() == self.down.dim() == 2 and self.up.shape[1] == self.down.shape[0] > 0):
            raise ValueError(f"a low-rank correction is up [N, r] and down [r, K], got {shapes[0]} and {shapes[1]}")
        if len(types) != 1 or not self.up.is_floating_point():
            raise ValueError(
                f"the factors of a low-rank correction are floats of one type, got {self.up.dtype} {self.down.dtype}"
            )

    @property
    def rank(self) -> int:
        """r."""
        return self.up.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of both factors."""
        return self.up.nbytes + self.down.nbytes

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix up . down [N, K], computed in float32 (float64 when asked for it)."""
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        return (self.up.to(compute) @ self.down.to(compute)).to(dtype)

    def to(self, device: torch.device | str) -> LowRank:
        """The same factors on `device`."""
        return LowRank(self.up.to(device), self.down.to(device))


@dataclass(frozen=True, eq=False)
class QuantTensor:
    """codes uint8 [N, K], scale float [scale_shape], zero None or [scale_shape], and their scheme.

    zero is uint8 for `ZeroPoint.INTEGER` and has the scale's dtype for `ZeroPoint.FLOAT`. Two more belong to the input x of
    the layer: `order` int32 [K], a permutation, says that column i of codes multiplies channel order[i] of x (GPTQ's act-order
    groups channels by importance); `pre_quant_scale` float [K] is what each channel of x is multiplied by first (AWQ's, where
    it is not folded into the layer before). `low_rank` is a correction that is added to all this. `activation_scale` float32
    [1] is the scale by which all of x is quantized under a scheme with activations; without one, every token has its own. With
    it goes, where the scheme's activations have zero points, `activation_zero` int32 [1]. With `hadamard`, a number of
    channels, x is rotated in blocks of so many before all else (`rotate_blocks`), and everything above is of the rotated x.
    Raises ValueError when shapes or dtypes do not fit the scheme.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    scheme: Scheme
    order: Tensor | None = None
    pre_quant_scale: Tensor | None = None
    low_rank: LowRank | None = None
    activation_scale: Tensor | None = None
    activation_zero: Tensor | None = None
    hadamard: int = 0

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
        for name, values in (("order", self.order), ("pre_quant_scale", self.pre_quant_scale)):
            if values is not None and tuple(values.shape) != self.shape[1:]:
                raise ValueError(f"{self.scheme} of {self.shape}: {name} is [{self.shape[1]}], got {tuple(values.shape)}")
        if self.order is not None and self.order.dtype != torch.int32:
            raise ValueError(f"{self.scheme}: order is int32, got {self.order.dtype}")
        if self.pre_quant_scale is not None and not self.pre_quant_scale.is_floating_point():
            raise ValueError(f"{self.scheme}: pre_quant_scale is floating-point, got {self.pre_quant_scale.dtype}")
        if self.activation_scale is not None:
            found = self.activation_scale
            if self.scheme.activation is None or tuple(found.shape) != (1,) or found.dtype != torch.float32:
                raise ValueError(
                    f"{self.scheme}: an activation scale is float32 [1] and goes with a scheme that quantizes activations, got "
                    f"{found.dtype} {tuple(found.shape)}"
                )
        if (self.activation_zero is not None) != (self.scheme.activation_zero and self.activation_scale is not None):
            raise ValueError(f"{self.scheme}: an activation zero goes with an activation scale and a scheme with _az")
        if self.activation_zero is not None:
            found = self.activation_zero
            if tuple(found.shape) != (1,) or found.dtype != torch.int32:
                raise ValueError(f"{self.scheme}: an activation zero is int32 [1], got {found.dtype} {tuple(found.shape)}")
        if self.low_rank is not None and (self.low_rank.up.shape[0], self.low_rank.down.shape[1]) != self.shape:
            shapes = f"{tuple(self.low_rank.up.shape)} and {tuple(self.low_rank.down.shape)}"
            raise ValueError(f"{self.scheme} of {self.shape}: a low-rank correction is [N, r] and [r, K], got {shapes}")
        if self.hadamard:
            check_block(self.hadamard, self.shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of codes (dense) and everything beside them."""
        n, k = self.shape
        of_x = (self.order, self.pre_quant_scale, self.activation_scale, self.activation_zero)
        beside = (self.scale, self.zero, self.low_rank, *of_x)
        return n * (-(-k * self.scheme.weight.bits // 8)) + sum(t.nbytes for t in beside if t is not None)

    @property
    def bits_per_weight(self) -> float:
        """Bits stored per weight, scales and zeros included."""
        return 8 * self.nbytes / max(self.codes.numel(), 1)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights [N, K] that multiply x as it comes, `order`, `pre_quant_scale`, `low_rank` and `hadamard` applied:
        computed in float32 (float64 when asked for it) and rounded once to `dtype`."""
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        weight = self.dequantize_codes(compute)
        if self.order is not None:
            weight = torch.empty_like(weight).index_copy_(1, self.order.long(), weight)
        if self.pre_quant_scale is not None:
            weight *= self.pre_quant_scale.to(compute)
        if self.low_rank is not None:
            weight += self.low_rank.dense(compute)
        if self.hadamard:
            weight = rotate_blocks(weight, self.hadamard)
        return weight.to(dtype)

    def dequantize_codes(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights [N, K] in the order of the codes, without `pre_quant_scale`, `low_rank` and `hadamard`: what the codes,
        scales and zeros alone mean."""
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
        names = ("codes", "scale", "zero", "order", "pre_quant_scale", "low_rank", "activation_scale", "activation_zero")
        held = {name: getattr(self, name) for name in names}
        moved: dict[str, Any] = {name: None if t is None else t.to(device) for name, t in held.items()}
        return replace(self, **moved)


def is_permutation(order: Tensor) -> bool:
    """Whether `order`, integers [K], holds each of 0 to K - 1 once."""
    return torch.equal(order.sort().values, torch.arange(order.numel(), dtype=order.dtype, device=order.device))
