"""A network in integers: a list of operations on stored values, and its execution in plain torch, the reference.

Values are codes (u4, s8; int32 tensors [N, C, H, W] here, packed on a GPU) or floating-point (f32, and f16 on a GPU, for what
has no integer form). `Program.run` computes with `kernels/conv_reference.py`; the GPU gives the same codes bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lowbit.kernels.conv_reference import (
    CODE_RANGE,
    ConvLayer,
    Storage,
    average_pool_reference,
    conv_reference,
    max_pool_reference,
)
from lowbit.vision.graph import Other, Pair, as_images, call_other, constants_on


@dataclass(frozen=True)
class Value:
    """What is known of a stored value: its storage, the shape of one image's part, and the value of a code step."""

    storage: Storage
    shape: tuple[int, ...]
    scale: float = 1.0


@dataclass(frozen=True)
class Quantize:
    """Codes of a floating-point value: clamp(rne(x * factor), -128, 127), one float32 product."""

    y: str
    x: str
    factor: float

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values read."""
        return (self.x,)


@dataclass(frozen=True, eq=False)
class Convolve:
    """One `ConvLayer`, with the residual or the input of its second product where it has one."""

    y: str
    x: str
    layer: ConvLayer
    residual: str | None = None
    second: str | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values read."""
        return (self.x, *(name for name in (self.residual, self.second) if name is not None))


@dataclass(frozen=True)
class PoolMax:
    """The largest code of each window; the scale is that of its input."""

    y: str
    x: str
    kernel: Pair
    stride: Pair
    padding: Pair

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values read."""
        return (self.x,)


@dataclass(frozen=True)
class PoolAverage:
    """The mean value of each channel, float32 [N, C, 1, 1]: float32(sum of codes) * float32(scale / pixels)."""

    y: str
    x: str
    scale: float

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values read."""
        return (self.x,)


@dataclass(frozen=True)
class Dequantize:
    """code * scale in float32, for what has no integer form."""

    y: str
    x: str
    scale: float

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values read."""
        return (self.x,)


@dataclass(frozen=True, eq=False)
class Compute:
    """An operation of torch in floating point."""

    y: str
    node: Other

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values read."""
        return self.node.inputs


Operation = Quantize | Convolve | PoolMax | PoolAverage | Dequantize | Compute


@dataclass(frozen=True, eq=False)
class Program:
    """Operations in order, what is known of each value that is a tensor, and the names of the images and the result."""

    operations: tuple[Operation, ...]
    values: dict[str, Value]
    images: str
    result: str

    def run(self, images: Tensor, watch: Callable[[str, Tensor], None] | None = None) -> Tensor:
        """The result for images [N, C, H, W] as the model takes them, by the reference, on the device of the images.

        `watch(name, value)` sees every value that is made: codes as int32, anything else in float32.
        """
        values: dict[str, Any] = {self.images: images.float()}
        last = self.last_reads()
        for i, operation in enumerate(self.operations):
            y = self.step(operation, values)
            if watch is not None and isinstance(y, Tensor):
                watch(operation.y, y)
            values[operation.y] = y
            for name in last.get(i, ()):
                del values[name]
        return values[self.result].reshape(len(images), *self.values[self.result].shape)

    def step(self, operation: Operation, values: dict[str, Any]) -> Any:
        """What one operation makes of the values that it reads, by the reference."""
        match operation:
            case Quantize():
                return quantize_codes(as_images(values[operation.x]), operation.factor)
            case Convolve():
                residual = None if operation.residual is None else values[operation.residual]
                second = None if operation.second is None else values[operation.second]
                return conv_reference(values[operation.x], operation.layer, residual, second)
            case PoolMax():
                return max_pool_reference(values[operation.x], operation.kernel, operation.stride, operation.padding)
            case PoolAverage():
                return as_images(average_pool_reference(values[operation.x], operation.scale))
            case Dequantize():
                return values[operation.x].float() * float(operation.scale)
        read = {name: self.shaped(name, values[name]) for name in operation.inputs}
        like = next((v for v in read.values() if isinstance(v, Tensor)), torch.zeros(0))
        return call_other(operation.node, read, like)

    def shaped(self, name: str, value: Any) -> Any:
        """The value in the shape in which the model has it."""
        known = self.values.get(name)
        return value if known is None or not isinstance(value, Tensor) else value.reshape(value.shape[0], *known.shape)

    def last_reads(self) -> dict[int, list[str]]:
        """Names of the values that nothing needs any more after each operation, by its number."""
        last: dict[str, int] = {}
        for i, operation in enumerate(self.operations):
            last[operation.y] = i
            last.update(dict.fromkeys(operation.inputs, i))
        last.pop(self.result, None)
        after: dict[int, list[str]] = {}
        for name, i in last.items():
            after.setdefault(i, []).append(name)
        return after

    def to(self, device: torch.device | str) -> Program:
        """The program with the tensors of its layers on `device`."""
        moved: list[Operation] = []
        for op in self.operations:
            if isinstance(op, Convolve):
                op = replace(op, layer=op.layer.to(device))
            elif isinstance(op, Compute):
                op = replace(op, node=constants_on(op.node, device))
            moved.append(op)
        return replace(self, operations=tuple(moved))

    @property
    def weights(self) -> list[Tensor]:
        """The codes of all weights, those of second products too."""
        seconds = [layer.second.weight for layer in self.layers if layer.second is not None]
        return [layer.weight for layer in self.layers] + seconds

    @property
    def layers(self) -> list[ConvLayer]:
        """The convolutions in order."""
        return [op.layer for op in self.operations if isinstance(op, Convolve)]


def quantize_codes(x: Tensor, factor: float) -> Tensor:
    """s8 codes int32 of x: one float32 product, rounded to the nearest integer (ties to even), saturated."""
    low, high = CODE_RANGE["s8"]
    return (x.float() * factor).round().clamp(low, high).to(torch.int32)
