"""LoRC: a low-rank matrix added to a quantized one that corrects the largest part of the rounding error.

Source: Z. Yao et al., "ZeroQuant-V2: Exploring Post-training Quantization in LLMs from Comprehensive Study to Low Rank
Compensation", arXiv:2303.08302. Weighting of the error by the layer's inputs: C. Zhang et al., "QERA: an Analytical Framework
for Quantization Error Reconstruction", arXiv:2410.06040, theorem 1, here with the sum of x^T x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.formats import LowRank, QuantTensor

DAMPING = 0.01
"""This times the mean of the Hessian's diagonal is added to it, so that channels that were zero in all inputs count."""


def lorc(
    weight: Tensor, q: QuantTensor, rank: int, hessian: Tensor | None = None, *, dtype: torch.dtype = torch.float16
) -> LowRank:
    """Returns the best approximation of rank `rank` of E = `weight` [N, K] - dequantize(q), as two factors in `dtype`.

    Before rounding of the factors, no matrix of that rank has a smaller squared error. With `hessian` [K, K], the sum of x^T x
    of the layer's inputs, the squared error of the outputs is minimised instead. Takes 12 N K + 24 min(N, K)^2 bytes. Raises
    ValueError for a rank outside 1..min(N, K), shapes that do not fit, and a Hessian that cannot be factorized.
    """
    if tuple(weight.shape) != q.shape:
        raise ValueError(f"the quantized weight is {q.shape}, got a weight {tuple(weight.shape)}")
    if not 1 <= rank <= min(q.shape):
        raise ValueError(f"the rank of a correction of {q.shape} is 1 to {min(q.shape)}, got {rank}")
    error = weight.float() - q.dequantize().to(weight.device)
    # The best product is U U^T E, where U are the first left singular vectors of E R and R R^T is the Hessian.
    weighted = error if hessian is None else error @ _root(hessian.to(weight.device), q.shape[1])
    if q.shape[0] <= q.shape[1]:
        up = torch.linalg.eigh((weighted @ weighted.T).double()).eigenvectors[:, -rank:].float()
    else:
        right = torch.linalg.eigh((weighted.T @ weighted).double()).eigenvectors[:, -rank:].float()
        up = torch.linalg.qr(weighted @ right).Q
    down = up.T @ error
    # Each column of `up` has norm 1; splitting the norm keeps both factors inside the range of fp16.
    root = down.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny).sqrt()
    return LowRank((up * root).to(dtype).contiguous(), (down / root[:, None]).to(dtype).contiguous())


def _root(hessian: Tensor, k: int) -> Tensor:
    """Returns R [K, K] lower triangular, float32, with R R^T = H + d I."""
    if tuple(hessian.shape) != (k, k):
        raise ValueError(f"the Hessian of inputs of {k} channels is [{k}, {k}], got {tuple(hessian.shape)}")
    damped = hessian.double()
    extra = DAMPING * float(damped.diagonal().mean())
    damped = damped + torch.eye(k, dtype=damped.dtype, device=damped.device) * (extra if extra > 0 else 1.0)
    lower, failed = torch.linalg.cholesky_ex(damped)
    if int(failed):
        raise ValueError("the Hessian is not positive definite; its inputs were not finite, or it is no sum of x^T x")
    return lower.float()
