"""Trains the rounding of the two matrices of one expert against the expert's outputs for its calibration tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lowbit.formats import QuantTensor, Scheme
from lowbit.methods import Learned
from lowbit.quantize.learned import RATES, Descent, LearnedRounding

ROWS_OF_A_SEQUENCE = 128
"""An iteration reads this many tokens of an expert for each sequence of `Learned.batch`. One sequence alone has fewer for an
expert: of 512 tokens that go to 8 of 128 experts each, 32 on average."""


def learn_expert(
    output: Callable[[Tensor, Tensor, Tensor], Tensor],
    weights: tuple[Tensor, Tensor],
    schemes: tuple[Scheme, Scheme],
    target: Tensor,
    importance: Tensor,
    method: Learned,
    *,
    seed: int = 0,
    scale_types: tuple[torch.dtype, torch.dtype],
    squares: tuple[Tensor, Tensor],
) -> tuple[QuantTensor, QuantTensor]:
    """Returns gate_up and down of one expert, rounded so that its outputs are close to `target` [R, K'], float32.

    output: a differentiable function of gate_up [N, K], down [K', I] and row numbers int64 [r] that returns the outputs [r, K']
    of these rows. weights: both matrices before rounding. importance [R, 1]: the factor of each row's error. squares: the mean
    squares of the input channels of both matrices, [K] and [I]. Offsets and clip factors (`quantize.learned`) are trained as in
    `models.learn`, in float32. If the error on all rows would grow, both stay rounded to nearest. `method.seed` and `seed`
    decide the order of rows.
    """
    roundings = tuple(
        LearnedRounding(weight, scheme, scale_type=dtype, importance=square)
        for weight, scheme, dtype, square in zip(weights, schemes, scale_types, squares, strict=True)
    )
    rows = torch.arange(len(target), device=target.device)
    before = _error(output, roundings, target, importance, rows)
    for rate in RATES:
        _descend(output, roundings, target, importance, method, seed, rate)
        if _error(output, roundings, target, importance, rows) <= before:
            break
        for rounding in roundings:
            rounding.reset()
    return roundings[0].quantized(), roundings[1].quantized()


def _descend(
    output: Callable[[Tensor, Tensor, Tensor], Tensor], roundings: tuple[LearnedRounding, ...], target: Tensor,
    importance: Tensor, method: Learned, seed: int, rate: float,
) -> None:  # fmt: skip
    """Runs the iterations of `learn_expert`, at one of `RATES`."""
    generator = torch.Generator().manual_seed(method.seed + seed)
    together = min(len(target), method.batch * ROWS_OF_A_SEQUENCE)
    descent = Descent(roundings, method.iterations)
    shuffled: list[Tensor] = []
    for step in range(method.iterations):
        if not shuffled:
            shuffled = list(torch.randperm(len(target), generator=generator).to(target.device).split(together))
            shuffled = [rows for rows in shuffled if len(rows) == together]
        rows = shuffled.pop()
        with torch.enable_grad():
            difference = output(roundings[0].dense(), roundings[1].dense(), rows) - target[rows]
            (difference * importance[rows]).square().sum().backward(inputs=descent.parameters)
        descent.set_rate(rate * (1 - step / method.iterations) / method.iterations)
        descent.step()


@torch.no_grad()
def _error(
    output: Callable[[Tensor, Tensor, Tensor], Tensor], roundings: tuple[LearnedRounding, ...], target: Tensor,
    importance: Tensor, rows: Tensor,
) -> float:  # fmt: skip
    difference = output(roundings[0].dense(), roundings[1].dense(), rows) - target
    return float((difference * importance).double().square().sum())
