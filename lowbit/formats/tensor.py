"""A quantized matrix: codes, scales, zeros and scheme. `dequantize` is the reference for every kernel, layout and file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.codec import decode
from lowbit.formats.granularity import scale_shape, spread
from lowbit.formats.input_transform import IDENTITY, InputTransform
from lowbit.formats.scheme import Scheme, ZeroPoint


@dataclass(frozen=True, eq=False)
class LowRank:
    """A low-rank correction of a quantized weight [N, K]: the product of up [N, r] and down [r, K], 16- or 32-bit floats.

    The layer computes y = x dequant(w)^T + (x down^T) up^T. Raises ValueError for factors of incompatible shapes or dtypes.
    """

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
        """r, the inner dimension of the product."""
        return self.up.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of both factors."""
        return self.up.nbytes + self.down.nbytes

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns up . down [N, K], computed in float32 (float64 if `dtype` is)."""
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        return (self.up.to(compute) @ self.down.to(compute)).to(dtype)

    def to(self, device: torch.device | str) -> LowRank:
        """Returns the same factors on `device`."""
        return LowRank(self.up.to(device), self.down.to(device))


@dataclass(frozen=True, eq=False)
class QuantTensor:
    """A quantized weight: codes uint8 [N, K], scale float [scale_shape], zero None or [scale_shape], and their scheme.

    zero is uint8 for `ZeroPoint.INTEGER` and has the scale's dtype for `ZeroPoint.FLOAT`. `input_transform` is applied to the
    layer's input x before the product. `low_rank` is added to the weight. It multiplies x after the rotation, before the rest
    of the transform. Raises ValueError for shapes or dtypes that do not match the scheme.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    scheme: Scheme
    input_transform: InputTransform = IDENTITY
    low_rank: LowRank | None = None

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
        self.input_transform.check(self.scheme, self.shape[1])
        if self.low_rank is not None and (self.low_rank.up.shape[0], self.low_rank.down.shape[1]) != self.shape:
            shapes = f"{tuple(self.low_rank.up.shape)} and {tuple(self.low_rank.down.shape)}"
            raise ValueError(f"{self.scheme} of {self.shape}: a low-rank correction is [N, r] and [r, K], got {shapes}")

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of codes (dense) and all other tensors."""
        n, k = self.shape
        tensors = (self.scale, self.zero, self.low_rank, self.input_transform)
        return n * (-(-k * self.scheme.weight.bits // 8)) + sum(t.nbytes for t in tensors if t is not None)

    @property
    def bits_per_weight(self) -> float:
        """Bits stored per weight, scales and zeros included."""
        return 8 * self.nbytes / max(self.codes.numel(), 1)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the weights [N, K] that multiply the layer's untransformed input, with `low_rank` added.

        Computed in float32 (float64 if `dtype` is) and rounded once to `dtype`.
        """
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        weight = self.input_transform.fold_channels(self.dequantize_codes(compute))
        if self.low_rank is not None:
            weight += self.low_rank.dense(compute)
        return self.input_transform.fold_rotation(weight).to(dtype)

    def dequantize_codes(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the weights [N, K] of codes, scales and zeros alone, without `input_transform` and `low_rank`."""
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        values = decode(self.codes, self.scheme.weight, compute)
        scale = spread(self.scale.to(compute), self.scheme.granularity, self.shape)
        if self.zero is None:
            return (values * scale).to(dtype)
        zero = spread(self.zero.to(compute), self.scheme.granularity, self.shape)
        if self.scheme.zero is ZeroPoint.INTEGER:
            return ((values - zero) * scale).to(dtype)
        return (values * scale + zero).to(dtype)

    def with_input(self, **parts: Any) -> QuantTensor:
        """Returns the same codes with some fields of the `input_transform` replaced."""
        return replace(self, input_transform=replace(self.input_transform, **parts))

    def rotated_by(self, block: int) -> QuantTensor:
        """Returns the same codes for x that is first rotated in blocks of `block` channels, 0 for none."""
        return self.with_input(hadamard=block)

    def without_input(self) -> QuantTensor:
        """Returns codes, scale and zero only, without `input_transform` and `low_rank`: the operand of the product."""
        return replace(self, input_transform=IDENTITY, low_rank=None)

    def require_product(self) -> None:
        """Raises ValueError for an `input_transform` or `low_rank`, which packed weights do not hold."""
        extra = (*self.input_transform.parts.words(), *(() if self.low_rank is None else ("low-rank correction",)))
        if extra:
            raise ValueError(
                f"{self.scheme} {self.shape}: {', '.join(extra)} is no part of the product; nn.QuantLinear computes it, "
                "pack without_input() for the rest"
            )

    def to(self, device: torch.device | str) -> QuantTensor:
        """Returns the same tensor on `device`."""
        zero = None if self.zero is None else self.zero.to(device)
        correction = None if self.low_rank is None else self.low_rank.to(device)
        moved = self.input_transform.map(lambda t: t.to(device))
        return QuantTensor(self.codes.to(device), self.scale.to(device), zero, self.scheme, moved, correction)
