"""What every kernel must compute, in as few lines of torch as possible. Tests and benchmarks import these."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.formats import QuantTensor


def mixed_gemm_reference(x: Tensor, w: QuantTensor, bias: Tensor | None = None) -> Tensor:
    """y [.., N] float64 = x [.., K] . dequantize(w)[N, K]^T + bias[N], everything in float64."""
    y = x.double() @ w.dequantize(torch.float64).T
    return y if bias is None else y + bias.double()
