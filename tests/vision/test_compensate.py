"""Compensation of rounded weights: smaller errors, the same graph otherwise."""

from __future__ import annotations

import pytest
import torch

from lowbit import vision
from lowbit.vision.bits import assign_bits, calibrate
from lowbit.vision.compensate import compensate
from lowbit.vision.graph import Conv
from lowbit.vision.lower import lower
from lowbit.vision.observe import observe
from lowbit.vision.trace import trace
from tests.vision.nets import mobilenet, regnet, resnet

MODELS = {"mobilenet": lambda: mobilenet(3), "regnet": regnet, "resnet": lambda: resnet(depths=(2, 1))}


@pytest.mark.parametrize("case", MODELS)
def test_results_are_nearer_to_those_in_floating_point(case):
    torch.manual_seed(0)
    model, seen, other = MODELS[case](), torch.randn(24, 3, 32, 32), torch.randn(16, 3, 32, 32)
    graph = trace(model, seen)
    quantization = calibrate(graph, observe(graph, [seen]), assign_bits(graph, "w4a8"))
    better, codes = compensate(graph, quantization, seen.split(12))
    wanted = graph.run(other)
    plain, compensated = (lower(g, q).run(other) for g, q in ((graph, quantization), (better, codes)))
    assert float((compensated - wanted).norm()) < 0.9 * float((plain - wanted).norm())
    assert codes.scales == quantization.scales and codes.bits == quantization.bits
    for name, node in graph.nodes.items():
        if not isinstance(node, Conv):
            continue
        assert torch.equal(better.nodes[name].weight, node.weight)
        four = quantization.bits[name].weight == 4
        assert not four or int(codes.weights[name].codes.abs().max()) <= 8
        same = torch.equal(codes.weights[name].codes, quantization.weights[name].codes)
        assert same == (not four or node.groups > 1), name


def test_means_of_channels_are_those_in_floating_point():
    """Tests a network with one 4-bit convolution, whose output is not quantized."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 16, 3, groups=2), torch.nn.Conv2d(16, 6, 1))
    images = torch.randn(32, 3, 10, 10)
    network = vision.quantize(model, images, "w4a8", compensation=True)
    plain = vision.quantize(model, images, "w4a8")
    wanted = model(images).mean((0, 2, 3))
    error = (network(images).mean((0, 2, 3)) - wanted).abs().max()
    assert float(error) < 1e-3 < float((plain(images).mean((0, 2, 3)) - wanted).abs().max())
