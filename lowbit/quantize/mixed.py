"""Mixed precision: a scheme for each unit of layers that minimises the sum of errors within a budget of bits.

A change d of the weights changes the model's predictions, to second order, by a Kullback-Leibler divergence of 1/2 d^T F d,
with F the Fisher information of the weights. Its diagonal F[n, k] is the mean over tokens of (g[n] x[k])^2: x is the input of a
layer and g the gradient, at its output, of the log-probability of a token sampled from the model. Source: S. Kim et al.,
"SqueezeLLM: Dense-and-Sparse Quantization", arXiv:2306.07629, weights the error this way, but with the text's own tokens in
place of sampled ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from lowbit.formats import QuantTensor, Scheme, ZeroPoint, scale_shape
from lowbit.quantize.rtn import rtn, scale_dtype


@dataclass(frozen=True)
class SchemeCost:
    """The cost of one scheme for one unit: `error` in nats per token (see `sensitivity`) and `bits` stored in all."""

    scheme: Scheme
    error: float
    bits: int


def sensitivity(
    weights: Sequence[Tensor], fisher: Sequence[Tensor], schemes: Sequence[Scheme], low_rank: int = 0
) -> list[SchemeCost]:
    """Returns the cost of each scheme for a unit: layers with `weights` [N_i, K] that read one input and share a scheme.

    The error is half the sum of squared differences, weighted by the Fisher information `fisher` [N_i, K]. Weights are rounded
    to nearest, without low-rank corrections; the bits include those of a correction of rank `low_rank`.
    """
    out = []
    for scheme in schemes:
        error, bits = 0.0, 0
        for weight, information in zip(weights, fisher, strict=True):
            q = rtn(weight, scheme, search="mse")
            difference = (q.dequantize() - weight.float()).square_().mul_(information)
            error += 0.5 * float(difference.sum(dim=1).double().sum())
            bits += stored_bits(q.shape, scheme, low_rank)
        out.append(SchemeCost(scheme, error, bits))
    return out


def stored_bits(shape: tuple[int, int], scheme: Scheme, low_rank: int = 0) -> int:
    """Returns the bits of a quantized weight [N, K] with scales, zeros and a correction of rank `low_rank`."""
    grid = torch.empty(scale_shape(scheme.granularity, shape), dtype=scale_dtype(scheme), device="meta")
    zeros = {ZeroPoint.NONE: None, ZeroPoint.INTEGER: grid.to(torch.uint8), ZeroPoint.FLOAT: grid}
    q = QuantTensor(torch.empty(shape, dtype=torch.uint8, device="meta"), grid, zeros[scheme.zero], scheme)
    return 8 * q.nbytes + 16 * low_rank * sum(shape)


def choose(units: Mapping[str, Sequence[SchemeCost]], budget_bits: float) -> dict[str, SchemeCost]:
    """Returns a scheme for each unit with at most `budget_bits` in all.

    Starts with the fewest bits everywhere and takes the steps that reduce the error most per bit while they fit. Only
    candidates on the lower convex hull of (bits, error) are considered, so the steps of a unit have falling gain, and the sum
    of errors is within one step of the minimum. Raises ValueError if even the fewest bits exceed the budget.
    """
    hulls = {name: _hull(candidates) for name, candidates in units.items()}
    at = dict.fromkeys(hulls, 0)
    used = sum(hull[0].bits for hull in hulls.values())
    if used > budget_bits:
        raise ValueError(
            f"the smallest candidates take {used:,} bits, the budget is {budget_bits:,.0f}; "
            "allow more bits or offer smaller schemes"
        )
    steps = [
        ((a.error - b.error) / (b.bits - a.bits), name, i)
        for name, hull in hulls.items()
        for i, (a, b) in enumerate(pairwise(hull))
    ]
    for _, name, i in sorted(steps, key=lambda step: (-step[0], step[1], step[2])):
        more = hulls[name][i + 1].bits - hulls[name][i].bits
        if at[name] == i and used + more <= budget_bits:
            at[name], used = i + 1, used + more
    return {name: hull[at[name]] for name, hull in hulls.items()}


def _hull(candidates: Sequence[SchemeCost]) -> list[SchemeCost]:
    """Returns the lower convex hull of the candidates, by growing bits."""
    hull: list[SchemeCost] = []
    for c in sorted(candidates, key=lambda c: (c.bits, c.error)):
        if hull and c.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _slope(hull[-2], c) >= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(c)
    return hull


def _slope(a: SchemeCost, b: SchemeCost) -> float:
    return (a.error - b.error) / (b.bits - a.bits)
