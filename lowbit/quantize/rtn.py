"""Round-to-nearest quantization: each scale from the weights it covers, each weight to its nearest code.

The scale is rounded to the type it is stored in *before* the codes are chosen, so the codes are the nearest ones for
the scale that the kernels will use.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lowbit.formats import (
    PerBlock,
    PerGroup,
    QuantTensor,
    Scheme,
    ZeroPoint,
    decode,
    encode,
    parse_scheme,
    scale_shape,
)

Search = Literal["max", "mse"]

WEIGHTS_AT_ONCE = 1 << 20
"""Weights quantized at once, which bounds the float32 temporaries to some 40 MB whatever the size of a layer."""

# Clip factors tried by search="mse": 1 keeps the largest weight, 0.4 saturates everything above 40 % of it.
_CLIP_FACTORS = tuple(1.0 - 0.02 * i for i in range(31))


def scale_dtype(scheme: Scheme) -> torch.dtype:
    """The type in which scales are stored.

    One scale per channel or tensor costs nothing: float32. Group scales are read with the weights and are 16 bits:
    fp16, or bf16 for formats whose largest value is so big (fp8) that weight / max would be an fp16 subnormal.
    """
    if not isinstance(scheme.granularity, (PerGroup, PerBlock)):
        return torch.float32
    return torch.float16 if scheme.weight.max <= 256 else torch.bfloat16


def rtn(weight: Tensor, scheme: str | Scheme, *, search: Search = "max") -> QuantTensor:
    """Quantizes `weight` [N, K] (any float dtype, any device) by rounding every weight to its nearest code.

    search="max" takes the scale that just holds the largest weight; "mse" tries 31 smaller ones as well and keeps, for
    each scale, the one with the least mean squared error. Channels and groups of zeros come back as zeros. Raises
    ValueError for a weight that is not a matrix of finite numbers.

    Source: per-channel scales max|W| / 28 for FP6 are ZeroQuant(4+2)'s (arXiv:2312.08583); the clip search is the
    usual MSE observer.
    """
    scheme = parse_scheme(scheme)
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"rtn quantizes a floating-point matrix [N, K], got {weight.dtype} {tuple(weight.shape)}")
    if search not in ("max", "mse"):
        raise ValueError(f"search is 'max' or 'mse', got {search!r}")
    step = _rows_at_once(scheme, weight)
    bad = sum(int((~part.isfinite()).sum()) for part in weight.split(step))
    if bad:
        raise ValueError(f"{bad} of {weight.numel()} weights are not finite: such a layer cannot be quantized")
    factors = (1.0,) if search == "max" else _CLIP_FACTORS
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scales, zeros = [], []
    for part, target in zip(weight.detach().split(step), codes.split(step), strict=True):
        chosen, scale, zero = _quantize_rows(part, scheme, factors)
        target.copy_(chosen)
        scales.append(scale)
        if zero is not None:
            zeros.append(zero)
    return QuantTensor(codes, torch.cat(scales), torch.cat(zeros) if zeros else None, scheme)


def _rows_at_once(scheme: Scheme, weight: Tensor) -> int:
    """Rows quantized together: about WEIGHTS_AT_ONCE weights, and whole blocks of rows that share scales."""
    n = scheme.granularity.block((weight.shape[0], weight.shape[1]))[0]
    return max(1, WEIGHTS_AT_ONCE // max(1, weight.shape[1] * n)) * n


def _quantize_rows(w: Tensor, scheme: Scheme, factors: tuple[float, ...]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes [N, K], scales and zeros [scale_shape] of some rows that share no scale with others."""
    w = w.to(torch.float32)
    shape = (w.shape[0], w.shape[1])
    grid = scale_shape(scheme.granularity, shape)
    codes, scale, zero = _best(_cover(w, scheme, shape), scheme, factors)
    return _uncover(codes, scheme, shape), scale.reshape(grid), None if zero is None else zero.reshape(grid)


def _cover(w: Tensor, scheme: Scheme, shape: tuple[int, int]) -> Tensor:
    """Weights [S, n * k] with one row per scale; ragged edges repeat the scale's own last weights, which changes
    neither its largest nor its smallest one."""
    n, k = scheme.granularity.block(shape)
    rows, cols = scale_shape(scheme.granularity, shape)
    pick_n = _edge_repeated(shape[0], n, rows, w.device)
    pick_k = _edge_repeated(shape[1], k, cols, w.device)
    if pick_n is not None:
        w = w[pick_n]
    if pick_k is not None:
        w = w[:, pick_k]
    return w.reshape(rows, n, cols, k).transpose(1, 2).reshape(rows * cols, n * k)


def _edge_repeated(length: int, block: int, blocks: int, device: torch.device) -> Tensor | None:
    if blocks * block == length:
        return None
    return torch.arange(blocks * block, device=device).clamp(max=length - 1)


def _uncover(codes: Tensor, scheme: Scheme, shape: tuple[int, int]) -> Tensor:
    n, k = scheme.granularity.block(shape)
    rows, cols = scale_shape(scheme.granularity, shape)
    blocks = codes.reshape(rows, cols, n, k).transpose(1, 2).reshape(rows * n, cols * k)
    return blocks[: shape[0], : shape[1]].contiguous()


def _best(w: Tensor, scheme: Scheme, factors: tuple[float, ...]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes [S, E], scale [S] and zero [S] or None of weights [S, E]: per row, the clip factor of least error."""
    codes, scale, zero = _quantize(w, scheme, factors[0])
    if len(factors) == 1:
        return codes, scale, zero
    least = _squared_error(w, codes, scale, zero, scheme)
    for factor in factors[1:]:
        c, s, z = _quantize(w, scheme, factor)
        error = _squared_error(w, c, s, z, scheme)
        better = error < least
        least = torch.where(better, error, least)
        codes = torch.where(better[:, None], c, codes)
        scale = torch.where(better, s, scale)
        zero = None if zero is None or z is None else torch.where(better, z, zero)
    return codes, scale, zero


def _quantize(w: Tensor, scheme: Scheme, factor: float) -> tuple[Tensor, Tensor, Tensor | None]:
    fmt, dtype = scheme.weight, scale_dtype(scheme)
    if scheme.zero is ZeroPoint.NONE:
        scale = _stored(w.abs().amax(dim=1) * factor / fmt.max, dtype)
        return encode(w / scale.float()[:, None], fmt), scale, None
    low, high = w.amin(dim=1) * factor, w.amax(dim=1) * factor
    if scheme.zero is ZeroPoint.INTEGER:
        # Zero itself must be on the grid, at an integer code.
        low, high = low.clamp(max=0), high.clamp(min=0)
        scale = _stored((high - low) / fmt.max, dtype)
        zero = (-low / scale.float()).round().clamp(0, fmt.max)
        codes = encode(w / scale.float()[:, None] + zero[:, None], fmt)
        return codes, scale, zero.to(torch.uint8)
    scale = _stored((high - low) / fmt.max, dtype)
    offset = low.to(dtype)
    return encode((w - offset.float()[:, None]) / scale.float()[:, None], fmt), scale, offset


def _stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale as it will be stored: never zero (all-zero weights take 1), never below the type's smallest number."""
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return torch.where(scale > 0, scale.clamp(min=smallest), 1.0).to(dtype)


def _squared_error(w: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme) -> Tensor:
    values = decode(codes, scheme.weight)
    s = scale.float()[:, None]
    if zero is None:
        return (values * s - w).square().sum(dim=1)
    z = zero.float()[:, None]
    q = (values - z) * s if scheme.zero is ZeroPoint.INTEGER else values * s + z
    return (q - w).square().sum(dim=1)
