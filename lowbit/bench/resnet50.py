"""The layers of ResNet-50 v1.5 at 224 x 224, with what each one must do and move, and how fusions change that.

v1.5 has its strides in the 3 x 3 convolutions. Bytes count each input, residual, weight and output of a kernel once.
Source: He et al., "Deep Residual Learning for Image Recognition", 2015, table 1.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

IMAGE = 224
CLASSES = 1000
STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""(channels, blocks, stride) of the four stages; a block's output has 4 times the channels."""


@dataclass(frozen=True)
class Layer:
    """One convolution: square input of `size` pixels, square window. `residual`: another layer's output is added."""

    name: str
    channels: int
    outputs: int
    kernel: int
    stride: int
    size: int
    relu: bool = True
    residual: bool = False

    @property
    def padding(self) -> int:
        return self.kernel // 2

    @property
    def output_size(self) -> int:
        return (self.size + 2 * self.padding - self.kernel) // self.stride + 1

    def operations(self, batch: int) -> float:
        """Multiplications and additions."""
        return 2.0 * batch * self.output_size**2 * self.outputs * self.channels * self.kernel**2

    def weights(self) -> int:
        """Number of weights."""
        return self.channels * self.outputs * self.kernel**2

    def read(self, batch: int) -> float:
        """Values of the input that are used: 1 x 1 windows of stride 2 skip three of four pixels."""
        size = self.output_size if self.kernel == 1 else self.size
        return float(batch * size**2 * self.channels)

    def written(self, batch: int) -> float:
        """Values of the output."""
        return float(batch * self.output_size**2 * self.outputs)

    def moved_bytes(self, batch: int, activation_bits: int) -> float:
        """Bytes of input, residual, output and int8 weights; the stem reads packed images of 4 bytes a pixel."""
        values = self.written(batch) * (2 if self.residual else 1)
        image = self.channels == 3
        read = 8 * 4 * self.read(batch) / 3 if image else activation_bits * self.read(batch)
        return (read + activation_bits * values) / 8 + self.weights()


@dataclass(frozen=True)
class Block:
    """A bottleneck: 1 x 1, 3 x 3, 1 x 1 with the sum; `shortcut` where the shapes of input and output differ."""

    first: Layer
    second: Layer
    third: Layer
    shortcut: Layer | None


STEM = Layer("stem", 3, 64, 7, 2, IMAGE)


@functools.cache
def blocks() -> tuple[Block, ...]:
    """The 16 blocks after the stem and its max-pool (3 x 3, stride 2, padding 1)."""
    found = []
    channels, size = 64, 56
    for stage, (width, count, first_stride) in enumerate(STAGES):
        for index in range(count):
            stride = first_stride if index == 0 else 1
            name, out = f"layer{stage + 1}.{index}", size // stride
            shortcut = Layer(f"{name}.shortcut", channels, 4 * width, 1, stride, size, relu=False) if index == 0 else None
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
