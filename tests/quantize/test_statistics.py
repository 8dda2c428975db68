"""Calibration collects statistics piece by piece. They equal those computed from all inputs at once."""

from __future__ import annotations

import torch

from lowbit.quantize.statistics import InputStatistics, output_error
from tests.quantize.data import inputs, statistics, weights
from tests.quantize.data import output_error as multiplied


def test_sums_over_batches_are_those_of_all_inputs():
    x = inputs(24)
    s = statistics(x, keep=100)
    torch.testing.assert_close(s.hessian.double(), x.double().T @ x.double(), rtol=1e-5, atol=1e-2)
    assert torch.equal(s.abs_max, x.abs().amax(0)) and s.rows == 300
    torch.testing.assert_close(s.abs_mean, x.abs().mean(0))
    alone = InputStatistics(24, hessian=False)
    for part in x.split(70):
        alone.add(part)
    for each in (s, alone, alone.divided(torch.full((24,), 2.0))):
        expected = x.square().mean(0) / (4 if each not in (s, alone) else 1)
        torch.testing.assert_close(each.mean_square, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(s.sample, x[:100]) and statistics(x).sample.shape == (0, 24)


def test_the_hessian_gives_the_error_of_the_outputs():
    x, d = inputs(24), weights(5, 24)
    s = statistics(x)
    expected = (x.double() @ d.double().T).square().sum(dim=0)
    torch.testing.assert_close(output_error(d, s.hessian).double(), expected, rtol=1e-4, atol=1e-3)
    assert abs(float(output_error(d, s.hessian).sum()) / multiplied(d, x) - 1) < 1e-4


def test_dividing_the_input_divides_its_statistics():
    x, scale = inputs(24), torch.linspace(0.5, 3, 24)
    got, expected = statistics(x, keep=50).divided(scale), statistics(x / scale, keep=50)
    torch.testing.assert_close(got.hessian, expected.hessian, rtol=1e-4, atol=1e-2)
    for name in ("abs_max", "abs_mean", "sample"):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name))
    assert got.rows == expected.rows


def test_other_shapes_and_dtypes():
    x = inputs(8, rows=12).reshape(2, 6, 8).to(torch.bfloat16)
    s = statistics(x.reshape(12, 8))
    whole = type(s)(8)
    whole.add(x)
    assert torch.equal(whole.hessian, s.hessian) and whole.rows == 12
