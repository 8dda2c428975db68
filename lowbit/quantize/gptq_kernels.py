"""GPTQ's column loop on a GPU: one kernel rounds a block of columns, another computes the error of each clip factor of a group.

round_block   a program loads ROWS rows of up to BLOCK columns. Per column it rounds, divides the error by the diagonal of the
              inverse Hessian's factor and updates the following columns. It stores codes and errors. Rows are independent.
clip_errors   a program computes FIT_ROWS rows for all clip factors; it sums squared errors times their cost over the columns of
              the group, one column after the other
Exact         the same roundings in the same order as plain torch (no fused multiply-add, true divisions, ties to even), so
              that tests compare bits. Tested: tests/quantize/test_gptq_kernels.py
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit.formats import FloatFormat, Scheme, ZeroPoint
from lowbit.quantize.rtn import spanning

ROWS = 16
"""Rows per program of `round_block`, which is one warp: 64 weights per thread."""

FIT_ROWS = 32
"""Rows per program of `clip_errors`."""

_ZEROS = {ZeroPoint.NONE: 0, ZeroPoint.INTEGER: 1, ZeroPoint.FLOAT: 2}
# 1.5 * 2^23: adding and then subtracting this rounds float32 numbers below 2^22 to integers, ties to even.
_ROUNDING = tl.constexpr(12582912.0)


@triton.jit
def nearest_integer(x, SMALLEST: tl.constexpr, LARGEST: tl.constexpr):
    """Returns codes and values of x in an integer format."""
    value = tl.minimum(tl.maximum(x, SMALLEST), LARGEST)
    value = (value + _ROUNDING) - _ROUNDING
    return (value - SMALLEST).to(tl.int32), value


@triton.jit
def nearest_float(x, LARGEST: tl.constexpr, LOWEST: tl.constexpr, MANTISSA: tl.constexpr, SIGN: tl.constexpr):
    """Returns codes and values of x in a float format whose subnormals have the exponent LOWEST and whose sign is bit SIGN."""
    negative = x.to(tl.int32, bitcast=True) & -2147483648
    magnitude = tl.minimum(tl.abs(x), LARGEST)
    exponent = tl.maximum((magnitude.to(tl.int32, bitcast=True) >> 23) - 127, LOWEST)
    steps = magnitude * ((127 + MANTISSA - exponent) << 23).to(tl.float32, bitcast=True)
    whole = (steps + _ROUNDING) - _ROUNDING
    if MANTISSA == 0:  # without mantissa, the exponent's last bit breaks ties
        whole = tl.where((steps == 1.5) & (((exponent - LOWEST) & 1) == 1), 1.0, whole)
    code = whole.to(tl.int32) + ((exponent - LOWEST) << MANTISSA) + ((negative >> 31) & 1) * (1 << SIGN)
    value = whole * ((127 - MANTISSA + exponent) << 23).to(tl.float32, bitcast=True)
    return code, (value.to(tl.int32, bitcast=True) | negative).to(tl.float32, bitcast=True)


@triton.jit
def rounded(
    x, scale, zero, ZERO: tl.constexpr, FLOAT: tl.constexpr, SMALLEST: tl.constexpr, LARGEST: tl.constexpr,
    LOWEST: tl.constexpr, MANTISSA: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """Returns codes and values of weights, as `quantize.rtn.nearest` and `values` do."""
    if ZERO == 2:
        x = x - zero
    x = tl.div_rn(x, scale)
    if ZERO == 1:
        x = x + zero
    if FLOAT:
        code, value = nearest_float(x, LARGEST, LOWEST, MANTISSA, SIGN)
    else:
        code, value = nearest_integer(x, SMALLEST, LARGEST)
    if ZERO == 1:
        value = value - zero
    value = value * scale
    if ZERO == 2:
        value = value + zero
    return code, value


@triton.jit(
    do_not_specialize=["columns", "factor_stride", "scales_stride", "rows_per_scale"],
    do_not_specialize_on_alignment=["factor", "groups"],
)
def round_block(
    codes, errors, w, factor, groups, scales, zeros, n, columns, factor_stride, scales_stride, rows_per_scale,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, ZERO: tl.constexpr, FLOAT: tl.constexpr, SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr, LOWEST: tl.constexpr, MANTISSA: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """Stores codes and errors [columns, n] of w [columns, n]. groups [columns]: the column of `scales` of each column."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    exist = row < n
    tile = tl.load(w + column[:, None] * n + row[None, :], mask=(column < columns)[:, None] & exist[None, :], other=0.0)
    own = (row // rows_per_scale) * scales_stride
    for j in range(columns):
        # Extracts column j as a sum with zeros. It adds the bits as integers, because -0.0 + 0.0 is 0.0 in floats.
        bits = tl.where(column[:, None] == j, tile.to(tl.int32, bitcast=True), 0)
        x = tl.sum(bits, axis=0).to(tl.float32, bitcast=True)
        at = own + tl.load(groups + j)
        scale = tl.load(scales + at, mask=exist, other=1.0).to(tl.float32)
        zero = None
        if ZERO != 0:
            zero = tl.load(zeros + at, mask=exist, other=0).to(tl.float32)
        code, value = rounded(x, scale, zero, ZERO, FLOAT, SMALLEST, LARGEST, LOWEST, MANTISSA, SIGN)
        error = tl.div_rn(x - value, tl.load(factor + j * factor_stride + j))
        tl.store(codes + j * n + row, code.to(tl.uint8), mask=exist)
        tl.store(errors + j * n + row, error, mask=exist)
        behind = (column > j) & (column < columns)
        share = tl.load(factor + j * factor_stride + column, mask=behind, other=0.0)
        tile = tile - share[:, None] * error[None, :]


@triton.jit(do_not_specialize=["columns", "factors", "scale_rows", "rows_per_scale"], do_not_specialize_on_alignment=["cost"])
def clip_errors(
    errors, w, scales, zeros, cost, n, columns, factors, scale_rows, rows_per_scale,
    FACTORS: tl.constexpr, ROWS: tl.constexpr, ZERO: tl.constexpr, FLOAT: tl.constexpr, SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr, LOWEST: tl.constexpr, MANTISSA: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """Stores errors [factors, n] of rounding w [columns, n] with scales [factors, scale_rows]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    factor = tl.arange(0, FACTORS)
    exist = (factor < factors)[:, None] & (row < n)[None, :]
    at = factor[:, None] * scale_rows + (row // rows_per_scale)[None, :]
    scale = tl.load(scales + at, mask=exist, other=1.0).to(tl.float32)
    zero = None
    if ZERO != 0:
        zero = tl.load(zeros + at, mask=exist, other=0).to(tl.float32)
    total = tl.zeros([FACTORS, ROWS], tl.float32)
    column = w + row
    for j in range(columns):
        x = tl.load(column, mask=row < n, other=0.0)[None, :]
        column += n
        _, value = rounded(x, scale, zero, ZERO, FLOAT, SMALLEST, LARGEST, LOWEST, MANTISSA, SIGN)
        difference = value - x
        total += (difference * difference) * tl.load(cost + j)
    tl.store(errors + factor[:, None] * n + row[None, :], total, mask=exist)


def round_columns(
    codes: Tensor, errors: Tensor, w: Tensor, factor: Tensor, groups: Tensor, scale: Tensor, zero: Tensor | None,
    scheme: Scheme, rows: int,
) -> None:  # fmt: skip
    """Rounds k columns of a weight. Writes `codes` uint8 [k, N] and `errors` float32 [k, N], by which the caller updates the
    columns after these.

    w: float32 [k, N], columns contiguous. factor: float32 [k, k], these columns of the inverse Hessian's factor. scale, zero:
    those of the whole weight. groups int [k]: the column of scales for each column of w. rows: number of rows of the weight
    that share a scale.
    """
    k, n = w.shape
    columns = max(16, triton.next_power_of_2(k))
    round_block[(triton.cdiv(n, ROWS),)](
        codes, errors, w, factor, groups, scale, zero, n, k, factor.stride(0), scale.stride(0), rows,
        COLUMNS=columns, ROWS=ROWS, **_format(scheme), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def fit(
    w: Tensor, scheme: Scheme, dtype: torch.dtype, factors: Tensor, cost: Tensor, rows: int
) -> tuple[Tensor, Tensor | None]:
    """Returns scale and zero [S] of one group from its columns `w` [k, N] float32; `rows` = N / S rows share a scale.

    Of the clip `factors` [F] it takes the first with the least squared error, weighted by `cost` [k].
    """
    k, n = w.shape
    w = w.contiguous()
    over = -n % rows
    low = torch.nn.functional.pad(w.amin(dim=0), (0, over), value=torch.inf).reshape(-1, rows).amin(dim=1)
    high = torch.nn.functional.pad(w.amax(dim=0), (0, over), value=-torch.inf).reshape(-1, rows).amax(dim=1)
    scales, zeros = spanning(torch.stack([low, high], dim=1), scheme, dtype, factors[:, None])
    if len(factors) == 1:
        return scales[0], None if zeros is None else zeros[0]
    errors = torch.empty(len(factors), n, device=w.device)
    clip_errors[(triton.cdiv(n, FIT_ROWS),)](
        errors, w, scales, zeros, cost, n, k, len(factors), scales.shape[1], rows,
        FACTORS=triton.next_power_of_2(len(factors)), ROWS=FIT_ROWS, **_format(scheme), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    best = torch.nn.functional.pad(errors, (0, over)).reshape(len(factors), -1, rows).sum(dim=2).argmin(dim=0)[None]
    return scales.gather(0, best)[0], None if zeros is None else zeros.gather(0, best)[0]


def _format(scheme: Scheme) -> dict[str, Any]:
    """Returns the constexpr arguments of the kernels for a scheme."""
    fmt = scheme.weight
    constants = {"ZERO": _ZEROS[scheme.zero], "FLOAT": isinstance(fmt, FloatFormat), "SMALLEST": fmt.min, "LARGEST": fmt.max}
    if isinstance(fmt, FloatFormat):
        return constants | {"LOWEST": 1 - fmt.bias, "MANTISSA": fmt.mantissa, "SIGN": fmt.bits - 1}
    return constants | {"LOWEST": 0, "MANTISSA": 0, "SIGN": 0}
