"""A weight of 16 bits as the ring kernel reads it: as `nn.Linear` holds it, row by row, not a byte of it a second time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.pack.weight import DENSE_FORM, WeightForm


@dataclass(frozen=True, eq=False)
class DenseWeight:
    """A matrix [N, K] in fp16 or bf16. Of gate and up it is all rows of gate, then those of up: a product pairs them itself."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        n, k = self.values.shape
        return n, k

    @property
    def form(self) -> WeightForm:
        """What a kernel must know of it when it is compiled."""
        return DENSE_FORM

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix."""
        return self.values.nbytes

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The matrix in another type, as of a quantized one."""
        return self.values.to(dtype)
