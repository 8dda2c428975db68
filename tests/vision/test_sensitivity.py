"""The layer most sensitive to 4 bits is found, and no more layers stay in int8 than the bound requires."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowbit import vision
from lowbit.vision.sensitivity import divergence


def test_divergence_by_hand():
    p, q = torch.tensor([[0.0, 0.0]]), torch.tensor([[torch.log(torch.tensor(3.0)).item(), 0.0]])
    # 0.5 log(0.5 / 0.75) + 0.5 log(0.5 / 0.25)
    assert divergence(p, q) == pytest.approx(0.143841, abs=1e-6)
    assert divergence(q, q) == 0.0


@pytest.fixture(scope="module")
def uneven():
    """Six layers. The fourth has some large weights, for an input that is 0; no 4-bit grid represents these and its small
    weights together.
    """
    torch.manual_seed(0)
    layers = []
    for _ in range(6):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        model[4].weight[0], model[4].bias[0] = 0.0, 0.0
        model[6].weight[:, 0] *= 50
        model[-1].weight *= 5
    return model.eval(), torch.rand(32, 16, 8, 8)


def test_the_sensitive_layer_keeps_eight_bits(uneven):
    model, images = uneven
    said: list[str] = []
    plain = vision.quantize(model, images, "w4a8")
    with torch.no_grad():
        wanted = model(images)
    bad = divergence(wanted, plain(images))
    network = vision.quantize(model, images, "w4a8", most_divergence=bad / 3, say=said.append)
    assignment = network.assignment
    assert next(iter(assignment.sensitivity)) == "6" and assignment.keep_int8[0] == "6"
    assert list(assignment.sensitivity.values()) == sorted(assignment.sensitivity.values(), reverse=True)
    assert assignment.divergence <= bad / 3
    assert assignment.divergence == pytest.approx(divergence(wanted, network(images)), rel=1e-6)
    assert len(assignment.keep_int8) < len(assignment.sensitivity)
    assert len(said) == len(assignment.sensitivity)
    assert "kept in int8 by measured sensitivity: 6" in "\n".join(network.lines())


def test_a_generous_bound_keeps_nothing_and_an_impossible_one_everything(uneven):
    model, images = uneven
    assert vision.quantize(model, images, "w4a8", most_divergence=1e9).assignment.keep_int8 == ()
    strict = vision.quantize(model, images, "w4a8", most_divergence=0.0)
    assert set(strict.assignment.keep_int8) == set(strict.assignment.sensitivity)
    assert strict.assignment.divergence > 0.0  # the bound cannot be met, and the assignment reports it
