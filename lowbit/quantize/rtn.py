"""Round-to-nearest quantization: each scale is computed from the weights that share it, each weight gets its nearest code.

The scale is rounded to its stored dtype *before* the codes are computed, so they are the nearest codes for the scale that the
kernels use.
"""

from __future__ import annotations

from collections.abc import Callable

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
from lowbit.methods import Search
from lowbit.quantize.threads import MOST, map_rows

WEIGHTS_AT_ONCE = 1 << 16
"""Weights that one CPU thread quantizes at a time. Their float32 temporaries, 2.5 MB, fit a core's cache; those of all threads
(`threads.MOST`) are about 40 MB for a layer of any size."""

TIMES_ON_GPU = 64
"""Factor of `WEIGHTS_AT_ONCE` on a GPU, where the 40 kernels for a million weights take longer to launch than to run."""

_WEIGHTS_OF_A_THREAD = 1 << 15
"""Minimum number of weights per thread when columns are split among threads; torch's grain size."""

# Clip factors of search="mse": 1 keeps the largest weight, 0.4 saturates everything above 40 % of it.
CLIP_FACTORS = tuple(1.0 - 0.02 * i for i in range(31))

_FP16_NORMAL = (2.0**-14, 2.0**15)
"""Bounds of scales in fp16: its smallest normal number, and about half of its largest one, which leaves a margin for zeros."""

Metric = Callable[[Tensor], Tensor]


def scale_dtype(scheme: Scheme, weight: Tensor | None = None, stored: torch.dtype | None = None) -> torch.dtype:
    """Returns the dtype in which the scales of `weight` [N, K] are stored. Without a weight, ordinary magnitudes are assumed.

    stored: the dtype of the weight in the files, if not its own (calibration may compute in float32).

    Scales per channel or tensor are float32, since they are few. Group scales are fp16, or bf16 if one of them would not be a
    normal number of fp16. For formats with a large maximum (fp8) the scale is usually an fp16 subnormal, so it is bf16. bf16
    weights that get at most 7 bits also have bf16 scales, unless they have floating-point zeros: fp16 scales would take 1.5
    times as many dequantization instructions (kernels/parts/dequantize.py), and reduce the rounding error of Gaussian weights
    by only 0.1 % up to 6 bits and 0.4 % with 7 bits. With 8 bits it is 1 %, so these scales are fp16.
    """
    if not isinstance(scheme.granularity, (PerGroup, PerBlock)):
        return torch.float32
    if stored is None and weight is not None:
        stored = weight.dtype
    if stored == torch.bfloat16 and scheme.weight.bits <= 7 and scheme.zero is not ZeroPoint.FLOAT:
        return torch.bfloat16
    if scheme.weight.max > 256 or (weight is not None and not _fp16_holds_scales(weight, scheme)):
        return torch.bfloat16
    return torch.float16


def _fp16_holds_scales(weight: Tensor, scheme: Scheme) -> bool:
    """Returns True if the scales, and zeros, of all groups of `weight` are normal numbers of fp16 or 0."""
    if weight.numel() == 0:
        return True

    def holds(part: Tensor) -> Tensor:
        covered = cover(part, scheme, (part.shape[0], part.shape[1]))
        low, high = (extreme.float() for extreme in (covered.amin(dim=1), covered.amax(dim=1)))
        sizes = [_span(low, high, scheme) / scheme.weight.max]
        if scheme.zero is ZeroPoint.FLOAT:
            # A small zero may lose digits beside a scale, but not if all weights of the group are equal to it.
            sizes += [low.abs() * (high == low), low.abs().clamp(min=1.0)]
        s = torch.stack(sizes)
        return ((s == 0) | ((s >= _FP16_NORMAL[0]) & (s <= _FP16_NORMAL[1]))).all()

    # One synchronization with a GPU for all parts.
    return bool(torch.stack(list(map_rows(holds, weight.detach(), rows_at_once(scheme, weight)))).all())


def rtn(
    weight: Tensor, scheme: str | Scheme, *, search: Search = "max", stored: torch.dtype | None = None,
    scale_type: torch.dtype | None = None,
) -> QuantTensor:  # fmt: skip
    """Quantizes `weight` [N, K] (any float dtype, any device) by rounding every weight to its nearest code.

    search="max": the scale maps the largest weight to the largest code. "mse": of 31 clip factors, the one with the least mean
    squared error per scale. Channels and groups of zeros dequantize to zeros. scale_type: the dtype of the scales; None lets
    `scale_dtype` choose it. stored: the dtype of the weight in the files, if not its own, for that choice. Raises ValueError
    for a weight that is not a matrix of finite numbers.

    Source: per-channel scales max|W| / 28 for FP6 are ZeroQuant(4+2)'s (arXiv:2312.08583); the clip search is the
    usual MSE observer.
    """
    scheme = parse_scheme(scheme)
    factors = clip_factors(search)
    check_weight(weight, "rtn")
    step, dtype = rows_at_once(scheme, weight), scale_type or scale_dtype(scheme, weight, stored)
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scales, zeros = [], []
    parts = map_rows(lambda part: _quantize_rows(part, scheme, dtype, factors), weight.detach(), step)
    for target, (chosen, scale, zero) in zip(codes.split(step), parts, strict=True):
        target.copy_(chosen)
        scales.append(scale)
        if zero is not None:
            zeros.append(zero)
    return QuantTensor(codes, torch.cat(scales), torch.cat(zeros) if zeros else None, scheme)


