"""ResNet-50 v1.5 at 224 x 224: its layers, and the network as a torch module with random weights.

v1.5 has its strides in the 3 x 3 convolutions. Source: He et al., "Deep Residual Learning for Image Recognition", 2015,
table 1.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

IMAGE = 224
CLASSES = 1000
STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""(channels, blocks, stride) of the four stages; a block's output has 4 times the channels."""


@dataclass(frozen=True)
class Layer:
    """One convolution: square input of `size` pixels, square window. `residual`: another value is added to its output."""

    name: str
    channels: int
    outputs: int
    kernel: int
    stride: int
    size: int
    residual: bool = False

    @property
    def padding(self) -> int:
        return self.kernel // 2

    @property
    def output_size(self) -> int:
        return (self.size + 2 * self.padding - self.kernel) // self.stride + 1

    def module(self) -> nn.Conv2d:
        """Returns the convolution with random weights that preserve the magnitude of values, and the bias of a folded batch
        norm.
        """
        conv = nn.Conv2d(self.channels, self.outputs, self.kernel, self.stride, self.padding)
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        if conv.bias is not None:
            nn.init.normal_(conv.bias, std=0.3)
        return conv


@dataclass(frozen=True)
class Block:
    """A bottleneck: convolutions 1 x 1, 3 x 3 and 1 x 1, and the residual sum. `shortcut`: a convolution if input and output
    shapes differ.
    """

    first: Layer
    second: Layer
    third: Layer
    shortcut: Layer | None


STEM = Layer("stem", 3, 64, 7, 2, IMAGE)


@functools.cache
def blocks() -> tuple[Block, ...]:
    """Returns the 16 blocks after the stem and its max-pool (3 x 3, stride 2, padding 1)."""
    found = []
    channels, size = 64, 56
    for stage, (width, count, first_stride) in enumerate(STAGES):
        for index in range(count):
            stride = first_stride if index == 0 else 1
            name, out = f"layer{stage + 1}.{index}", size // stride
            shortcut = Layer(f"{name}.shortcut", channels, 4 * width, 1, stride, size) if index == 0 else None
            found.append(
                Block(
                    Layer(f"{name}.conv1", channels, width, 1, 1, size),
                    Layer(f"{name}.conv2", width, width, 3, stride, size),
                    Layer(f"{name}.conv3", width, 4 * width, 1, 1, out, residual=True),
                    shortcut,
                )
            )
            channels, size = 4 * width, out
    return tuple(found)


class Bottleneck(nn.Module):
    """One block."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.conv1, self.conv2, self.conv3 = (layer.module() for layer in (block.first, block.second, block.third))
        nn.init.normal_(self.conv3.weight, std=0.5 / block.third.channels**0.5)  # keeps sums from growing with each block
        self.shortcut = None if block.shortcut is None else block.shortcut.module()

    def forward(self, x: Tensor) -> Tensor:
        """y [N, C, H, W] of x."""
        y = self.conv3(torch.relu(self.conv2(torch.relu(self.conv1(x)))))
        return torch.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet50(nn.Module):
    """ResNet-50: images [N, 3, 224, 224] to logits [N, 1000], with batch norms folded into the weights."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.stem, self.pool = STEM.module(), nn.MaxPool2d(3, 2, 1)
            first = 0
            for stage, (_, count, _) in enumerate(STAGES):
                stack = [Bottleneck(block) for block in blocks()[first : first + count]]
                setattr(self, f"layer{stage + 1}", nn.Sequential(*stack))
                first += count
            self.classifier = nn.Linear(blocks()[-1].third.outputs, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of images."""
        x = self.pool(torch.relu(self.stem(images)))
        for stage in range(len(STAGES)):
            x = getattr(self, f"layer{stage + 1}")(x)
        return self.classifier(x.mean((2, 3)))  # type: ignore[no-any-return]
