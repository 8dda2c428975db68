"""Runs a `Program` on a GPU: weights packed for the kernels, values in one arena, all launches in one CUDA graph.

A kernel before the graph reads the images from the caller's memory, quantizes and packs them. Codes equal those of
`Program.run` bit for bit, and so do results that are only dequantized and rearranged, in float32. Other operations without an
integer form compute in fp16. On a CPU the reference computes the same packed
bytes, one operation at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.conv import stored_dtype
from lowbit.hardware.machine import machine_of
from lowbit.ops.code_arrange import concat_codes, resize_codes
from lowbit.ops.code_sum import sum_codes
from lowbit.ops.code_table import gate_codes, map_codes
from lowbit.ops.conv import (
    average_pool_codes,
    average_pool_to_codes,
    conv_refusals,
    max_pool_codes,
    prepare_conv,
    prepare_stem,
)
from lowbit.ops.conv_block import prepare_block
from lowbit.ops.conv_pair import prepare_pair
from lowbit.ops.relayout import pack_values, unpack_values
from lowbit.pack.nhwc64 import Nhwc64
from lowbit.pack.stem import PIXEL_BYTES, StemImages
from lowbit.vision.fusion import KERNEL_FUSIONS, fused
from lowbit.vision.graph import as_images, call_other, filled, mapped
from lowbit.vision.kernels import current_machine
from lowbit.vision.memory import half_values, plan_memory, stems, torch_values
from lowbit.vision.program import (
    AverageCodes,
    Compute,
    ConcatCodes,
    Convolve,
    Dequantize,
    FusedBottleneck,
    FusedPair,
    GateCodes,
    MapCodes,
    Operation,
    PoolAverage,
    PoolMax,
    Program,
    Quantize,
    ResizeCodes,
    SumCodes,
)


def refusals(program: Program, device: torch.device) -> tuple[str, ...]:
    """Returns why the kernels cannot run `program` on `device`; empty if they can. On a CPU the reference runs instead."""
    found = (f"{layer.name}: {reason}" for layer in program.layers for reason in conv_refusals(layer, device))
    return tuple(dict.fromkeys(found))


def captured(launch: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Runs `launch` once and captures it as a CUDA graph. On a CPU, and where kernels are recorded instead of launched, returns
    `launch` itself. The convolution kernels that Triton's cache lacks are compiled in several processes before."""
    if device.type != "cuda" or compile_kernels(launch, device):
        launch()
        return launch
    launch()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph.replay


def compile_kernels(launch: Callable[[], None], device: torch.device) -> bool:
    """Compiles the convolution kernels that `launch` runs on a GPU, in several processes where Triton's cache lacks them.
    Returns True, and compiles none, if this thread records kernels."""
    from lowbit.kernels.parts.compile import compiled
    from lowbit.kernels.parts.launch import is_recording, recording

    if is_recording():
        return True
    with recording() as kernels:
        launch()
    for _done in compiled(kernels, machine_of(device).arch.sm):
        pass
    return False


