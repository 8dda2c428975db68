"""LoRC: a low-rank matrix beside a quantized one that takes back the largest part of the rounding error.

Source: Z. Yao et al., "ZeroQuant-V2: Exploring Post-training Quantization in LLMs from Comprehensive Study to Low Rank
Compensation", arXiv:2303.08302.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats import QuantTensor


@dataclass(frozen=True, eq=False)
class LowRank:
    """up [N, r] and down [r, K], fp16: the layer computes y = x dequant(w)^T + (x down^T) up^T."""

    up: Tensor
    down: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of both factors."""
        return self.up.nbytes + self.down.nbytes

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix up . down [N, K], computed in float32 (float64 when asked for it)."""
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        return (self.up.to(compute) @ self.down.to(compute)).to(dtype)


def lorc(weight: Tensor, q: QuantTensor, rank: int, *, dtype: torch.dtype = torch.float16) -> LowRank:
    """The `rank` largest singular components of `weight` [N, K] - dequantize(q), each split evenly between the factors, which
    are rounded to `dtype`.

    Before that rounding the squared error left is the sum of the squares of the other singular values, the least of any matrix
    of that rank. Raises ValueError for a rank outside 1..min(N, K) or a weight of another shape.
    """
    if tuple(weight.shape) != q.shape:
        raise ValueError(f"the quantized weight is {q.shape}, got a weight {tuple(weight.shape)}")
    if not 1 <= rank <= min(q.shape):
        raise ValueError(f"the rank of a correction of {q.shape} is 1 to {min(q.shape)}, got {rank}")
    error = weight.float() - q.dequantize().to(weight.device)
    u, s, vt = torch.linalg.svd(error, full_matrices=False)
    root = s[:rank].sqrt()
    return LowRank((u[:, :rank] * root).to(dtype).contiguous(), (root[:, None] * vt[:rank]).to(dtype).contiguous())
