"""Learned rounding: gradients equal those computed by hand, the rounded values are those stored, and without learning it rounds
to nearest.
"""

from __future__ import annotations

import pytest
import torch

from lowbit.formats import IntFormat, ZeroPoint, code_values, parse_scheme
from lowbit.quantize import learned, rtn
from lowbit.quantize.learned import LearnedRounding
from tests.quantize.data import weights

SCHEMES = (
    "w2a16_g16", "w3a16_g32_z", "w4a16_g32", "w4a16_g48", "w4a16_g32_fz", "w5a16", "w8a16_t", "w4a16_b16x24", "w4e2m1a16_g32",
    "w5e2m2a16", "w6e3m2a16_g64", "w6e2m3a16", "w8e4m3a16", "w8e5m2a16_g32",
)  # fmt: skip


def moved(name, shape=(40, 96), seed=0):
    """A rounding with random offsets and factors."""
    rounding = LearnedRounding(weights(*shape), parse_scheme(name))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        rounding.offset.uniform_(-0.7, 0.7, generator=generator)
        rounding.factors.uniform_(0.6, 1.1, generator=generator)
    rounding.clamp()
    return rounding


@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_learned_is_what_is_stored(name):
    rounding = moved(name)
    dense, q = rounding.dense().detach(), rounding.quantized()
    assert torch.equal(q.dequantize(), dense)
    assert torch.equal(rounding.dense(torch.bfloat16), dense.bfloat16())
    assert rounding.offset.abs().max() == 0.5 and 0.1 <= rounding.factors.min() <= rounding.factors.max() <= 1


@pytest.mark.parametrize("name", SCHEMES)
def test_nothing_learned_is_rounding_to_nearest(name):
    scheme, w = parse_scheme(name), weights(40, 96)
    rounding = moved(name)
    rounding.reset()
    expected, got = rtn(w, scheme), rounding.quantized()
    if isinstance(scheme.weight, IntFormat) and scheme.zero is ZeroPoint.NONE:
        # LearnedRounding uses all 2^bits codes, while rtn does not use the lowest. The total error is smaller.
        assert (got.dequantize() - w).norm() < (expected.dequantize() - w).norm()
        assert int(got.codes.min()) == 0 and (got.scale.numel() == 1 or (got.scale < 0).any())
    else:
        assert (got.dequantize() - expected.dequantize()).abs().max() <= 1e-6 * w.abs().max()


def importance(k=96):
    return torch.rand(k, generator=torch.Generator().manual_seed(5)) ** 4


@pytest.mark.parametrize(
    "name", ["w2a16_g16", "w2a16_g48", "w3a16", "w3a16_g32_z", "w2a16_g32_fz", "w3a16_b16x24", "w3e1m1a16_g32"]
)
def test_few_bits_start_at_the_least_error_of_their_inputs(name):
    scheme, w, squares = parse_scheme(name), weights(40, 96), importance()

    def error(rounding):
        return float(((rounding.quantized().dequantize() - w).square() * squares).sum())

    start, plain = LearnedRounding(w, scheme, importance=squares), LearnedRounding(w, scheme)
    assert error(start) < 0.95 * error(plain)
    assert error(start) < 1.0001 * error(LearnedRounding(w, scheme, importance=torch.ones(96)))
    assert torch.equal(start.dense().detach(), start.quantized().dequantize())
    if scheme.weight.bits == 2 and scheme.zero is ZeroPoint.NONE:
        # No other scale within the bounds of the search is better: the searched grid is finer than a tenth of the range.
        ends = start._ends.clone()
        for factor in (0.8, 0.9, 1.1, 1.2, -1.0):
            start._ends = ends * factor
            assert error(start) > error(LearnedRounding(w, scheme, importance=squares)) * 0.9999
    with torch.no_grad():
        start.factors.fill_(5.0)
    start.clamp()
    assert float(start.factors.detach().max()) == 2.0


def test_a_range_is_searched_in_parts(monkeypatch):
    scheme, w = parse_scheme("w2a16_g32_z"), weights(40, 96)
    whole = LearnedRounding(w, scheme, importance=importance()).quantized()
    monkeypatch.setattr(learned, "WEIGHTS_AT_ONCE", 32 * 7)
    part = LearnedRounding(w, scheme, importance=importance()).quantized()
    assert all(map(torch.equal, (whole.codes, whole.scale, whole.zero), (part.codes, part.scale, part.zero)))


