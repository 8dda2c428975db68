"""ResNet-50 in fp16 by other implementations, as functions that a CUDA graph captures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.resnet50 import IMAGE, STEM, Layer, ResNet50, blocks


@dataclass(frozen=True)
class Rival:
    """Factory of a network for a batch size, and its fusions, named as in conv_network.py if possible."""

    network: Callable[[int], Callable[[], object]]
    fusion: str


def cudnn_network(batch: int) -> Callable[[], object]:
    """Returns the network of cuDNN's fused convolutions, channels-last, with random weights and folded batch norms."""
    torch.backends.cudnn.benchmark = True
    half = {"device": "cuda", "dtype": torch.float16}

    def image(channels: int, size: int) -> Tensor:
        return torch.randn(batch, channels, size, size, **half).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def weights(layer: Layer) -> tuple[Tensor, Tensor]:
        shape = (layer.outputs, 4 if layer.channels == 3 else layer.channels, layer.kernel, layer.kernel)
        scale = (2 / (shape[1] * shape[2] * shape[3])) ** 0.5
        w = (scale * torch.randn(shape, **half)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return w, torch.zeros(layer.outputs, **half)  # type: ignore[call-overload]

    x0, stem = image(4, IMAGE), weights(STEM)
    held = [
        (b, weights(b.first), weights(b.second), weights(b.third), weights(b.shortcut) if b.shortcut else None)
        for b in blocks()
    ]
    classifier = torch.randn(1000, blocks()[-1].third.outputs, **half)  # type: ignore[call-overload]

    def run() -> Tensor:
        relu, add = torch.cudnn_convolution_relu, torch.cudnn_convolution_add_relu
        x = relu(x0, *stem, (2, 2), (3, 3), (1, 1), 1)
        x = torch.nn.functional.max_pool2d(x, 3, 2, 1)
        for block, first, second, third, shortcut in held:
            z, stride = x, (block.second.stride, block.second.stride)
            y = relu(x, *first, (1, 1), (0, 0), (1, 1), 1)
            y = relu(y, *second, stride, (1, 1), (1, 1), 1)
            if shortcut is not None:
                z = torch.nn.functional.conv2d(x, *shortcut, stride=stride)
            x = add(y, third[0], z, 1.0, third[1], (1, 1), (0, 0), (1, 1), 1)
        return x.mean((2, 3)) @ classifier.t()

    return run


def compiled_network(batch: int) -> Callable[[], object]:
    """Returns the module compiled by torch.compile with frozen constants, which fuses the operations between cuDNN's
    convolutions.

    It uses the default mode. max-autotune, which measures Triton kernels for each layer, had not ended after 76 seconds for one
    batch on an H200 (2026-11-21).
    """
    import torch._inductor.config as inductor

    model = ResNet50().half().cuda().to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    x = torch.randn(batch, 3, IMAGE, IMAGE, device="cuda", dtype=torch.float16).to(memory_format=torch.channels_last)
    torch._dynamo.reset()
    torch.backends.cudnn.benchmark = True
    with inductor.patch(freezing=True):
        compiled = torch.compile(model, dynamic=False)
        compiled(x)
    return lambda: compiled(x)


RIVALS = {"cudnn": Rival(cudnn_network, "add"), "compile": Rival(compiled_network, "torch.compile's")}
