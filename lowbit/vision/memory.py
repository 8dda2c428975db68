"""Where every stored value lies: one piece of memory for a batch, planned before anything runs.

Values that are needed at the same time get disjoint places; the largest is placed first, each at the lowest offset that is free
for as long as it is needed (greedy by size: Pisarchyk and Lee, arXiv:2001.03288). Codes are packed as `pack/nhwc64.py` says, so
channels are padded to blocks of 64 here, for 4-bit and 8-bit codes alike, whatever the network has.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.formats.conv import ACTIVATIONS, stored_dtype
from lowbit.pack.nhwc64 import Nhwc64
from lowbit.pack.stem import PIXEL_BYTES, StemImages
from lowbit.vision.program import Compute, Convolve, Dequantize, Operation, Program, Quantize, Value, made_by

ALIGNMENT_BYTES = 1024
"""Of every place: what TMA and 128-byte loads ask for, and more."""


@dataclass(frozen=True)
class Allocation:
    """Bytes [offset, offset + nbytes) of the arena, needed from operation `first` to operation `last`."""

    offset: int
    nbytes: int
    first: int
    last: int

    def overlaps(self, other: Allocation) -> bool:
        """Whether both are needed at the same time."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class MemoryPlan:
    """Places of values by name, for one batch size; none for the caller's images and for what torch has memory for."""

    batch: int
    allocations: dict[str, Allocation]

    @property
    def nbytes(self) -> int:
        """Bytes of the arena."""
        return max((p.offset + p.nbytes for p in self.allocations.values()), default=0)

    @property
    def values_bytes(self) -> int:
        """Bytes of all values together, which is what would be needed without a plan."""
        return sum(p.nbytes for p in self.allocations.values())

    @property
    def peak_bytes(self) -> int:
        """The most bytes that are needed at one time: no plan has a smaller arena."""
        times = {p.first for p in self.allocations.values()}
        return max((sum(p.nbytes for p in self.allocations.values() if p.first <= t <= p.last) for t in times), default=0)


def stored_bytes(value: Value, batch: int) -> int:
    """Bytes of a value for a batch, aligned."""
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
    """How the codes of a value are packed if all its readers are convolutions of stride 2 of images with few channels, by name:
    2 x 2 pixels together, instead of channels filled up to 64."""
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
    """How a stem's kernel wants the value packed; None if `operation` is no such stem or reads the value in another way."""
    if not isinstance(operation, Convolve) or operation.x != name or name in (operation.residual, operation.second):
        return None
    layer = operation.layer
    if known is None or known.storage != "s8" or len(known.shape) != 3 or layer.stride != (2, 2):
        return None
    if layer.residual is not None or layer.second is not None or layer.y not in ACTIVATIONS:
        return None
    images = StemImages(known.shape[0], known.shape[1], known.shape[2], layer.kernel, layer.padding)
    return None if images.refusals() else images


def of_torch(program: Program) -> set[str]:
    """Names of the values in memory of torch's: what it makes, and what it alone reads, views of which it may make."""
    found = {op.y for op in program.operations if isinstance(op, (Compute, Dequantize))}
    for operation in program.operations:
        if isinstance(operation, Convolve) and operation.layer.y == "f32" and operation.y != program.result:
            readers = [op for op in program.operations if operation.y in op.inputs]
            if all(isinstance(op, Compute) for op in readers):
                found.add(operation.y)
    return found


def plan_memory(program: Program, batch: int) -> MemoryPlan:
    """Places for the values of `program` with `batch` images. Raises ValueError for a batch below 1."""
    if batch < 1:
        raise ValueError(f"a batch has at least 1 image, got {batch}")
    packed = stems(program)

    def nbytes(name: str) -> int:
        if name in packed:
            return _aligned(batch * packed[name].rows * packed[name].columns * PIXEL_BYTES)
        return stored_bytes(program.values[name], batch)

    last = {name: i for i, names in program.last_reads().items() for name in names}
    end = len(program.operations) - 1
    elsewhere = of_torch(program)
    wanted = []
    for i, operation in enumerate(program.operations):
        of_images = isinstance(operation, Quantize) and operation.x == program.images  # made before anything else
        first = 0 if of_images else i
        for name in made_by(operation):
            if name not in elsewhere:
                wanted.append((name, Allocation(0, nbytes(name), first, last.get(name, end))))
    allocations: dict[str, Allocation] = {}
    for name, allocation in sorted(wanted, key=lambda item: -item[1].nbytes):
        offset = 0
        for other in sorted((p for p in allocations.values() if p.overlaps(allocation)), key=lambda p: p.offset):
            if offset + allocation.nbytes <= other.offset:
                break
            offset = max(offset, other.offset + other.nbytes)
        allocations[name] = Allocation(offset, allocation.nbytes, allocation.first, allocation.last)
    names = [name for operation in program.operations for name in made_by(operation)]
    return MemoryPlan(batch, {name: allocations[name] for name in names if name in allocations})