def test_four_bits_start_as_without_inputs():
    w = weights(40, 96)
    a, b = (LearnedRounding(w, parse_scheme("w4a16_g32"), importance=i).quantized() for i in (importance(), None))
    assert torch.equal(a.scale, b.scale) and torch.equal(a.codes, b.codes)


def test_channels_without_inputs_and_groups_of_zeros():
    w = weights(8, 64)
    w[:, :32] = 0
    q = LearnedRounding(w, parse_scheme("w2a16_g32"), importance=torch.zeros(64)).quantized()
    assert torch.equal(q.dequantize()[:, :32], w[:, :32]) and (q.dequantize() - w).norm() < 0.5 * w.norm()


@pytest.mark.parametrize("name", ["w3a16_g32", "w4e2m1a16_g32", "w6e3m2a16_g32"])
def test_an_offset_moves_a_weight_to_the_neighbouring_value_and_no_further(name):
    scheme = parse_scheme(name)
    values = code_values(scheme.weight).unique()  # sorted
    rounding = LearnedRounding(weights(16, 64), scheme)
    nearest = rounding.quantized()
    with torch.no_grad():
        rounding.offset.fill_(0.5)
    at, to = (torch.searchsorted(values, code_values(scheme.weight)[q.codes.int()]) for q in (nearest, rounding.quantized()))
    steps = (to - at) * nearest.scale.sign().repeat_interleave(32, dim=1).int()
    steps = steps * nearest.scale.sign().repeat_interleave(32, dim=1).int()
    # From a coarser binade to the next finer one, half of the coarse spacing is up to two fine values.
    assert int(steps.min()) >= 0 and int(steps.max()) <= (1 if isinstance(scheme.weight, IntFormat) else 2)
    assert 0.3 < float((steps > 0).float().mean()) < 0.7, "half of the weights were rounded down"


@pytest.mark.parametrize("name", ["w3a16_g32", "w3a16_g32_z", "w3a16_g32_fz", "w4e2m1a16_g32"])
def test_gradients_are_those_of_the_unrounded_formula(name):
    """Compares with autograd of the formula in plain operations, where round(t) is t + constant."""
    rounding = moved(name, (8, 64))
    slope = weights(8, 64, seed=3)
    (rounding.dense() * slope).sum().backward()
    offset, factors = (p.detach().clone().requires_grad_() for p in (rounding.offset, rounding.factors))
    plain = LearnedRounding(weights(8, 64), rounding.scheme)
    plain.offset, plain.factors = offset, factors
    scale, zero = plain._grid()
    s, fmt = scale[:, None], rounding.scheme.weight
    z = torch.zeros_like(s) if zero is None else zero[:, None]
    floating = rounding.scheme.zero is ZeroPoint.FLOAT
    u = (plain._weight - z) / s if floating else plain._weight / s
    unit = 1.0 if isinstance(fmt, IntFormat) else spacing(u.detach(), fmt)
    t = u + offset * unit + (0 if floating else z)
    stored = code_values(fmt)[rounding.quantized().codes.int()].reshape(t.shape)
    half = 0.5 if isinstance(fmt, IntFormat) else 1.0  # half the coarsest spacing of e2m1
    saturated = (t < fmt.min - half) | (t > fmt.max + half)
    q = torch.where(saturated, stored, t + (stored - t).detach())
    w = q * s + z if floating else (q - z) * s
    (w.reshape(8, 64) * slope).sum().backward()
    torch.testing.assert_close(rounding.offset.grad, offset.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rounding.factors.grad, factors.grad, rtol=1e-4, atol=1e-4)
    assert saturated.any() and not saturated.all()


def spacing(u, fmt):
    """The distance between the two neighbouring values of a float format around u."""
    values = code_values(fmt).unique()
    values = values[values.isfinite()]
    above = torch.searchsorted(values, u.clamp(fmt.min, fmt.max).contiguous()).clamp(1, len(values) - 1)
    return values[above] - values[above - 1]


def test_weights_that_cannot_be_rounded():
    with pytest.raises(ValueError, match="1 of 64 weights are not finite"):
        LearnedRounding(torch.full((1, 64), 1.0).index_fill(1, torch.tensor([3]), torch.nan), parse_scheme("w4a16_g32"))
    zeros = LearnedRounding(torch.zeros(4, 64), parse_scheme("w4a16_g32"))
    assert torch.equal(zeros.quantized().dequantize(), torch.zeros(4, 64))
