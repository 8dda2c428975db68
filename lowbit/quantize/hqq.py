"""HQQ: floating-point zero points that minimise a sparse norm of the rounding errors; needs no data.

Source: H. Badri and A. Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023 (Mobius Labs): the
objective, the shrinking step and its constants.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.formats import QuantTensor, Scheme, ZeroPoint, parse_scheme, scale_shape
from lowbit.quantize.rtn import check_weight, cover, fit, nearest, rows_at_once, scale_dtype, uncover, values
from lowbit.quantize.threads import map_rows

POWER, BETA, GROWTH, STEPS = 0.7, 10.0, 1.01, 20


def hqq(weight: Tensor, scheme: str | Scheme, *, scale_type: torch.dtype | None = None) -> QuantTensor:
    """Quantizes `weight` [N, K] (any float dtype, any device) with zeros that minimise the sum of |error|^0.7.

    Scales are those of rounding to nearest, from the smallest and largest weight of each group. Each of at most 20 steps
    separates outliers from the rounding errors, by the shrinkage operator of the 0.7-norm, and moves the zero by the mean of
    the remaining errors. Each group takes the best zero of all steps, so the result is never worse than the first zero.
    scale_type: the dtype of scales, if not that of `rtn`.
    Raises ValueError for a scheme without floating-point zeros, and as `rtn` does.
    """
    scheme = parse_scheme(scheme)
    if scheme.zero is not ZeroPoint.FLOAT:
        raise ValueError(f"hqq moves floating-point zeros, which {scheme} does not have; take one that ends in _fz")
    check_weight(weight, "hqq")
    step = rows_at_once(scheme, weight)
    dtype = scale_type or scale_dtype(scheme, weight)
    parts = map_rows(lambda part: _quantize_rows(part.float(), scheme, dtype), weight.detach(), step)
    codes, scales, zeros = (torch.cat(t) for t in zip(*parts, strict=True))
    return QuantTensor(codes, scales, zeros, scheme)


def _quantize_rows(w: Tensor, scheme: Scheme, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    shape = (w.shape[0], w.shape[1])
    covered = cover(w, scheme, shape)
    scale, zero = fit(covered, scheme, dtype, (1.0,))
    assert zero is not None
    zero = _best_zero(covered, scale[:, None], zero[:, None], scheme)
    codes = nearest(covered, scale[:, None], zero, scheme)
    grid = scale_shape(scheme.granularity, shape)
    return uncover(codes, scheme, shape), scale.reshape(grid), zero.reshape(grid)


def _best_zero(w: Tensor, scale: Tensor, zero: Tensor, scheme: Scheme) -> Tensor:
    """Returns the zero [R, 1] of least objective over all steps, for weights [R, E] and scales [R, 1]."""
    best, least, beta = zero, None, BETA
    for _ in range(STEPS + 1):
        rounded = values(nearest(w, scale, zero, scheme), scale, zero, scheme)
        error = (w - rounded) / scale.float()  # in units of the grid's step, so that beta is comparable between groups
        objective = error.abs().pow(POWER).sum(dim=1, keepdim=True)
        better = objective < least if least is not None else torch.ones_like(objective, dtype=torch.bool)
        best, least = torch.where(better, zero, best), objective if least is None else torch.minimum(objective, least)
        outlier = error.sign() * (error.abs() - error.abs().pow(POWER - 1) / beta).clamp(min=0)
        moved = (zero.float() + ((error - outlier) * scale.float()).mean(dim=1, keepdim=True)).to(zero.dtype)
        if torch.equal(moved, zero):
            break
        zero, beta = moved, beta * GROWTH
    return best