def rows_at_once(scheme: Scheme, weight: Tensor) -> int:
    """Returns the rows of one part: about `_at_once` weights, in whole blocks of rows that share scales."""
    n = scheme.granularity.block((weight.shape[0], weight.shape[1]))[0]
    return max(1, _at_once(weight) // max(1, weight.shape[1] * n)) * n


def _at_once(weight: Tensor) -> int:
    return WEIGHTS_AT_ONCE * (TIMES_ON_GPU if weight.is_cuda else 1)


def fit(
    w: Tensor, scheme: Scheme, dtype: torch.dtype, factors: tuple[float, ...], metric: Metric | None = None
) -> tuple[Tensor, Tensor | None]:
    """Returns scale [R] and zero [R] (None without zero points) of weights [R, E] float32 with one scale per row.

    Each row takes the clip factor with the least rounding error. metric: maps differences [R, E] to errors [R]; the sum of
    squares if None. Scales and floating-point zeros have `dtype`, in which they are stored.
    """
    measure = _squares if metric is None else metric
    scale, zero = spanning(w, scheme, dtype, factors[0])
    if len(factors) == 1:
        return scale, zero
    least = measure(_rounded(w, scale, zero, scheme) - w)
    for factor in factors[1:]:
        s, z = spanning(w, scheme, dtype, factor)
        error = measure(_rounded(w, s, z, scheme) - w)
        better = error < least
        least = torch.where(better, error, least)
        scale = torch.where(better, s, scale)
        zero = None if zero is None or z is None else torch.where(better, z, zero)
    return scale, zero


def fit_columns(
    w: Tensor, scheme: Scheme, dtype: torch.dtype, factors: tuple[float, ...], metric: Metric | None = None
) -> tuple[Tensor, Tensor | None]:
    """Returns scale and zero [ceil(N / n), 1], as `fit` does, of the columns w [N, k] float32 of one group; n rows share a
    scale.

    metric: maps the differences [N', k] of N' rows to errors [N']; called from several threads concurrently.
    """
    n = scheme.granularity.block((w.shape[0], w.shape[1]))[0]
    least = max(_WEIGHTS_OF_A_THREAD // max(1, w.shape[1]), -(-w.shape[0] // min(torch.get_num_threads(), MOST)))
    step = -(-least // n) * n if w.device.type == "cpu" else max(1, w.shape[0])
    parts = list(map_rows(lambda part: _fit_columns(part, scheme, dtype, factors, metric), w, step))
    zeros = [zero for _, zero in parts if zero is not None]
    return torch.cat([scale for scale, _ in parts]), torch.cat(zeros) if zeros else None


def _fit_columns(
    w: Tensor, scheme: Scheme, dtype: torch.dtype, factors: tuple[float, ...], metric: Metric | None
) -> tuple[Tensor, Tensor | None]:
    n = scheme.granularity.block((w.shape[0], w.shape[1]))[0]
    rows = -(-w.shape[0] // n)
    pick = _edge_repeated(w.shape[0], n, rows, w.device)
    covered = (w if pick is None else w[pick]).reshape(rows, -1)
    measure = _squares if metric is None else metric
    inside = torch.arange(rows * n, device=w.device) < w.shape[0]
    scale, zero = fit(
        covered, scheme, dtype, factors, lambda d: (measure(d.reshape(rows * n, -1)) * inside).reshape(rows, n).sum(dim=1)
    )
    return scale[:, None], None if zero is None else zero[:, None]


def nearest(w: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme) -> Tensor:
    """Returns the nearest codes (uint8, the shape of `w`) for scales and zeros that broadcast with `w`."""
    if zero is None:
        return encode(w / scale.float(), scheme.weight)
    if scheme.zero is ZeroPoint.INTEGER:
        return encode(w / scale.float() + zero, scheme.weight)
    return encode((w - zero.float()) / scale.float(), scheme.weight)


def values(codes: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme) -> Tensor:
    """Returns dequantized weights (float32, the shape of `codes`) for scales and zeros that broadcast with `codes`."""
    decoded = decode(codes, scheme.weight)
    if zero is None:
        return decoded * scale.float()
    if scheme.zero is ZeroPoint.INTEGER:
        return (decoded - zero.float()) * scale.float()
    return decoded * scale.float() + zero.float()


def clip_factors(search: Search) -> tuple[float, ...]:
    """Returns the clip factors of a search."""
    if search not in ("max", "mse"):
        raise ValueError(f"search is 'max' or 'mse', got {search!r}")
    return (1.0,) if search == "max" else CLIP_FACTORS


def check_weight(weight: Tensor, who: str) -> None:
    """Raises ValueError unless `weight` is a matrix [N, K] of finite floating-point numbers."""
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"{who} quantizes a floating-point matrix [N, K], got {weight.dtype} {tuple(weight.shape)}")
    if not _is_finite(weight):
        bad = int((~weight.isfinite()).sum())
        raise ValueError(f"{bad} of {weight.numel()} weights are not finite: such a layer cannot be quantized")


def _is_finite(weight: Tensor) -> bool:
    """Returns True if all numbers are finite, in one pass without a copy: aminmax returns NaN if there is one."""
    values = weight.detach() if weight.dtype.itemsize > 1 else weight.detach().float()  # 8-bit floats have no comparison
    return values.numel() == 0 or bool(torch.stack(torch.aminmax(values)).isfinite().all())


def _quantize_rows(
    w: Tensor, scheme: Scheme, dtype: torch.dtype, factors: tuple[float, ...]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns codes [N, K], scales and zeros [scale_shape] of rows that share no scale with other rows."""
    w = w.to(torch.float32)
    shape = (w.shape[0], w.shape[1])
    grid = scale_shape(scheme.granularity, shape)
    covered = cover(w, scheme, shape)
    inside = _inside(scheme, shape, w.device)
    metric = None if inside is None else (lambda d: (d * inside).square().sum(dim=1))
    scale, zero = fit(covered, scheme, dtype, factors, metric)
    codes = nearest(covered, scale[:, None], None if zero is None else zero[:, None], scheme)
    return uncover(codes, scheme, shape), scale.reshape(grid), None if zero is None else zero.reshape(grid)


def cover(w: Tensor, scheme: Scheme, shape: tuple[int, int]) -> Tensor:
    """Returns weights [S, n * k] with one row per scale. Where a group or block extends beyond the matrix, its last weights are
    repeated, which leaves its minimum and maximum unchanged."""
    n, k = scheme.granularity.block(shape)
    rows, cols = scale_shape(scheme.granularity, shape)
    pick_n = _edge_repeated(shape[0], n, rows, w.device)
    pick_k = _edge_repeated(shape[1], k, cols, w.device)
    if pick_n is not None:
        w = w[pick_n]
    if pick_k is not None:
        w = w[:, pick_k]
    return w.reshape(rows, n, cols, k).transpose(1, 2).reshape(rows * cols, n * k)


def _inside(scheme: Scheme, shape: tuple[int, int], device: torch.device) -> Tensor | None:
    """Returns the mask [S, n * k] of elements of `cover` that are not repetitions; None if none are."""
    n, k = scheme.granularity.block(shape)
    rows, cols = scale_shape(scheme.granularity, shape)
    if (rows * n, cols * k) == shape:
        return None
    row = torch.arange(rows * n, device=device) < shape[0]
    column = torch.arange(cols * k, device=device) < shape[1]
    return (row[:, None] & column).reshape(rows, n, cols, k).transpose(1, 2).reshape(rows * cols, n * k)


def _edge_repeated(length: int, block: int, blocks: int, device: torch.device) -> Tensor | None:
    if blocks * block == length:
        return None
    return torch.arange(blocks * block, device=device).clamp(max=length - 1)


def uncover(codes: Tensor, scheme: Scheme, shape: tuple[int, int]) -> Tensor:
    """Returns codes [N, K]: the inverse of `cover`."""
    n, k = scheme.granularity.block(shape)
    rows, cols = scale_shape(scheme.granularity, shape)
    blocks = codes.reshape(rows, cols, n, k).transpose(1, 2).reshape(rows * n, cols * k)
    return blocks[: shape[0], : shape[1]].contiguous()


def spanning(w: Tensor, scheme: Scheme, dtype: torch.dtype, factor: float | Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns scale [R] in `dtype` and zero [R] for `factor` times the range of each row of w [R, E]. For factors [F, 1] the
    results are [F, R]."""
    fmt = scheme.weight
    low, high = w.amin(dim=1) * factor, w.amax(dim=1) * factor
    scale = _stored(_span(low, high, scheme) / fmt.max, dtype)
    if scheme.zero is ZeroPoint.NONE:
        return scale, None
    if scheme.zero is ZeroPoint.INTEGER:
        return scale, (-low.clamp(max=0) / scale.float()).round().clamp(0, fmt.max).to(torch.uint8)
    return scale, low.to(dtype)


def _span(low: Tensor, high: Tensor, scheme: Scheme) -> Tensor:
    """Returns the range that the codes have to cover: scale times the largest code."""
    if scheme.zero is ZeroPoint.NONE:
        return torch.maximum(-low, high)
    if scheme.zero is ZeroPoint.INTEGER:  # 0 must be representable, at an integer code
        return high.clamp(min=0) - low.clamp(max=0)
    return high - low


def _stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the scale in its stored dtype: 1 for all-zero weights, else at least the dtype's smallest positive number."""
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return torch.where(scale > 0, scale.clamp(min=smallest), 1.0).to(dtype)


def _rounded(w: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme) -> Tensor:
    scale, zero = scale[:, None], None if zero is None else zero[:, None]
    return values(nearest(w, scale, zero, scheme), scale, zero, scheme)


def _squares(difference: Tensor) -> Tensor:
    return difference.square().sum(dim=1)
