"""An integer network: a list of operations on stored values, and a reference implementation in plain torch.

Values are codes (u4, s8; int32 tensors [N, C, H, W] here, packed on a GPU) or floating-point (f32; f16 on a GPU for operations
without an integer form). `Program.run` uses `kernels/reference/conv.py`; the GPU computes the same codes bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.conv import ConvLayer, GateSpec, ResizeSpec, SumSpec
from lowbit.kernels.reference.conv import (
    average_pool_reference,
    concat_reference,
    conv_reference,
    gate_reference,
    map_reference,
    max_pool_reference,
    quantize_reference,
    resize_reference,
    sum_reference,
)
from lowbit.ops.conv import STEM_POOL
from lowbit.vision.graph import Form, OneInput, Other, Pair, as_images, call_other, constants_on, filled
from lowbit.vision.pixels import Pixels


@dataclass(frozen=True)
class Value:
    """Storage, shape per image and scale of a stored value."""

    storage: str
    shape: tuple[int, ...]
    scale: float = 1.0


@dataclass(frozen=True)
class Quantize(OneInput):
    """s8 codes of a floating-point value: clamp(rne(x * factor), -128, 127) with one float32 product. For 8-bit pixels one
    fma normalizes and scales."""

    y: str
    x: str
    factor: float


@dataclass(frozen=True, eq=False)
class Convolve:
    """One `ConvLayer`, with the names of its residual and of the input of its second product. `pooled`: includes the
    max-pool `STEM_POOL`."""

    y: str
    x: str
    layer: ConvLayer
    residual: str | None = None
    second: str | None = None
    pooled: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values read."""
        return (self.x, *(name for name in (self.residual, self.second) if name is not None))

    def to(self, device: torch.device | str) -> Convolve:
        """Returns the operation with its tensors on `device`."""
        return replace(self, layer=self.layer.to(device))


class _ThirdAndFollowing:
    """What kernels have in common that compute the third convolution of a bottleneck and the one that follows it."""

    third: Convolve
    following: Convolve

    @property
    def y(self) -> str:
        """Name of the output of the last convolution."""
        return self.following.y

    @property
    def also(self) -> str:
        """Name of the output of the third convolution, which is stored too, for other readers."""
        return self.third.y

    @property
    def added(self) -> str:
        """Name of the residual, or of the input of the shortcut."""
        return self.third.residual or self.third.second or ""


@dataclass(frozen=True, eq=False)
class FusedBottleneck(_ThirdAndFollowing):
    """Three `Convolve` in one kernel (ops/conv_block.py)."""

    second: Convolve
    third: Convolve
    following: Convolve

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values read."""
        return self.second.x, self.added


@dataclass(frozen=True, eq=False)
class FusedPair(_ThirdAndFollowing):
    """Two `Convolve` in one kernel (ops/conv_pair.py)."""

    third: Convolve
    following: Convolve

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values read."""
        return self.third.x, self.added


@dataclass(frozen=True)
class SumCodes:
    """One `SumSpec`: a sum of codes or a ReLU that is not fused into a convolution."""

    y: str
    x: str
    layer: SumSpec
    other: str | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values read."""
        return (self.x,) if self.other is None else (self.x, self.other)


@dataclass(frozen=True, eq=False)
class MapCodes(OneInput):
    """s8 codes table[code + 128] of s8 codes; `table` is int8 [256]. `function`: the one of `ACTIVATIONS` that the table
    computes, if known."""

    y: str
    x: str
    table: Tensor
    function: str = ""


@dataclass(frozen=True)
class GateCodes:
    """One `GateSpec`: codes times the codes of a gate, one per channel of an image."""

    y: str
    x: str
    gate: str
    layer: GateSpec

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values read."""
        return self.x, self.gate


@dataclass(frozen=True)
class ResizeCodes(OneInput):
    """One `ResizeSpec`: codes at another size; the scale is that of the input."""

    y: str
    x: str
    layer: ResizeSpec


