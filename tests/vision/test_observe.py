"""Ranges and scales by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowbit import vision
from lowbit.vision.observe import Range


def seen(*batches):
    found = Range()
    for batch in batches:
        found.add(batch)
    return found


def test_percentile_clips_one_in_a_thousand():
    values = torch.arange(1.0, 10001.0)
    assert seen(values).scale(15, "percentile") == pytest.approx(9990 / 15)


def test_mse_keeps_everything_of_few_levels_and_clips_outliers():
    levels = torch.arange(0.0, 16.0).repeat(500)
    assert seen(levels).scale(15, "mse") == pytest.approx(1.0)
    outlier = torch.cat([levels, torch.tensor([60.0])])
    assert seen(outlier).scale(15, "mse") < 60 / 15 / 2


def test_mse_is_the_best_of_what_it_tries():
    torch.manual_seed(0)
    x = torch.randn(8000).relu()
    chosen = seen(x).scale(15, "mse")

    def error(scale):
        return float(((x / scale).round().clamp(0, 15) * scale - x).square().mean())

    assert error(chosen) <= min(error(float(x.max()) / 15), error(float(x.kthvalue(7992).values) / 15)) * 1.01


def test_large_batches_are_sampled_and_the_largest_is_exact():
    value = torch.zeros(4, 64, 64, 64)
    value[2, 3, 5, 7] = -42.0
    found = seen(value, value)
    assert found.largest == 42.0
    assert sum(map(len, found.samples)) < value.numel() / 8


def test_a_value_that_is_always_zero_has_a_scale():
    assert seen(torch.zeros(10)).scale(15, "mse") == 1.0


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_values_that_are_not_finite_are_an_error(bad):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    images = torch.rand(2, 3, 8, 8)
    graph = vision.trace(model, images)
    images[1, 2, 3, 4] = bad
    with pytest.raises(ValueError, match="not finite"):
        vision.observe(graph, [torch.rand(2, 3, 8, 8), images, torch.rand(2, 3, 8, 8)])


def test_values_too_small_for_float32_count_as_zero():
    assert seen(torch.full((10,), 1e-40)).scale(127, "mse") == 1.0
    assert seen(torch.full((10,), 1e-10)).scale(127, "max") == pytest.approx(1e-10 / 127)
