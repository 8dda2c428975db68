"""AWQ: the search equals brute force, and the outputs are nearer to the float outputs than with rounding alone."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats import parse_scheme
from lowbit.quantize import rtn
from lowbit.quantize.awq import clipped, search_scale
from tests.quantize.data import inputs, output_error, statistics, weights

SCHEMES = ["w4a16_g32", "w4a16_g32_z", "w3a16_g32_fz", "w4a16_pc", "w6e3m2a16", "w4e2m1a16_g32"]


def outliers(k=96):
    """Inputs with a few large channels, as in language models."""
    x = inputs(k)
    x[:, ::17] *= 30
    return x


@pytest.mark.parametrize("name", SCHEMES)
def test_scaling_and_clipping_lower_the_error(name):
    x, (a, b), scheme = outliers(), (weights(24, 96), weights(8, 96, 2)), parse_scheme(name)
    s = statistics(x)
    scale = search_scale([a, b], [scheme, scheme], s)
    assert scale is not None and scale.shape == (96,) and (scale > 0).all()
    plain = sum(output_error(rtn(w, scheme).dequantize() - w, x) for w in (a, b))
    scaled = sum(output_error(rtn(w * scale, scheme).dequantize() / scale - w, x) for w in (a, b))
    divided = s.divided(scale).hessian
    cut = sum(output_error(clipped(w * scale, scheme, divided).dequantize() / scale - w, x) for w in (a, b))
    assert scaled < 0.9 * plain
    assert cut < 1.05 * scaled  # clipping looks at each group by itself, so it promises nothing for their sum


def test_the_scale_is_the_best_of_the_grid():
    """Compares with trying every ratio, with output errors computed by multiplying."""
    x, w, scheme = outliers(), weights(16, 96), parse_scheme("w4a16_g32")
    errors = {}
    relative = (w.abs() / w.abs().amax(1, keepdim=True)).mean(0)
    for ratio in [i / 10 for i in range(1, 11)]:
        for by_weight in (False, True):
            s = x.abs().mean(0) ** ratio / (relative ** (1 - ratio) if by_weight else 1)
            s = s / (s.max() * s.min()).sqrt()
            errors[ratio, by_weight] = output_error(rtn(w * s, scheme).dequantize() / s - w, x)
    got = search_scale([w], [scheme], statistics(x))
    assert got is not None
    error = output_error(rtn(w * got, scheme).dequantize() / got - w, x)
    assert error <= min(errors.values()) * (1 + 1e-3)


def test_no_scale_when_none_helps():
    """Weights are already on the grid: rounding makes no error that a scale could lower."""
    w = torch.randint(-7, 8, (8, 32), generator=torch.Generator().manual_seed(0)).float()
    w[:, 0] = 7
    assert search_scale([w], [parse_scheme("w4a16_pc")], statistics(inputs(32))) is None


def test_channels_of_one_source_share_a_factor():
    shared = torch.arange(96) % 48
    got = search_scale([weights(24, 96)], [parse_scheme("w4a16_g32")], statistics(outliers()), shared)
    assert got is not None
    torch.testing.assert_close(got[:48], got[48:])


@pytest.mark.parametrize("name", [*SCHEMES, "w4a16_g40", "w4a16_b8x32", "w8a16_t"])
def test_clipping_is_the_best_factor_of_each_group(name):
    x, w, scheme = outliers(), weights(12, 96), parse_scheme(name)
    q, plain = clipped(w, scheme, statistics(x).hessian), rtn(w, scheme)
    size = scheme.granularity.block((12, 96))[1]
    for start in range(0, 96, size):
        part = slice(start, start + size)
        own = output_error((q.dequantize() - w)[:, part], x[:, part])
        assert own <= output_error((plain.dequantize() - w)[:, part], x[:, part]) * (1 + 1e-4)


def test_dead_channels_and_zeros():
    x, w = outliers(), weights(8, 96)
    x[:, 5], w[:, 7], w[3] = 0, 0, 0
    scheme = parse_scheme("w4a16_g32")
    scale = search_scale([w], [scheme], statistics(x))
    assert scale is None or (scale.isfinite().all() and (scale > 0).all())
    assert clipped(w, scheme, statistics(x).hessian).dequantize().isfinite().all()
    assert search_scale([torch.zeros(4, 96)], [scheme], statistics(torch.zeros(10, 96))) is None
