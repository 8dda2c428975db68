"""GPTQ: rounds weights column by column and compensates each error in the columns that follow.

Source: E. Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
arXiv:2210.17323. It describes the order of columns, the inverse Hessian's Cholesky factor and lazy updates in blocks.
`act_order` and `static_groups` are the options of that name in the authors' code.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from lowbit.formats import InputTransform, QuantTensor, Scheme, ZeroPoint, parse_scheme, scale_shape
from lowbit.methods import GptqSearch
from lowbit.quantize.rtn import CLIP_FACTORS, check_weight, fit_columns, nearest, scale_dtype, values
from lowbit.quantize.threads import one_thread

BLOCK = 128
"""Columns whose errors update the following columns in one matrix product; the paper's number."""


def gptq(
    weight: Tensor,
    hessian: Tensor,
    scheme: str | Scheme,
    *,
    act_order: bool = False,
    static_groups: bool = False,
    search: GptqSearch = "loss",
    damping: float = 0.05,
    stored: torch.dtype | None = None,
    scale_type: torch.dtype | None = None,
) -> QuantTensor:
    """Quantizes `weight` [N, K] (any float dtype, any device) for inputs whose sum of x^T x is `hessian` [K, K].

    search: "max" and "mse" as for `rtn`; "loss" weighs the squared error of each column by its cost in the outputs after
    compensation by the following columns, which is the loss of the paper. A group's scales are computed when its first column
    is reached, from the weights as updated so far; with `static_groups` all are computed from the original weights. `act_order`
    takes the columns with the largest inputs first; groups are then made of columns in that order, and the result has an
    `order`, unless `static_groups` keeps the groups or one scale spans the row. `damping` times the mean of the Hessian's
    diagonal is added to the diagonal (docs/internals/quantization.md says how 0.05 was chosen). Channels that were zero in all
    inputs are rounded to nearest. stored, scale_type: as for `rtn`.

    Columns are updated in float32, the Hessian is factorized in float64; on a GPU, kernels (`gptq_kernels`) update the columns
    with another order of summation. Raises ValueError for weights that are no matrix of finite numbers, and for a Hessian of
    another shape or one that cannot be factorized.
    """
    scheme = parse_scheme(scheme)
    if search not in ("max", "mse", "loss"):
        raise ValueError(f"search is 'max', 'mse' or 'loss', got {search!r}")
    check_weight(weight, "gptq")
    k = weight.shape[1]
    if tuple(hessian.shape) != (k, k) or not bool(hessian.isfinite().all()):
        raise ValueError(f"the Hessian of inputs of {k} channels is a finite [{k}, {k}], got {tuple(hessian.shape)}")
    hessian = hessian.to(weight.device)
    order = hessian.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(k, device=weight.device)
    factor = inverse_factor(hessian[order][:, order] if act_order else hessian, damping).float()
    # The cost of a column's squared error, in the original order of channels.
    cost = torch.empty(k, device=weight.device).index_copy_(0, order, factor.diagonal().square().reciprocal())
    on_gpu = weight.is_cuda and importlib.util.find_spec("triton") is not None
    grid = (_GpuGrid if on_gpu else _Grid)(weight, scheme, search, scale_type or scale_dtype(scheme, weight, stored))
    w = weight.detach().float()
    if static_groups:
        for start in range(0, k, grid.width):
            columns = slice(start, start + grid.width)
            grid.fit(start // grid.width, w[:, columns], cost[columns])
        codes = grid.round_columns(w[:, order].T.contiguous(), factor, order // grid.width, None)
    else:
        groups = torch.arange(k, device=weight.device) // grid.width
        codes = grid.round_columns(w[:, order].T.contiguous(), factor, groups, cost[order])
    if act_order and not static_groups and grid.width < k:
        return QuantTensor(codes.T.contiguous(), grid.scale, grid.zero, scheme, InputTransform(order.to(torch.int32)))
    natural = torch.empty_like(codes).index_copy_(0, order, codes)
    return QuantTensor(natural.T.contiguous(), grid.scale, grid.zero, scheme)


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """Returns the upper triangular U [K, K] with U^T U = (H + d I)^-1, d = damping * mean(diagonal), float64.

    With H = R R^T, R upper triangular (the Cholesky factorization from the last row and column), U = R^-1. The inverse of H is
    never computed. Raises ValueError when H + d I is not positive definite.
    """
    extra = damping * float(hessian.diagonal().double().mean())
    damped = hessian.flip(0, 1).double()
    damped.diagonal().add_(extra if extra > 0 else 1.0)
    lower, failed = torch.linalg.cholesky_ex(damped)
    del damped  # keeps at most three such matrices in memory; with 28,672 channels each takes 6.6 GB
    if int(failed):
        raise ValueError(f"the Hessian is not positive definite with damping {damping}; give more inputs or more damping")
    eye = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
    inverse = torch.linalg.solve_triangular(lower, eye, upper=False)
    del lower, eye
    return inverse.flip(0, 1)


class _Grid:
    """The scales and zeros of a weight [N, K], computed one group at a time, and the rounding of columns with them."""

    def __init__(self, weight: Tensor, scheme: Scheme, search: GptqSearch, dtype: torch.dtype) -> None:
        shape = (weight.shape[0], weight.shape[1])
        self.rows, self.width = scheme.granularity.block(shape)
        self.scheme = scheme
        self._factors = (1.0,) if search == "max" else CLIP_FACTORS
        self._by_loss = search == "loss"
        empty = torch.empty(scale_shape(scheme.granularity, shape), dtype=dtype, device=weight.device)
        self.scale = empty
        self.zero = None if scheme.zero is ZeroPoint.NONE else torch.empty_like(empty)
        if scheme.zero is ZeroPoint.INTEGER:
            self.zero = torch.empty_like(empty, dtype=torch.uint8)

    def fit(self, group: int, w: Tensor, cost: Tensor) -> None:
        """Computes the scales of a group from its columns [N, k]; `cost` [k] weighs their squared errors."""
        scale, zero = self._fitted(w, cost)
        self.scale[:, group] = scale
        if self.zero is not None and zero is not None:
            self.zero[:, group] = zero

    def round_columns(self, w: Tensor, factor: Tensor, groups: Tensor, cost: Tensor | None) -> Tensor:
        """Returns codes [K, N] of the transposed weight `w` [K, N], which is overwritten.

        groups [K]: the group (column of `scale`) of each row of w. With `cost` [K], scales are computed at the start of each
        group.
        """
        k, n = w.shape
        codes = torch.empty(k, n, dtype=torch.uint8, device=w.device)
        rows = torch.arange(n, device=w.device) // self.rows
        numbers = groups.tolist()
        for start, end in _blocks(k, BLOCK if cost is None else self.width):
            errors = torch.empty(end - start, n, device=w.device)
            for j in range(start, end):
                if cost is not None and j % self.width == 0:
                    self.fit(numbers[j], w[j : j + self.width].T, cost[j : j + self.width])
                with one_thread():
                    scale, zero = self.scale[rows, numbers[j]], None if self.zero is None else self.zero[rows, numbers[j]]
                    codes[j] = nearest(w[j], scale, zero, self.scheme)
                    error = (w[j] - values(codes[j], scale, zero, self.scheme)) / factor[j, j]
                    w[j + 1 : end].addr_(factor[j, j + 1 : end], error, alpha=-1)
                    errors[j - start] = error
            w[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
        return codes

    def _fitted(self, w: Tensor, cost: Tensor) -> tuple[Tensor, Tensor | None]:
        metric = (lambda d: d.square() @ cost) if self._by_loss else None
        scale, zero = fit_columns(w, self.scheme, self.scale.dtype, self._factors, metric)
        return scale[:, 0], None if zero is None else zero[:, 0]


class _GpuGrid(_Grid):
    """`_Grid` implemented by kernels. It synchronizes with the GPU only after the last column."""

    def __init__(self, weight: Tensor, scheme: Scheme, search: GptqSearch, dtype: torch.dtype) -> None:
        super().__init__(weight, scheme, search, dtype)
        self._clip_factors = torch.tensor(self._factors, device=weight.device)

    def round_columns(self, w: Tensor, factor: Tensor, groups: Tensor, cost: Tensor | None) -> Tensor:
        from lowbit.quantize.gptq_kernels import round_columns

        k, n = w.shape
        factor = factor.contiguous()  # row-major, as the kernel reads it
        codes = torch.empty(k, n, dtype=torch.uint8, device=w.device)
        errors = torch.empty(min(k, BLOCK), n, device=w.device)
        for start, end in _blocks(k, BLOCK) if cost is None else _inside_groups(k, self.width):
            if cost is not None and start % self.width == 0:
                self.fit(start // self.width, w[start : start + self.width].T, cost[start : start + self.width])
            own = slice(start, end)
            block_errors = errors[: end - start]
            round_columns(
                codes[own], block_errors, w[own], factor[own, own], groups[own], self.scale, self.zero, self.scheme, self.rows
            )
            w[end:].addmm_(factor[own, end:].T, block_errors, alpha=-1)
        if not all(bool(t.isfinite().all()) for t in (self.scale, self.zero) if t is not None):
            raise ValueError(f"some scales or zeros are beyond {self.scale.dtype}: weights this large cannot be quantized")
        return codes

    def _fitted(self, w: Tensor, cost: Tensor) -> tuple[Tensor, Tensor | None]:
        from lowbit.quantize.gptq_kernels import fit

        cost = cost if self._by_loss else torch.ones_like(cost)
        return fit(w.T, self.scheme, self.scale.dtype, self._clip_factors, cost, self.rows)


def _blocks(k: int, width: int) -> list[tuple[int, int]]:
    """Returns ranges of about BLOCK columns. Each contains whole groups or is inside one, so that the scales of a group are
    computed from weights in which all earlier errors are compensated."""
    if width > BLOCK:
        return _inside_groups(k, width)
    step = BLOCK // width * width
    return [(start, min(start + step, k)) for start in range(0, k, step)]


def _inside_groups(k: int, width: int) -> list[tuple[int, int]]:
    """Returns ranges of at most BLOCK columns, each inside one group."""
    return [
        (start, min(start + BLOCK, group + width, k))
        for group in range(0, k, width)
        for start in range(group, min(group + width, k), BLOCK)
    ]
