"""Mixed bits: a scheme for each unit of layers, such that all errors together are small and the weights fit a budget.

What a change d of weights does to a model's predictions is, to second order, the Kullback-Leibler divergence 1/2 d^T F d, with
F the Fisher information of the weights. Its diagonal F[n, k] is the mean over tokens of (g[n] x[k])^2, where x is what a layer
reads and g the gradient, at what the layer puts out, of the log-probability of a token drawn from the model itself. Source: S.
Kim et al., "SqueezeLLM: Dense-and-Sparse Quantization", arXiv:2306.07629, weighs weights so (with the tokens of the text).
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
class Candidate:
    """One scheme for one unit: `error`, what it costs in nats per token (see `sensitivity`), and `bits`, all it stores."""

    scheme: Scheme
    error: float
    bits: int


def sensitivity(
    weights: Sequence[Tensor], fisher: Sequence[Tensor], schemes: Sequence[Scheme], low_rank: int = 0
) -> list[Candidate]:
    """What each scheme does to a unit, layers with the weights [N_i, K] that read one input and take one scheme: half the sum
    of the squared differences, each times the Fisher information of its weight, `fisher` [N_i, K]. Weights are rounded to
    nearest, whatever quantizes them in the end, and without corrections, whose bits count if they will have rank `low_rank`."""
    out = []
    for scheme in schemes:
        error, bits = 0.0, 0
        for weight, information in zip(weights, fisher, strict=True):
            q = rtn(weight, scheme, search="mse")
            difference = (q.dequantize() - weight.float()).square_().mul_(information)
            error += 0.5 * float(difference.sum(dim=1).double().sum())
            bits += stored_bits(q.shape, scheme, low_rank)
        out.append(Candidate(scheme, error, bits))
    return out


def stored_bits(shape: tuple[int, int], scheme: Scheme, low_rank: int = 0) -> int:
    """What a weight of `shape` (N, K) stores, scales, zeros and a correction of rank `low_rank` included."""
    grid = torch.empty(scale_shape(scheme.granularity, shape), dtype=scale_dtype(scheme), device="meta")
    zeros = {ZeroPoint.NONE: None, ZeroPoint.INTEGER: grid.to(torch.uint8), ZeroPoint.FLOAT: grid}
    q = QuantTensor(torch.empty(shape, dtype=torch.uint8, device="meta"), grid, zeros[scheme.zero], scheme)
    return 8 * q.nbytes + 16 * low_rank * sum(shape)


def choose(units: Mapping[str, Sequence[Candidate]], budget_bits: float) -> dict[str, Candidate]:
    """A candidate for each unit with at most `budget_bits` in all: begins with the fewest bits everywhere, then takes the steps
    that save the most error per bit while they fit. Raises ValueError when even the fewest bits are too many.

    Only candidates on the lower convex hull of (bits, error) are considered, so the steps of a unit come in order of worth; the
    sum of errors is within one step of the least there is.
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


def _hull(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates by growing bits with falling error, each step saving less per bit than the one before."""
    hull: list[Candidate] = []
    for c in sorted(candidates, key=lambda c: (c.bits, c.error)):
        if hull and c.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _slope(hull[-2], c) >= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(c)
    return hull


def _slope(a: Candidate, b: Candidate) -> float:
    return (a.error - b.error) / (b.bits - a.bits)
