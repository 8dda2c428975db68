"""Compensates the rounding of weights on calibration images, layer by layer, without training.

In the order of the graph, each convolution sees the inputs that the quantized layers before it produce. 4-bit weights are
rounded by GPTQ (`lowbit.quantize.gptq`) with the Hessian of these inputs; the codes of convolutions in groups are those of
nearest rounding. Then the bias absorbs the remaining difference of each channel's mean from the floating-point network (Nagel
et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", arXiv:1906.04721, section 4.2, with measured
means).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as functional
from torch import Tensor

from lowbit.formats import Scheme, decode, int_format
from lowbit.formats.conv import code_range
from lowbit.quantize import gptq
from lowbit.vision.bits import Quantization, QuantWeight, storage_of
from lowbit.vision.graph import Conv, Graph, Node, as_images, convolve

MOST_PIXELS = 1 << 14
"""Largest number of windows of a layer from which its Hessian is computed, evenly spaced."""

Codes = dict[str, QuantWeight]


def compensate(graph: Graph, quantization: Quantization, batches: Sequence[Tensor]) -> tuple[Graph, Quantization]:
    """Returns the graph with corrected biases, and the quantization with compensated codes of 4-bit weights.

    batches: calibration images [N, C, H, W], all of which are in memory at once with their largest two values.
    """
    images = torch.cat([*batches])
    readers = {name: len(found) for name, found in graph.readers().items()}
    exact: dict[str, Tensor] = {}
    rounded: dict[str, Tensor] = {}
    nodes: dict[str, Node] = {}
    weights = dict(quantization.weights)
    with torch.no_grad():
        for name, node in graph.nodes.items():
            if isinstance(node, Conv):
                node = _fitted(node, quantization, exact, rounded, weights)
                nodes[name] = node
                exact[name] = _convolved(graph.nodes[name], exact)
                rounded[name] = _convolved(_dequantized(node, weights), rounded)
            else:
                nodes[name] = node
                exact[name] = graph.compute(node, exact, images)
                rounded[name] = graph.compute(node, rounded, images)
            if name in quantization.scales and name != graph.output:
                rounded[name] = _codes(graph, quantization, name, rounded[name])
            for read in node.inputs:
                readers[read] -= 1
                if not readers[read]:
                    del exact[read], rounded[read]
    return replace(graph, nodes=nodes), replace(quantization, weights=weights)


def _fitted(
    node: Conv, quantization: Quantization, exact: dict[str, Tensor], rounded: dict[str, Tensor], weights: Codes
) -> Conv:  # fmt: skip
    """Returns the convolution with its corrected bias; replaces the codes of its 4-bit weights."""
    if quantization.bits[node.name].weight == 4:
        for conv in (node, node.second):
            if conv is not None and conv.groups == 1:
                weights[conv.name] = _by_gptq(conv, as_images(rounded[conv.x]))
    linear = replace(node, relu=False)
    error = _convolved(linear, exact) - _convolved(_dequantized(linear, weights), rounded)
    return replace(node, bias=node.bias + error.mean((0, 2, 3)))


def _convolved(node: Node, values: dict[str, Tensor]) -> Tensor:
    assert isinstance(node, Conv)
    return convolve(node, as_images(values[node.x]), lambda name: as_images(values[name]))


def _dequantized(node: Conv, weights: Codes) -> Conv:
    """Returns the convolution with the values of its codes as weights."""
    second = None if node.second is None else _dequantized(node.second, weights)
    codes = weights[node.name]
    return replace(node, weight=codes.codes.float() * codes.scale.float()[:, None, None, None], second=second)


def _codes(graph: Graph, quantization: Quantization, name: str, value: Tensor) -> Tensor:
    """Returns the value rounded to its codes."""
    low, high = code_range(storage_of(graph, quantization.bits, name))
    scale = quantization.scales[name]
    return (value / scale).round().clamp(low, high) * scale


def _by_gptq(conv: Conv, x: Tensor) -> QuantWeight:
    """Returns 4-bit codes of a convolution's weights for its inputs x [N, C, H, W]."""
    kernel = (conv.weight.shape[2], conv.weight.shape[3])
    rows = functional.unfold(x, kernel, 1, conv.padding, conv.stride).transpose(1, 2).flatten(0, 1)
    rows = rows[:: -(-len(rows) // MOST_PIXELS)]
    q = gptq(conv.weight.flatten(1), rows.T @ rows, Scheme(int_format(4)))
    return QuantWeight(decode(q.codes, q.scheme.weight).char().reshape(conv.weight.shape), q.scale.reshape(-1))