@dataclass(frozen=True)
class ConcatCodes:
    """The channels of `parts`, one after another; each is rescaled by its `SumSpec`. Equal scales copy the codes."""

    y: str
    parts: tuple[str, ...]
    layers: tuple[SumSpec, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values read."""
        return self.parts


@dataclass(frozen=True)
class PoolMax(OneInput):
    """Largest code of each window; the scale is that of the input."""

    y: str
    x: str
    kernel: Pair
    stride: Pair
    padding: Pair


@dataclass(frozen=True)
class PoolAverage(OneInput):
    """The mean value of each channel, float32 [N, C, 1, 1]: float32(sum of codes) * float32(scale / pixels)."""

    y: str
    x: str
    scale: float


@dataclass(frozen=True)
class AverageCodes(OneInput):
    """`PoolAverage` and the `Quantize` of its means in one kernel: s8 codes [N, C, 1, 1]."""

    y: str
    x: str
    scale: float
    factor: float


@dataclass(frozen=True)
class Dequantize(OneInput):
    """code * scale in float32, for readers without an integer form."""

    y: str
    x: str
    scale: float


@dataclass(frozen=True, eq=False)
class Compute:
    """A torch operation in floating point."""

    y: str
    node: Other

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values read."""
        return self.node.inputs


Operation = (
    Quantize | Convolve | FusedBottleneck | FusedPair | SumCodes | MapCodes | GateCodes | ResizeCodes | ConcatCodes | PoolMax
    | PoolAverage | AverageCodes | Dequantize | Compute
)  # fmt: skip


def outputs_of(operation: Operation) -> tuple[str, ...]:
    """Returns the names of the values that an operation computes."""
    return (operation.also, operation.y) if isinstance(operation, (FusedBottleneck, FusedPair)) else (operation.y,)


@dataclass(frozen=True, eq=False)
class Program:
    """Operations in order, the stored values by name, the names of images and results, the normalization of 8-bit pixels if
    known, and the form in which the results are returned."""

    operations: tuple[Operation, ...]
    values: dict[str, Value]
    images: str
    results: tuple[str, ...]
    pixels: Pixels | None = None
    form: Form = 0

    def run(self, images: Tensor, on_value: Callable[[str, Tensor], None] | None = None) -> Any:
        """Returns the reference result for images [N, C, H, W], normalized or in pixels, on their device: one tensor, or
        several in tuples and dictionaries.

        `on_value(name, value)` is called with every computed value: codes as int32, others in float32.
        """
        return filled(self.form, self.outcomes(images, on_value))

    def outcomes(self, images: Tensor, on_value: Callable[[str, Tensor], None] | None = None) -> tuple[Tensor, ...]:
        """Returns the results of `run` in the order of `results`."""
        values: dict[str, Any] = {self.images: images}
        last = self.last_reads()
        for i, operation in enumerate(self.operations):
            y = self.step(operation, values)
            if on_value is not None and isinstance(y, Tensor):
                on_value(operation.y, y)
            values[operation.y] = y
            for name in last.get(i, ()):
                del values[name]
        return self.returned(values, len(images))

    def returned(self, values: dict[str, Any], batch: int) -> tuple[Tensor, ...]:
        """Returns the results among `values` as float32 tensors in the shapes of the model."""
        return tuple(values[name].float().reshape(batch, *self.values[name].shape) for name in self.results)

    def step(self, operation: Operation, values: dict[str, Any]) -> Any:
        """Returns the reference output of one operation."""
        match operation:
            case Quantize():
                x = as_images(values[operation.x])
                gain, shift = self.constants(operation, x)
                return quantize_reference(x, gain.to(x.device), shift.to(x.device), "s8")
            case Convolve():
                residual = None if operation.residual is None else values[operation.residual]
                second = None if operation.second is None else values[operation.second]
                y = conv_reference(values[operation.x], operation.layer, residual, second)
                return max_pool_reference(y, *STEM_POOL) if operation.pooled else y
            case FusedBottleneck() | FusedPair() | AverageCodes():
                raise ValueError(f"{operation.y} is made by DeviceProgram; a program has the parts of what makes it")
            case SumCodes():
                other = None if operation.other is None else values[operation.other]
                return sum_reference(values[operation.x], operation.layer, other)
            case MapCodes():
                return map_reference(values[operation.x], operation.table)
            case GateCodes():
                return gate_reference(values[operation.x], values[operation.gate], operation.layer)
            case ResizeCodes(_, x, layer):
                return resize_reference(values[x], layer, self.values[x].storage)
            case ConcatCodes(_, parts, layers):
                return concat_reference([values[part] for part in parts], layers)
            case PoolMax():
                return max_pool_reference(values[operation.x], operation.kernel, operation.stride, operation.padding)
            case PoolAverage():
                return as_images(average_pool_reference(values[operation.x], operation.scale))
            case Dequantize():
                return values[operation.x].float() * float(operation.scale)
        read = {name: self.shaped(name, values[name]) for name in operation.inputs}
        if self.images in read:
            read[self.images] = self.floating(read[self.images])
        like = next((v for v in read.values() if isinstance(v, Tensor)), torch.zeros(0))
        return call_other(operation.node, read, like)

    def constants(self, operation: Quantize, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (gain, shift) float32 [C] with which `operation` quantizes x [N, C, H, W]; pixels are normalized."""
        if x.dtype == torch.uint8 and self.pixels is not None:
            return self.pixels.constants(x.shape[1], operation.factor)
        return torch.full((x.shape[1],), operation.factor), torch.zeros(x.shape[1])

    def floating(self, images: Tensor) -> Tensor:
        """Returns the images in float32, normalized as the model expects."""
        return self.pixels.normalized(images) if images.dtype == torch.uint8 and self.pixels is not None else images.float()

    def shaped(self, name: str, value: Any) -> Any:
        """Returns the value in the shape of the model's tensor."""
        known = self.values.get(name)
        return value if known is None or not isinstance(value, Tensor) else value.reshape(value.shape[0], *known.shape)

    def last_reads(self) -> dict[int, list[str]]:
        """Returns, by operation index, the names of values that are dead after it."""
        last: dict[str, int] = {}
        for i, operation in enumerate(self.operations):
            last.update(dict.fromkeys((*outputs_of(operation), *operation.inputs), i))
        for name in self.results:
            last.pop(name, None)
        after: dict[int, list[str]] = {}
        for name, i in last.items():
            after.setdefault(i, []).append(name)
        return after

    def to(self, device: torch.device | str) -> Program:
        """Returns the program with the tensors of its layers on `device`."""
        moved: list[Operation] = []
        for op in self.operations:
            if isinstance(op, Convolve):
                op = op.to(device)
            elif isinstance(op, FusedBottleneck):
                op = FusedBottleneck(op.second.to(device), op.third.to(device), op.following.to(device))
            elif isinstance(op, FusedPair):
                op = FusedPair(op.third.to(device), op.following.to(device))
            elif isinstance(op, MapCodes):
                op = replace(op, table=op.table.to(device))
            elif isinstance(op, Compute):
                op = replace(op, node=constants_on(op.node, device))
            moved.append(op)
        return replace(self, operations=tuple(moved))

    @property
    def weights(self) -> list[Tensor]:
        """Codes of all weights, including those of second products."""
        seconds = [layer.second.weight for layer in self.layers if layer.second is not None]
        return [layer.weight for layer in self.layers] + seconds

    @property
    def layers(self) -> list[ConvLayer]:
        """The convolutions in order."""
        return [op.layer for op in self.operations if isinstance(op, Convolve)]
