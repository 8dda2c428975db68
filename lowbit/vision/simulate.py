"""The quantized network in floating point: weights and values are rounded to their codes, products are those of torch.

Results differ from those of the integer program by the rounding of float32 sums. It is several times as fast on a CPU, so
layers are compared with it.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lowbit.formats.conv import code_range
from lowbit.vision.bits import Quantization, QuantWeight, storage_of
from lowbit.vision.graph import Conv, Graph


def simulate(graph: Graph, quantization: Quantization, images: Tensor) -> tuple[Tensor, ...]:
    """Returns the results of the quantized network for images [N, C, H, W]."""
    nodes = {
        name: dequantized(node, quantization.weights) if isinstance(node, Conv) else node for name, node in graph.nodes.items()
    }
    return replace(graph, nodes=nodes).results(images, lambda name, value: rounded(graph, quantization, name, value))


def dequantized(node: Conv, weights: dict[str, QuantWeight]) -> Conv:
    """Returns the convolution with the values of its codes as weights."""
    second = None if node.second is None else dequantized(node.second, weights)
    codes = weights[node.name]
    return replace(node, weight=codes.codes.float() * codes.scale.float()[:, None, None, None], second=second)


def rounded(graph: Graph, quantization: Quantization, name: str, value: Tensor) -> Tensor:
    """Returns the value rounded to its codes. Results, and values without a scale, stay as they are."""
    if name not in quantization.scales or name in graph.outputs:
        return value
    low, high = code_range(storage_of(graph, quantization.bits, name))
    scale = quantization.scales[name]
    return (value / scale).round().clamp(low, high) * scale
