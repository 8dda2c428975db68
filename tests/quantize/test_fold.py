"""A factor folded into the layer before and multiplied into the layer after leaves the product as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowbit.quantize.fold import Fold, divide_outputs, multiply_inputs, pooled

SCALE = torch.linspace(0.3, 4, 12)


@pytest.mark.parametrize("producer", [nn.LayerNorm(12), nn.RMSNorm(12), nn.Linear(5, 12), nn.Linear(5, 12, bias=False)])
def test_the_product_stays(producer):
    torch.manual_seed(0)
    for p in producer.parameters():
        nn.init.normal_(p)
    after = nn.Linear(12, 7)
    x = torch.randn(9, 12 if producer.weight.dim() == 1 else 5)
    expected = after(producer(x))
    divide_outputs(producer, torch.arange(12), SCALE, {})
    multiply_inputs(after, SCALE)
    torch.testing.assert_close(after(producer(x)), expected, rtol=1e-5, atol=1e-5)


def test_one_source_of_several_inputs():
    before, after = nn.Linear(5, 4), nn.Linear(12, 7)
    channels = torch.arange(12) % 4
    fold, x = Fold("v", ("o",), channels), torch.randn(9, 5)
    assert fold.shared is channels and Fold("v", ("o",), torch.arange(12).flip(0)).shared is None
    scale = pooled(SCALE, fold.shared)
    torch.testing.assert_close(scale[0], (SCALE[0] * SCALE[4] * SCALE[8]) ** (1 / 3))
    expected = after(before(x)[:, channels])
    divide_outputs(before, channels, scale, {})
    multiply_inputs(after, scale)
    torch.testing.assert_close(after(before(x)[:, channels]), expected, rtol=1e-5, atol=1e-5)


def test_what_is_stored_in_16_bits_is_rounded_once():
    norm = nn.RMSNorm(12)
    divide_outputs(norm, torch.arange(12), SCALE, {"weight": torch.bfloat16})
    assert torch.equal(norm.weight.data, (1 / SCALE).to(torch.bfloat16).float())
