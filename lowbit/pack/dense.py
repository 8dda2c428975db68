"""A 16-bit weight for the small-M kernel: the rows of `nn.Linear`, without a copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit.pack.form import PackedMatrix
from lowbit.pack.weight import DENSE_FORM, WeightForm


@dataclass(frozen=True, eq=False)
class DenseWeight(PackedMatrix):
    """A matrix [N, K] in fp16 or bf16. A gated weight has all gate rows, then all up rows; the kernel pairs them."""

    NAMES = ("values",)

    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        n, k = self.values.shape
        return n, k

    @property
    def form(self) -> WeightForm:
        """The properties for which a kernel is compiled."""
        return DENSE_FORM

    @classmethod
    def pack(cls, values: Tensor) -> DenseWeight:
        """Returns the form of a 16-bit matrix [N, K], whose rows are not copied."""
        return cls(values.contiguous())

    def unpack(self) -> Tensor:
        """Returns the matrix."""
        return self.values

    def row_axes(self) -> dict[str, tuple[int, int]]:
        return {"values": (0, 1)}

    def _kind(self) -> dict[str, Any]:
        return {"K": self.shape[1], "type": self.values.dtype}

    def _rebuilt(self, tensors: dict[str, Tensor], n: int) -> DenseWeight:
        return DenseWeight(**tensors)

    def _with_scales_of_channels(self) -> DenseWeight:
        return self

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns the matrix in type `dtype`, like the method of quantized forms."""
        return self.values.to(dtype)
