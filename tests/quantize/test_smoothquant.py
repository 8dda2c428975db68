"""SmoothQuant: the factors are those of the paper's equation 4, the search takes the best alpha, and transformed layers compute
the original product.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowbit.formats import int_format, parse_scheme
from lowbit.quantize.fold import divide_outputs, multiply_inputs
from lowbit.quantize.smoothquant import ALPHAS, best_alpha, per_token, smoothing_scale
from tests.quantize.data import inputs, statistics, weights


def test_factors_by_hand():
    w = [torch.tensor([[1.0, -4.0, 0.0], [0.5, 2.0, 0.0]]), torch.tensor([[-9.0, 1.0, 0.0]])]
    got = smoothing_scale(w, torch.tensor([4.0, 16.0, 5.0]), 0.5)
    torch.testing.assert_close(got, torch.tensor([2 / 3, 4 / 2, 1.0]))
    torch.testing.assert_close(smoothing_scale(w, torch.tensor([4.0, 16.0, 0.0]), 1.0), torch.tensor([4.0, 16.0, 1.0]))
    with pytest.raises(ValueError, match="alpha is from 0 to 1, got 1.5"):
        smoothing_scale(w, torch.ones(3), 1.5)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.85, 1.0])
def test_norm_and_layers_compute_the_same(alpha):
    torch.manual_seed(0)
    norm, q, k = nn.LayerNorm(32), nn.Linear(32, 16), nn.Linear(32, 8)
    nn.init.normal_(norm.weight)
    x = inputs(32) * 10
    expected = q(norm(x)), k(norm(x))
    s = smoothing_scale([q.weight.data, k.weight.data], norm(x).abs().amax(0).detach(), alpha)
    divide_outputs(norm, torch.arange(32), s, {})
    for layer in (q, k):
        multiply_inputs(layer, s)
    torch.testing.assert_close((q(norm(x)), k(norm(x))), expected, rtol=1e-5, atol=1e-4)


def test_the_best_alpha_of_the_grid():
    x, w, scheme = inputs(64), weights(16, 64), parse_scheme("w8a8")
    x[:, 3] *= 50

    def error(alpha):
        """Output error in float64 with 8-bit weights per channel and 8-bit activations per token."""
        s = x.abs().amax(0) ** alpha / w.abs().amax(0) ** (1 - alpha)
        rounded = []
        for m in (x / s, w * s):
            step = m.abs().amax(1, keepdim=True) / 127
            rounded.append(((m / step).round() * step).double())
        return float((rounded[0] @ rounded[1].T - x.double() @ w.double().T).square().sum())

    got = best_alpha([w], scheme, statistics(x, keep=300))
    assert error(got) <= 1.001 * min(error(a) for a in ALPHAS)
    assert error(got) < 0.5 * error(0.0), "an outlier channel is what smoothing is for"


def test_no_factors_where_none_help():
    """One token outside the sample has a huge value. Factors for it would spoil the weights for all other tokens, so none are
    used."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(300, 64, generator=generator), torch.randn(16, 64, generator=generator)
    x[200, 5] = 1e5
    assert best_alpha([w], parse_scheme("w8a8"), statistics(x, keep=128)) is None


def test_tokens_are_rounded_each_with_its_own_scale():
    x = torch.tensor([[127.0, 1.4, -3.6], [1.27, 0.014, -0.036]])
    torch.testing.assert_close(per_token(x, int_format(8)), torch.tensor([[127.0, 1.0, -4.0], [1.27, 0.01, -0.04]]))
