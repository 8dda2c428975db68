"""The memory plan: offsets of all stored values in one arena per batch size.

Values that are live at the same time get disjoint ranges. The largest value comes first, each at the lowest offset that is free
during its lifetime (greedy by size: Pisarchyk and Lee, arXiv:2001.03288). Codes are packed as in `pack/nhwc64.py`, so channels
are padded to blocks of 64 for 4-bit and 8-bit codes.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.formats.conv import ACTIVATIONS, stored_dtype
from lowbit.pack.nhwc64 import Nhwc64
from lowbit.pack.stem import PIXEL_BYTES, StemImages
from lowbit.vision.program import Compute, Convolve, Dequantize, Operation, Program, Quantize, Value, outputs_of

ALIGNMENT_BYTES = 1024
"""Alignment of each allocation; TMA and 128-byte loads need less."""


@dataclass(frozen=True)
class Allocation:
    """Bytes [offset, offset + nbytes) of the arena, live from operation `first` to operation `last`."""

    offset: int
    nbytes: int
    first: int
    last: int

    def overlaps(self, other: Allocation) -> bool:
        """True if both are live at the same time."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class MemoryPlan:
    """Allocations by value name for one batch size, without the images of the caller and the values that torch allocates."""

    batch: int
    allocations: dict[str, Allocation]

    @property
    def nbytes(self) -> int:
        """Bytes of the arena."""
        return max((p.offset + p.nbytes for p in self.allocations.values()), default=0)

    @property
    def values_bytes(self) -> int:
        """Bytes of all values together: the arena size without reuse."""
        return sum(p.nbytes for p in self.allocations.values())

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes that are live at one time, a lower bound of the arena size."""
        times = {p.first for p in self.allocations.values()}
        return max((sum(p.nbytes for p in self.allocations.values() if p.first <= t <= p.last) for t in times), default=0)


def stored_bytes(value: Value, batch: int) -> int:
    """Returns the aligned bytes of a value for a batch."""
    if value.storage in ACTIVATIONS:
        channels, height, width = value.shape
        nbytes = height * width * Nhwc64(value.storage).pixel_bytes(channels)
    else:
        nbytes = stored_dtype(value.storage).itemsize
        for size in value.shape:
            nbytes *= size
    return _aligned(batch * nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def stems(program: Program) -> dict[str, StemImages]:
    """Returns the stem layouts of values by name: 2 x 2 pixels packed together instead of channels padded to 64. A value has
    one if all its readers are stride-2 convolutions of images with few channels."""
    readers: dict[str, list[Operation]] = {}
    for operation in program.operations:
        for name in operation.inputs:
            readers.setdefault(name, []).append(operation)
    found = {}
    for name, operations in readers.items():
        images = {_stem_images(operation, name, program.values.get(name)) for operation in operations}
        stem = images.pop() if len(images) == 1 else None
        if stem is not None:
            found[name] = stem
    return found


def _stem_images(operation: Operation, name: str, known: Value | None) -> StemImages | None:
    """Returns the stem layout that the convolution needs; None if `operation` is not a stem, or if the value is not its image
    input."""
    if not isinstance(operation, Convolve) or operation.x != name or name in (operation.residual, operation.second):
        return None
    layer = operation.layer
    if known is None or known.storage != "s8" or len(known.shape) != 3 or layer.stride != (2, 2):
        return None
    if layer.residual is not None or layer.second is not None or layer.y not in ACTIVATIONS or layer.groups > 1:
        return None
    images = StemImages(known.shape[0], known.shape[1], known.shape[2], layer.kernel, layer.padding)
    return None if images.refusals() else images


def torch_values(program: Program) -> set[str]:
    """Returns the names of values that torch allocates: outputs of torch operations, and values that only torch operations
    read."""
    found = {op.y for op in program.operations if isinstance(op, (Compute, Dequantize))}
    for operation in program.operations:
        if isinstance(operation, Convolve) and operation.layer.y == "f32" and operation.y not in program.results:
            readers = [op for op in program.operations if operation.y in op.inputs]
            if all(isinstance(op, Compute) for op in readers):
                found.add(operation.y)
    return found


def half_values(program: Program) -> set[str]:
    """Returns the names of floating-point values that a GPU stores in fp16: those of `torch_values` that are read only by
    operations that compute, which they do in fp16. Results, and what is only rearranged on the way to one, are float32."""
    whole, elsewhere = set(program.results), torch_values(program)
    for operation in reversed(program.operations):
        if isinstance(operation, Compute) and not operation.node.reason and operation.y in whole:
            whole.update(operation.inputs)
    return elsewhere - whole


def plan_memory(program: Program, batch: int) -> MemoryPlan:
    """Returns the allocations of the values of `program` for `batch` images. Raises ValueError for a batch below 1."""
    if batch < 1:
        raise ValueError(f"a batch has at least 1 image, got {batch}")
    packed = stems(program)

    def nbytes(name: str) -> int:
        if name in packed:
            return _aligned(batch * packed[name].rows * packed[name].columns * PIXEL_BYTES)
        return stored_bytes(program.values[name], batch)

    last = {name: i for i, names in program.last_reads().items() for name in names}
    end = len(program.operations) - 1
    elsewhere = torch_values(program)
    unplaced = []
    for i, operation in enumerate(program.operations):
        of_images = isinstance(operation, Quantize) and operation.x == program.images  # quantized before all other operations
        first = 0 if of_images else i
        for name in outputs_of(operation):
            if name not in elsewhere:
                unplaced.append((name, Allocation(0, nbytes(name), first, last.get(name, end))))
    allocations: dict[str, Allocation] = {}
    for name, allocation in sorted(unplaced, key=lambda item: -item[1].nbytes):
        offset = 0
        for other in sorted((p for p in allocations.values() if p.overlaps(allocation)), key=lambda p: p.offset):
            if offset + allocation.nbytes <= other.offset:
                break
            offset = max(offset, other.offset + other.nbytes)
        allocations[name] = Allocation(offset, allocation.nbytes, allocation.first, allocation.last)
    names = [name for operation in program.operations for name in outputs_of(operation)]
    return MemoryPlan(batch, {name: allocations[name] for name in names if name in allocations})
