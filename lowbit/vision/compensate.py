"""Compensates the rounding of weights on calibration images, layer by layer, without training.

In the order of the graph, each convolution sees the inputs that the quantized layers before it produce. 4-bit weights are
rounded by GPTQ (`lowbit.quantize.gptq`) with the Hessian of these inputs; the codes of convolutions in groups are those of
nearest rounding. Then the bias absorbs the remaining difference of each channel's mean from the floating-point network (Nagel
et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", arXiv:1906.04721, section 4.2, with measured
means). Before a ReLU, only pixels count that it lets through in both networks: of the others it cuts the difference off, and a
mean over them made mixed networks worse (docs/log/cnn.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as functional
from torch import Tensor

from lowbit.formats import Scheme, decode, int_format
from lowbit.quantize import gptq
from lowbit.vision.bits import Quantization, QuantWeight
from lowbit.vision.graph import Conv, Graph, Node, as_images, convolve
from lowbit.vision.simulate import dequantized, rounded

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
    coarse: dict[str, Tensor] = {}
    nodes: dict[str, Node] = {}
    weights = dict(quantization.weights)
    with torch.no_grad():
        for name, node in graph.nodes.items():
            if isinstance(node, Conv):
                weights.update(_codes(node, quantization, coarse))
                node = replace(node, bias=node.bias + _mean_error(node, exact, coarse, weights))
                exact[name] = _convolved(graph.nodes[name], exact)
                coarse[name] = _convolved(dequantized(node, weights), coarse)
            else:
                exact[name] = graph.compute(node, exact, images)
                coarse[name] = graph.compute(node, coarse, images)
            nodes[name] = node
            coarse[name] = rounded(graph, quantization, name, coarse[name])
            for read in node.inputs:
                readers[read] -= 1
                if not readers[read]:
                    del exact[read], coarse[read]
    return replace(graph, nodes=nodes), replace(quantization, weights=weights)


def compensated_codes(graph: Graph, low: Quantization, inputs: Quantization, batches: Sequence[Tensor]) -> Quantization:
    """Returns `low` with codes of 4-bit weights by GPTQ, for the inputs that the network quantized as `inputs` produces."""
    images = torch.cat([*batches])
    readers = {name: len(found) for name, found in graph.readers().items()}
    values: dict[str, Tensor] = {}
    weights = dict(low.weights)
    with torch.no_grad():
        for name, node in graph.nodes.items():
            if isinstance(node, Conv):
                weights.update(_codes(node, low, values))
                values[name] = _convolved(dequantized(node, inputs.weights), values)
            else:
                values[name] = graph.compute(node, values, images)
            values[name] = rounded(graph, inputs, name, values[name])
            for read in node.inputs:
                readers[read] -= 1
                if not readers[read]:
                    del values[read]
    return replace(low, weights=weights)


def _codes(node: Conv, quantization: Quantization, values: dict[str, Tensor]) -> Codes:
    """Returns the codes by GPTQ of the convolution's 4-bit weights, by name, for its inputs among `values`."""
    if quantization.bits[node.name].weight != 4:
        return {}
    convs = (conv for conv in (node, node.second) if conv is not None and conv.groups == 1)
    return {conv.name: _by_gptq(conv, as_images(values[conv.x])) for conv in convs}


def _mean_error(node: Conv, exact: dict[str, Tensor], coarse: dict[str, Tensor], weights: Codes) -> Tensor:
    """Returns by how much each channel [O] is too low on average, over the pixels that its ReLU lets through."""
    linear = replace(node, relu=False)
    wanted, got = _convolved(linear, exact), _convolved(dequantized(linear, weights), coarse)
    if not node.relu:
        return (wanted - got).mean((0, 2, 3))
    inside = (wanted > 0) & (wanted < node.relu_max) & (got > 0) & (got < node.relu_max)
    return ((wanted - got) * inside).sum((0, 2, 3)) / inside.sum((0, 2, 3)).clamp(min=1)


def _convolved(node: Node, values: dict[str, Tensor]) -> Tensor:
    assert isinstance(node, Conv)
    return convolve(node, as_images(values[node.x]), lambda name: as_images(values[name]))


def _by_gptq(conv: Conv, x: Tensor) -> QuantWeight:
    """Returns 4-bit codes of a convolution's weights for its inputs x [N, C, H, W]."""
    kernel = (conv.weight.shape[2], conv.weight.shape[3])
    rows = functional.unfold(x, kernel, 1, conv.padding, conv.stride).transpose(1, 2).flatten(0, 1)
    rows = rows[:: -(-len(rows) // MOST_PIXELS)]
    q = gptq(conv.weight.flatten(1), rows.T @ rows, Scheme(int_format(4)))
    return QuantWeight(decode(q.codes, q.scheme.weight).char().reshape(conv.weight.shape), q.scale.reshape(-1))
