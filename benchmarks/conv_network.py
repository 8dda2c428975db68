"""ResNet-50 as `lowbit.vision` lowers and runs it, with fusions switched on and off.

A fusion's name stands for it and all earlier ones:

    none      every convolution writes codes; ReLUs and sums of two tensors are separate kernels
    relu      convolution + ReLU, sum + ReLU
    add       convolution + add + ReLU, as in MegEngine
    shortcut  the convolution of the shortcut computed inside the one it is added to
    stem      the max-pool computed inside the first convolution
    blocks    in stage 1, one kernel for the second and third convolution of a block and the first one of the next block
    pairs     in stages 2 and 3, one kernel for the third convolution of a block and the first one of the next block
    whole     as pairs, with the second convolution of the block in the same kernel where it has stride 1
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.resnet50 import IMAGE, ResNet50
from lowbit.formats.conv import ACTIVATIONS, ConvLayer
from lowbit.pack.stem import PIXEL_BYTES
from lowbit.vision.bits import assign_bits, calibrate
from lowbit.vision.device import DeviceProgram
from lowbit.vision.fusion import KERNEL_FUSIONS, UNMEASURED_FUSIONS
from lowbit.vision.graph import Graph
from lowbit.vision.lower import FLOAT, lower
from lowbit.vision.memory import stems
from lowbit.vision.observe import observe
from lowbit.vision.program import (
    AverageCodes,
    Convolve,
    FusedBottleneck,
    FusedPair,
    Operation,
    PoolAverage,
    PoolMax,
    Program,
    Quantize,
    SumCodes,
    outputs_of,
)
from lowbit.vision.trace import FUSIONS as GRAPH_FUSIONS
from lowbit.vision.trace import fuse, unfused

FUSIONS = ("none", *GRAPH_FUSIONS, *KERNEL_FUSIONS)
"""Fusions with rows by default."""

ALL_FUSIONS = (*FUSIONS, *UNMEASURED_FUSIONS)
"""Fusions that can have rows, also those that networks do not have yet."""

SCHEMES: dict[str, str] = {"u4": "w8a4", "s8": "w8a8"}
"""Scheme by storage of activations. Weights keep 8 bits: 4-bit weights would not be faster, as weights are 0.1 % of the bytes
at batch 128.
"""

CALIBRATION_IMAGES = 4

CHECKED_IMAGES = 4
"""Number of images of a batch whose codes are compared with the reference: the first, the last and those between, so that
the first and the last tiles of a kernel are compared. A reference of 128 images takes minutes."""


@functools.cache
def traced(device: str) -> tuple[Graph, Tensor]:
    """Returns the traced network on `device` without fusions, and calibration images."""
    images = torch.randn(CALIBRATION_IMAGES, 3, IMAGE, IMAGE, generator=torch.Generator().manual_seed(1)).to(device)
    return unfused(ResNet50().to(device), images), images


def up_to(fusion: str) -> tuple[str, ...]:
    """Returns the fusions of the row of this name. Raises ValueError for an unknown name."""
    if fusion not in ALL_FUSIONS:
        raise ValueError(f"fusions are {', '.join(ALL_FUSIONS)}, got {fusion!r}")
    return ALL_FUSIONS[1 : ALL_FUSIONS.index(fusion) + 1]


@functools.cache
def reference_of(storage: str, fusions: tuple[str, ...], device: str = "cuda") -> Reference:
    """Returns the integer network for a storage and some of `GRAPH_FUSIONS`, with its reference."""
    apart, images = traced(device)
    graph = fuse(apart, fusions)
    return Reference(lower(graph, calibrate(graph, observe(graph, [images]), assign_bits(graph, SCHEMES[storage]))), device)


def checked_indices(batch: int, count: int = CHECKED_IMAGES) -> list[int]:
    """Returns the indices of the images of a batch that are compared: evenly spread, all of them if there are few."""
    if batch <= count:
        return list(range(batch))
    return [round(i * (batch - 1) / (count - 1)) for i in range(count)]


class Reference:
    """An integer network, images [CHECKED_IMAGES, 3, 224, 224] and what the network makes of them by definition."""

    def __init__(self, program: Program, device: str = "cuda") -> None:
        self.program = program
        self.images = torch.randn(CHECKED_IMAGES, 3, IMAGE, IMAGE, generator=torch.Generator().manual_seed(2)).to(device)

    @functools.cached_property
    def outcome(self) -> tuple[dict[str, Tensor], Tensor]:
        """The codes int32 [CHECKED_IMAGES, C, H, W] of all values by name, and the logits."""
        codes: dict[str, Tensor] = {}
        logits = self.program.run(self.images, on_value=lambda name, value: codes.update({name: value}))
        return codes, logits


@dataclass(frozen=True)
class KernelWork:
    """Work of one kernel of the network: bytes read and written, each once, and operations."""

    name: str
    call: Callable[[], object]
    moved_bytes: float
    operations: float


class LaunchedNetwork:
    """The network of a reference at a batch size on a GPU, with random images; `checked` are the indices of those that the
    reference has too."""

    def __init__(
        self, reference: Reference, batch: int, fusions: Collection[str] = KERNEL_FUSIONS, device: str = "cuda"
    ) -> None:  # fmt: skip
        self.reference = reference
        self.launched = DeviceProgram(reference.program, batch, torch.device(device), fusions)
        self.checked = checked_indices(batch)
        self.images = torch.randn(batch, 3, IMAGE, IMAGE, device=device)
        self.images[self.checked] = reference.images[: len(self.checked)]
        self.launched.feed(self.images)
        operations = {operation.y: operation for operation in self.launched.program.operations}
        names = labels(self.launched.program)
        self.steps = [
            KernelWork(names[y], call, *work_of(operations[y], self.launched.program, batch)) for y, call in self.launched.steps
        ]

    def wrong_values(self) -> int:
        """Returns how many codes of all values, and how many logits, of the checked images differ from the reference."""
        codes, logits = self.reference.outcome
        self.launched.feed(self.images)  # later values use the memory of the codes of the images
        wrong, values, count = 0, self.launched.program.values, len(self.checked)
        operations = {operation.y: operation for operation in self.launched.program.operations}
        for y, call in self.launched.steps:
            call()
            names = [name for name in outputs_of(operations[y]) if values[name].storage in ACTIVATIONS]
            wrong += sum(int((self.launched.codes(n, self.checked) != codes[n][:count]).sum()) for n in names)
        return wrong + int((self.launched.result()[self.checked] != logits[:count]).sum())


class Network(LaunchedNetwork):
    """ResNet-50 with `storage` activations."""

    def __init__(self, storage: str, batch: int, fusion: str = KERNEL_FUSIONS[-1]) -> None:
        in_graph = tuple(name for name in up_to(fusion) if name in GRAPH_FUSIONS)
        kernel_fusions = [name for name in up_to(fusion) if name not in GRAPH_FUSIONS]
        super().__init__(reference_of(storage, in_graph), batch, kernel_fusions)


def labels(program: Program) -> dict[str, str]:
    """Returns a label for each operation, by the name of its output."""
    found: dict[str, str] = {}
    for op in program.operations:
        match op:
            case Convolve():
                found[op.y] = f"{op.layer.name} and max-pool" if op.pooled else op.layer.name
            case FusedBottleneck():
                found[op.also] = op.third.layer.name
                found[op.y] = f"{op.second.layer.name} to {op.following.layer.name}"
            case FusedPair():
                found[op.also] = op.third.layer.name
                found[op.y] = f"{op.third.layer.name} and {op.following.layer.name}"
            case SumCodes():
                found[op.y] = f"{found[op.x]} {'ReLU' if op.other is None else 'sum'}"
            case PoolMax():
                found[op.y] = "max-pool"
            case PoolAverage() | AverageCodes():
                found[op.y] = "average pool"
            case Quantize():
                found[op.y] = f"codes of {found.get(op.x, 'the images')}"
            case _:
                found[op.y] = op.y.removesuffix(FLOAT)
    return found


def work_of(operation: Operation, program: Program, batch: int) -> tuple[float, float]:
    """Returns the bytes of inputs, weights and output, and the operations, of one operation for a batch."""
    moved = sum(batch * _bytes_of(name, program) for name in (*operation.inputs, *outputs_of(operation)))
    if isinstance(operation, (FusedBottleneck, FusedPair)):
        convs = [operation.third, operation.following]
        convs += [operation.second] if isinstance(operation, FusedBottleneck) else []
        parts = [(conv, work_of(conv, program, batch)) for conv in convs]
        return moved + sum(_weights_of(conv) for conv, _ in parts), sum(work for _, (_, work) in parts)
    if not isinstance(operation, Convolve):
        return moved, 0.0
    layer, (_, height, width) = operation.layer, _sums_of(operation, program)
    moved, work = moved + _weights_of(operation), 0.0
    products = [(operation.x, layer.weight, layer.stride)]
    if layer.second is not None and operation.second is not None:
        products.append((operation.second, layer.second.weight, layer.second.stride))
    for name, weight, stride in products:
        work += 2.0 * batch * height * width * weight.numel()
        if tuple(weight.shape[2:]) == (1, 1):  # skips pixels
            moved -= batch * _bytes_of(name, program) * (1 - 1 / (stride[0] * stride[1]))
    return moved, work


def _weights_of(operation: Convolve) -> float:
    """Returns the bytes of the weights as the kernels store them."""
    second = operation.layer.second
    return float(operation.layer.weight.numel() + (0 if second is None else second.weight.numel()))


def _sums_of(operation: Convolve, program: Program) -> tuple[int, int, int]:
    """Returns the shape of the accumulators per image, before a fused max-pool."""
    layer: ConvLayer = operation.layer
    shape = program.values[operation.x].shape
    return (layer.weight.shape[0], *layer.output_size(shape[1], shape[2]))


def _bytes_of(name: str, program: Program) -> float:
    """Returns the bytes of a value per image."""
    if name in (packed := stems(program)):
        return float(packed[name].rows * packed[name].columns * PIXEL_BYTES)
    value = program.values[name]
    count = 1
    for size in value.shape:
        count *= size
    return count * {"u4": 0.5, "s8": 1.0, "f16": 2.0, "f32": 4.0}[value.storage]
