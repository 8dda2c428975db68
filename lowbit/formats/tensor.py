"""A quantized matrix: codes, scales, zeros and what they mean. What `dequantize` returns is the truth that every
kernel, layout and file is compared with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowbit.formats.codec import decode
from lowbit.formats.granularity import scale_shape, spread
from lowbit.formats.scheme import Scheme, ZeroPoint


@dataclass(frozen=True, eq=False)
class QuantTensor:
    """codes uint8 [N, K], scale float [scale_shape], zero None or [scale_shape], and their scheme.

    zero is uint8 for `ZeroPoint.INTEGER` and has the scale's dtype for `ZeroPoint.FLOAT`. Raises ValueError when shapes
    or dtypes do not fit the scheme.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    scheme: Scheme

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

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of codes (dense), scales and zeros together."""
        n, k = self.shape
        zeros = self.zero.nbytes if self.zero is not None else 0
        return n * (-(-k * self.scheme.weight.bits // 8)) + self.scale.nbytes + zeros

    @property
    def bits_per_weight(self) -> float:
        """Bits stored per weight, scales and zeros included."""
        return 8 * self.nbytes / max(self.codes.numel(), 1)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights [N, K]: computed in float32 (float64 when asked for it) and rounded once to `dtype`."""
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
        return replace(
            self,
            codes=self.codes.to(device),
            scale=self.scale.to(device),
            zero=None if self.zero is None else self.zero.to(device),
        )
