"""A `Program` on a GPU: weights packed for the kernels, every value in its place of one arena, all launches in one CUDA graph.

Codes are those of `Program.run` bit for bit. What has no integer form computes in fp16 between them. On a CPU the same packed
bytes in the same places are made by the reference, one operation after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowbit.kernels.conv_reference import DTYPES
from lowbit.ops.conv import average_pool_codes, conv_refusals, max_pool_codes, prepare_conv, prepare_stem
from lowbit.pack.nhwc64 import Nhwc64
from lowbit.pack.stem import PIXEL_BYTES, StemImages
from lowbit.vision.graph import as_images, call_other
from lowbit.vision.memory import plan_memory, stems
from lowbit.vision.program import (
    Compute,
    Convolve,
    Dequantize,
    Operation,
    PoolAverage,
    PoolMax,
    Program,
    Quantize,
    Value,
    quantize_codes,
)


def refusals(program: Program, device: torch.device) -> tuple[str, ...]:
    """Why the kernels cannot run `program` on `device`; empty if they can. On a CPU the reference takes their place."""
    found = (f"{layer.name}: {reason}" for layer in program.layers for reason in conv_refusals(layer, device))
    return tuple(dict.fromkeys(found))


def captured(launch: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """`launch` as one CUDA graph: run once, which compiles kernels and makes descriptors, then recorded. On a CPU, itself."""
    launch()
    if device.type != "cuda":
        return launch
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph.replay


class DeviceProgram:
    """`program` for one batch size on one GPU: `run(images)` with images float [batch, C, H, W] returns the result, float32.

    Raises ValueError on a device that the kernels are not for.
    """

    def __init__(self, program: Program, batch: int, device: torch.device) -> None:
        reasons = refusals(program, device)
        if reasons:
            raise ValueError(f"no kernels for this network on {device}: {'; '.join(reasons)}")
        device = torch.empty(0, device=device).device  # "cuda" is a device without a number, tensors have one
        self.program, self.batch, self.device = program.to(device), batch, device
        self.plan = plan_memory(program, batch)
        self.arena = torch.zeros(self.plan.nbytes, dtype=torch.uint8, device=device)
        self.images = torch.zeros(batch, *program.values[program.images].shape, device=device)
        self.values: dict[str, Any] = {program.images: self.images}
        self.stems = stems(program)
        self.steps: list[tuple[str, Callable[[], None]]] = []
        for operation in self.program.operations:
            self.steps.append((operation.y, self._step(operation)))
        self.replay = captured(self.launch, device)

    def launch(self) -> None:
        """Everything once, from `self.images` to the result, on the current stream."""
        for _, step in self.steps:
            step()

    def run(self, images: Tensor) -> Tensor:
        """The result for a batch of images."""
        self.images.copy_(images)
        self.replay()
        return self.result().clone()

    def result(self) -> Tensor:
        """What the last launch made, in the model's shape."""
        shape = self.program.values[self.program.result].shape
        return self.values[self.program.result].float().reshape(self.batch, *shape)

    def codes(self, name: str) -> Tensor:
        """The codes int32 [N, C, H, W] of a value, while its place has not been given to another one."""
        known = self.program.values[name]
        return Nhwc64(known.storage).unpack(self.values[name], known.shape[0])  # type: ignore[arg-type]

    def _place(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The value's place in the arena as a tensor."""
        place = self.plan.places[name]
        count = dtype.itemsize
        for size in shape:
            count *= size
        assert count <= place.nbytes, (name, count, place)
        return self.arena[place.offset : place.offset + count].view(dtype).view(shape)

    def _step(self, operation: Operation) -> Callable[[], None]:
        """The launch of one operation, its output bound to its place."""
        values, stems = self.values, self.stems
        match operation:
            case Quantize(y, x, factor) if y in stems:
                stem = stems[y]
                packed = self._place(y, (self.batch, stem.rows, stem.columns, PIXEL_BYTES), torch.uint8)
                values[y] = packed
                return lambda: _ignore(packed.copy_(stem.pack(quantize_codes(values[x], factor))))
            case Quantize(y, x, factor):
                known = self.program.values[y]
                channels, height, width = known.shape
                out = self._place(y, (self.batch, height, width, Nhwc64("s8").pixel_bytes(channels)), torch.uint8)
                values[y] = out
                return lambda: _pack_codes(quantize_codes(as_images(values[x]), factor), out)
            case Convolve():
                return self._convolution(operation, stems.get(operation.x))
            case PoolMax(y, x):
                known = self.program.values[y]
                layout = Nhwc64(known.storage)  # type: ignore[arg-type]
                out = self._place(y, layout.shape((self.batch, *known.shape)), torch.uint8)  # type: ignore[arg-type]
                values[y] = out
                return lambda: _max_pool(values[x], known, operation, out)  # type: ignore[arg-type]
            case PoolAverage(y, x, scale):
                read = self.program.values[x]
                out = self._place(y, (self.batch, read.shape[0]), torch.float32)
                values[y] = as_images(out)
                return lambda: _average_pool(values[x], read, scale, out)  # type: ignore[arg-type]
            case Dequantize(y, x, scale):
                return lambda: values.update({y: (self.codes(x).float() * scale).half()})
        return self._computation(operation)

    def _convolution(self, operation: Convolve, stem: StemImages | None) -> Callable[[], None]:
        layer, values, y = operation.layer, self.values, operation.y
        x = values[operation.x]
        shape = self.program.values[operation.x].shape
        size = (self.batch, *shape[1:])
        prepared = (prepare_conv if stem is None else prepare_stem)(layer, size, self.device)  # type: ignore[arg-type]
        dtype = DTYPES[layer.y] if layer.y in ("f16", "f32") else torch.uint8
        out = self._place(y, prepared.output_shape(tuple(x.shape)), dtype)
        residual = None if operation.residual is None else values[operation.residual]
        second = None if operation.second is None else values[operation.second]
        values[y] = out if dtype == torch.uint8 else out.permute(0, 3, 1, 2)
        return lambda: _ignore(prepared(x, residual, second, out))

    def _computation(self, operation: Operation) -> Callable[[], None]:
        assert isinstance(operation, Compute)
        program, values = self.program, self.values

        def compute() -> None:
            read = {name: program.shaped(name, values[name]) for name in operation.inputs}
            read = {n: v.half() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in read.items()}
            like = next((v for v in read.values() if isinstance(v, Tensor)), self.images)
            values[operation.y] = call_other(operation.node, read, like)

        return compute


def _pack_codes(codes: Tensor, out: Tensor) -> None:
    """Writes s8 codes int32 [N, C, H, W] to out uint8 [N, H, W, padded C], zeros in the channels that fill up."""
    channels = codes.shape[1]
    out.view(torch.int8)[..., :channels].copy_(codes.permute(0, 2, 3, 1))
    if channels < out.shape[3]:
        out[..., channels:].zero_()


def _ignore(value: Tensor) -> None:
    """A launch for its effect: `value` is the output that was given to it."""


def _max_pool(x: Tensor, known: Value, pool: PoolMax, out: Tensor) -> None:
    if x.is_cuda:
        from lowbit.kernels.pool import max_pool

        max_pool(x, known.storage, pool.kernel, pool.stride, pool.padding, out)  # type: ignore[arg-type]
    else:
        out.copy_(max_pool_codes(x, known.storage, pool.kernel, pool.stride, pool.padding))  # type: ignore[arg-type]


def _average_pool(x: Tensor, known: Value, scale: float, out: Tensor) -> None:
    if x.is_cuda:
        from lowbit.kernels.pool import average_pool

        average_pool(x, known.storage, known.shape[0], scale, torch.float32, out)  # type: ignore[arg-type]
    else:
        out.copy_(average_pool_codes(x, known.storage, known.shape[0], scale))  # type: ignore[arg-type]