class DeviceProgram:
    """`program` compiled for one batch size on one GPU. `run(images)` takes [batch, C, H, W] and returns the model's results in
    float32.

    fusions: the `KERNEL_FUSIONS` to apply where a kernel supports them. Raises ValueError if the kernels do not support the
    device.
    """

    def __init__(
        self, program: Program, batch: int, device: torch.device, fusions: Collection[str] = KERNEL_FUSIONS
    ) -> None:  # fmt: skip
        reasons = refusals(program, device)
        if reasons:
            raise ValueError(f"no kernels for this network on {device}: {'; '.join(reasons)}")
        device = torch.empty(0, device=device).device  # "cuda" has no index; the device of a tensor has one
        program = fused(program, batch, current_machine(device), fusions)
        self.program, self.batch, self.device = program.to(device), batch, device
        self.plan = plan_memory(program, batch)
        self.arena = torch.zeros(self.plan.nbytes, dtype=torch.uint8, device=device)
        self.values: dict[str, Any] = {}
        self.stems = stems(program)
        self.entries: list[tuple[str, Callable[[Tensor], object]]] = []
        self.steps: list[tuple[str, Callable[[], object]]] = []
        self.torch_values = torch_values(program)  # freed after the last operation that reads it
        self.half_values = half_values(program)
        self.dead = {
            program.operations[i].y: self.torch_values.intersection(names) for i, names in program.last_reads().items()
        }
        if any(program.images in op.inputs and not isinstance(op, Quantize) for op in program.operations):
            images = torch.zeros(batch, *program.values[program.images].shape, device=device)
            self.values[program.images] = images
            self.entries.append((program.images, lambda x: images.copy_(self.program.floating(x))))
        with torch.cuda.device_of(self.arena):
            for operation in self.program.operations:
                if isinstance(operation, Quantize) and operation.x == program.images:
                    self.entries.append((operation.y, self._quantization(operation)))
                else:
                    self.steps.append((operation.y, self._step(operation)))
            self.replay = captured(self.launch, device)

    def feed(self, images: Tensor) -> None:
        """Loads a batch [batch, C, H, W] of any strides: normalized floats, or uint8 pixels if the program can normalize
        them. Raises ValueError for another shape or device."""
        shape = (self.batch, *self.program.values[self.program.images].shape)
        if tuple(images.shape) != shape or images.device != self.device:
            raise ValueError(f"images are {list(shape)} on {self.device}, got {list(images.shape)} on {images.device}")
        for _, take in self.entries:
            take(images)

    def launch(self) -> None:
        """Launches all operations after `feed` once, on the current stream."""
        for name, step in self.steps:
            step()
            for dead in self.dead.get(name, ()):
                del self.values[dead]

    def run(self, images: Tensor) -> Any:
        """Returns the results for a batch of images: one tensor, or several in tuples and dictionaries."""
        with torch.cuda.device_of(self.arena):
            self.feed(images)
            self.replay()
            return mapped(self.result(), Tensor.clone)

    def result(self) -> Any:
        """Returns the results of the last launch, in the shapes and the form of the model, valid until the next one."""
        return filled(self.program.form, self.program.returned(self.values, self.batch))

    def codes(self, name: str, images: Sequence[int] | None = None) -> Tensor:
        """Returns the codes int32 [N, C, H, W] of a value, of all images of the batch or of those with the indices `images`.
        They are valid until the memory of the value is reused."""
        known, packed = self.program.values[name], self.values[name]
        return Nhwc64(known.storage).unpack(packed if images is None else packed[list(images)], known.shape[0])

    def _allocated(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns the allocation of the value in the arena as a tensor."""
        allocation = self.plan.allocations[name]
        count = dtype.itemsize
        for size in shape:
            count *= size
        assert count <= allocation.nbytes, (name, count, allocation)
        return self.arena[allocation.offset : allocation.offset + count].view(dtype).view(shape)

    def _size(self, name: str) -> tuple[int, int, int]:
        """Returns the number of images, height and width of a value."""
        _, height, width = self.program.values[name].shape
        return self.batch, height, width

    def _quantization(self, operation: Quantize) -> Callable[[Tensor], Tensor]:
        """Returns the function that packs the codes of a value [batch, C, H, W] into its allocation."""
        y = operation.y
        known = self.program.values[y]
        if y in self.stems:
            layout: Nhwc64 | StemImages = self.stems[y]
            shape = (self.batch, self.stems[y].rows, self.stems[y].columns, PIXEL_BYTES)
        else:
            layout = Nhwc64("s8")
            shape = layout.shape((self.batch, *known.shape))
        out = self.values[y] = self._allocated(y, shape, torch.uint8)
        constants: dict[bool, tuple[Tensor, Tensor]] = {}

        def quantize(x: Tensor) -> Tensor:
            pixels = x.dtype == torch.uint8
            if pixels not in constants:
                gain, shift = self.program.constants(operation, x)
                constants[pixels] = gain.to(self.device), shift.to(self.device)
            return pack_values(x, *constants[pixels], layout, out)

        return quantize

    def _step(self, operation: Operation) -> Callable[[], object]:
        """Returns the launch of one operation, with its output bound to its allocation."""
        values, stems = self.values, self.stems
        match operation:
            case Quantize(_, x):
                quantize = self._quantization(operation)
                return lambda: quantize(as_images(values[x]))
            case Convolve():
                return self._convolution(operation, stems.get(operation.x))
            case FusedBottleneck():
                return self._block(operation)
            case FusedPair():
                return self._pair(operation)
            case SumCodes(y, x, layer, other):
                known = self.program.values[y]
                layout = Nhwc64(known.storage)
                total = self._allocated(y, layout.shape((self.batch, *known.shape)), torch.uint8)
                values[y] = total
                return lambda: sum_codes(values[x], layer, None if other is None else values[other], total)
            case MapCodes(y, x, table):
                return self._map(y, x, table)
            case GateCodes(y, x, gate, gating):
                known = self.program.values[y]
                gated = values[y] = self._allocated(y, Nhwc64("s8").shape((self.batch, *known.shape)), torch.uint8)
                return lambda: gate_codes(values[x], values[gate], gating, gated)
            case ResizeCodes(y, x, size):
                known = self.program.values[y]
                layout = Nhwc64(known.storage)
                resized = values[y] = self._allocated(y, layout.shape((self.batch, *known.shape)), torch.uint8)
                return lambda: resize_codes(values[x], size, known.storage, resized)
            case ConcatCodes(y, parts, layers):
                known = self.program.values[y]
                layout = Nhwc64(known.storage)
                whole = values[y] = self._allocated(y, layout.shape((self.batch, *known.shape)), torch.uint8)
                channels = [self.program.values[part].shape[0] for part in parts]
                return lambda: concat_codes([values[part] for part in parts], channels, layers, whole)
            case PoolMax(y, x):
                known = self.program.values[y]
                layout = Nhwc64(known.storage)
                out = self._allocated(y, layout.shape((self.batch, *known.shape)), torch.uint8)
                values[y] = out
                pool = operation
                return lambda: max_pool_codes(values[x], known.storage, pool.kernel, pool.stride, pool.padding, out)
            case PoolAverage(y, x, scale):
                read = self.program.values[x]
                out = self._allocated(y, (self.batch, read.shape[0]), torch.float32)
                values[y] = as_images(out)
                return lambda: average_pool_codes(values[x], read.storage, read.shape[0], scale, out)
            case AverageCodes(y, x, scale, factor):
                read = self.program.values[x]
                count = read.shape[0]
                means = values[y] = self._allocated(y, Nhwc64("s8").shape((self.batch, count, 1, 1)), torch.uint8)
                return lambda: average_pool_to_codes(values[x], read.storage, count, scale, factor, means)
            case Dequantize(y, x, scale):
                shape = self.program.values[x].shape
                storage = self.program.values[x].storage
                like = self.arena.new_empty(0, dtype=torch.float16 if y in self.half_values else torch.float32)

                def dequantize() -> None:
                    rows = like.new_empty((self.batch, *shape[1:], shape[0]))
                    values[y] = unpack_values(values[x], storage, scale, rows.permute(0, 3, 1, 2))

                return dequantize
        return self._computation(operation)

    def _map(self, y: str, x: str, table: Tensor) -> Callable[[], object]:
        values, known = self.values, self.program.values[y]
        mapped = values[y] = self._allocated(y, Nhwc64("s8").shape((self.batch, *known.shape)), torch.uint8)
        return lambda: map_codes(values[x], table, known.shape[0], mapped)

    def _convolution(self, operation: Convolve, stem: StemImages | None) -> Callable[[], object]:
        layer, values, y = operation.layer, self.values, operation.y
        x = values[operation.x]
        size = self._size(operation.x)
        if y in self.half_values:
            layer = replace(layer, y="f16")  # readers of this f32 value would round it to fp16 anyway
        if stem is None:
            prepared = prepare_conv(layer, size, self.device)
        else:
            prepared = prepare_stem(layer, size, self.device, operation.pooled)
        if y in self.torch_values:
            return lambda: values.update({y: prepared(x).permute(0, 3, 1, 2)})
        dtype = stored_dtype(layer.y)
        out = self._allocated(y, prepared.output_shape(tuple(x.shape)), dtype)
        residual = None if operation.residual is None else values[operation.residual]
        second = None if operation.second is None else values[operation.second]
        values[y] = out if dtype == torch.uint8 else out.permute(0, 3, 1, 2)
        return lambda: prepared(x, residual, second, out)

    def _block(self, operation: FusedBottleneck) -> Callable[[], object]:
        x, added = self.values[operation.second.x], self.values[operation.added]
        size = self._size(operation.second.x)
        layers = (operation.second.layer, operation.third.layer, operation.following.layer)
        block = prepare_block(*layers, size, self.device)
        shapes = block.output_shapes(tuple(x.shape))
        y = self.values[operation.also] = self._allocated(operation.also, shapes[0], torch.uint8)
        z = self.values[operation.y] = self._allocated(operation.y, shapes[1], torch.uint8)
        return lambda: block(x, added, (y, z))

    def _pair(self, operation: FusedPair) -> Callable[[], object]:
        x, added = self.values[operation.third.x], self.values[operation.added]
        pair = prepare_pair(operation.third.layer, operation.following.layer, self._size(operation.third.x), self.device)
        shapes = pair.output_shapes(tuple(x.shape))
        y = self.values[operation.also] = self._allocated(operation.also, shapes[0], torch.uint8)
        z = self.values[operation.y] = self._allocated(operation.y, shapes[1], torch.uint8)
        return lambda: pair(x, added, (y, z))

    def _computation(self, operation: Operation) -> Callable[[], None]:
        assert isinstance(operation, Compute)
        program, values = self.program, self.values

        def compute() -> None:
            read = {name: program.shaped(name, values[name]) for name in operation.inputs}
            if operation.node.reason:  # it computes, in fp16
                read = {n: v.half() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in read.items()}
            like = next((v for v in read.values() if isinstance(v, Tensor)), self.arena.new_zeros(0, dtype=torch.float16))
            values[operation.y] = call_other(operation.node, read, like)

        return compute
