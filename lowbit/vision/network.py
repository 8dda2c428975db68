"""`quantize`: a CNN of torch becomes a network of integers, with a report of what did not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn

from lowbit.formats.conv import CODES
from lowbit.hardware.machine import Machine
from lowbit.vision.bits import assign_bits, calibrate, scheme_bits
from lowbit.vision.finetune import FineTune, fine_tune
from lowbit.vision.kernels import KernelRow, kernel_lines, kernel_rows, machine_here
from lowbit.vision.lower import FLOAT, lower
from lowbit.vision.observe import Search, observe
from lowbit.vision.pixels import Pixels
from lowbit.vision.program import Compute, Convolve, PoolAverage, PoolMax, Program, SumCodes
from lowbit.vision.sensitivity import Assignment, choose_int8
from lowbit.vision.trace import FUSIONS, trace

if TYPE_CHECKING:
    from lowbit.vision.device import DeviceProgram

MOST_BATCH_SIZES = 4
"""Batch sizes for which a network keeps its memory and CUDA graph on a GPU."""


@dataclass(frozen=True)
class LayerRow:
    """One operation for the report: where its input and output are stored, bits of its weights, multiply-adds per image."""

    name: str
    kind: str
    weight_bits: int
    storage: str
    products: int


class QuantizedNetwork(nn.Module):
    """A network of integers. `network(images)` takes what the model took, float [N, C, H, W], or pixels uint8 if it knows how
    they are normalized, and returns the model's result, float32.

    Images on a GPU go through its kernels, one CUDA graph for each batch size; images on a CPU, or given to `reference`,
    through the exact reference: the same codes. `program` is what it computes, `scheme` what was asked for, and `assignment`
    how layers were chosen to stay in int8, where they were. Codes are not parameters: the module has no state dict;
    `lowbit.vision.save` writes it.
    """

    def __init__(self, program: Program, scheme: str, assignment: Assignment | None = None) -> None:
        super().__init__()
        self.program, self.scheme, self.assignment = program, scheme, assignment
        self._launched: dict[tuple[torch.device, int], Any] = {}

    def forward(self, images: Tensor) -> Tensor:
        """The result for images [N, C, H, W]. Raises ValueError for images of another size than was traced, and for a GPU
        that the kernels are not for (`reference` runs there)."""
        if images.device.type != "cuda":
            return self.reference(images)
        return self.on_device(self._checked(images).shape[0], images.device).run(images)

    def reference(self, images: Tensor) -> Tensor:
        """What `forward` returns, computed by `kernels/reference/conv.py` on any device, slowly."""
        with torch.no_grad():
            return self.program.to(images.device).run(self._checked(images))

    def on_device(self, batch: int, device: torch.device) -> DeviceProgram:
        """The program on a GPU for one batch size, made at the first call; the last few are kept."""
        from lowbit.vision.device import DeviceProgram

        key = (device, batch)
        if key not in self._launched:
            while len(self._launched) >= MOST_BATCH_SIZES:
                del self._launched[next(iter(self._launched))]
            self._launched[key] = DeviceProgram(self.program, batch, device)
        return self._launched[key]

    def _checked(self, images: Tensor) -> Tensor:
        wanted = self.program.values[self.program.images].shape
        if images.dim() != 4 or tuple(images.shape[1:]) != wanted:
            raise ValueError(f"this network was traced for images [N, {', '.join(map(str, wanted))}], got {list(images.shape)}")
        if not images.is_floating_point() and (images.dtype != torch.uint8 or self.program.pixels is None):
            raise ValueError(
                f"images are floating-point, or uint8 for a network made with pixels=Pixels(...); got {images.dtype}"
            )
        return images

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedNetwork:
        """What `to`, `cuda` and `cpu` go through: the layers follow to the device, their types stay as they are."""
        self.program = self.program.to(fn(torch.zeros(())).device)
        return self

    @property
    def kept(self) -> dict[str, str]:
        """What stayed in floating point by name, with the reason; what only rearranges is left out."""
        return {
            op.node.name.removesuffix(FLOAT): op.node.reason
            for op in self.program.operations
            if isinstance(op, Compute) and op.node.reason
        }

    def rows(self) -> list[LayerRow]:
        """The operations on codes, in order."""
        found = []
        values = self.program.values
        for op in self.program.operations:
            if isinstance(op, Convolve):
                layer, out = op.layer, values[op.y].shape
                pixels = out[1] * out[2] if len(out) == 3 else 1
                products = pixels * layer.weight.numel()
                if layer.second is not None:
                    products += pixels * layer.second.weight.numel()
                storage = f"{layer.x} -> {layer.y}"
                if layer.residual is not None:
                    storage = f"{layer.x} + {layer.residual} -> {layer.y}"
                found.append(LayerRow(layer.name, _kind(op), CODES[layer.spec.w].bits, storage, products))
            elif isinstance(op, (PoolMax, PoolAverage, SumCodes)):
                kind = "max pool" if isinstance(op, PoolMax) else "average pool"
                if isinstance(op, SumCodes):
                    kind = " + ".join(["add"] * (op.other is not None) + ["relu"] * op.layer.relu)
                found.append(
                    LayerRow(op.y.removesuffix(FLOAT), kind, 0, f"{values[op.x].storage} -> {values[op.y].storage}", 0)
                )
        return found

    def extra_repr(self) -> str:
        """The report, where torch prints modules."""
        return "\n".join(self.lines())

    def kernels(self, batch: int = 1, machine: Machine | None = None) -> list[KernelRow]:
        """The launches for a batch of this size, in order, with what else was considered.

        On the GPU in hand, else on the CPU; `machine`, one of `lowbit.hardware.machine.MACHINES`, stands for a GPU elsewhere.
        """
        return kernel_rows(self.program, batch, machine_here() if machine is None else machine)

    def lines(self, batch: int = 1, machine: Machine | None = None) -> list[str]:
        """The report, a line each: what became integers, what stayed in floating point and why, and the kernels that run it,
        with the reason, for a batch of this size. `machine` as `kernels` has it."""
        rows = [row for row in self.rows() if row.weight_bits]
        weights = sum(
            layer.weight.numel() + (layer.second.weight.numel() if layer.second else 0) for layer in self.program.layers
        )
        four = sum(row.weight_bits == 4 for row in rows)
        codes = [self.program.values[op.y].storage for op in self.program.operations if isinstance(op, Convolve)]
        out = [
            f"{self.scheme}: {len(rows)} convolutions and linear layers, {weights:,} weights; {four} with 4-bit weights, "
            f"{codes.count('u4')} with 4-bit outputs"
        ]
        if self.assignment is not None and self.assignment.keep_int8:
            out.append(f"kept in int8 by measured sensitivity: {', '.join(self.assignment.keep_int8)}")
        out += [f"kept in floating point: {name}: {reason}" for name, reason in self.kept.items()]
        return out + kernel_lines(self.program, batch, machine_here() if machine is None else machine)


def _kind(op: Convolve) -> str:
    layer = op.layer
    height, width = layer.kernel
    parts = [f"{height}x{width}" + (f"/{layer.stride[0]}" if max(layer.stride) > 1 else "")]
    if layer.residual is not None:
        parts.append("add")
    if layer.second is not None:
        parts.append("shortcut")
    return " + ".join([*parts, "relu"] if layer.relu else parts)


def quantize(
    model: nn.Module,
    calibration_data: Tensor | Iterable[Any],
    scheme: str = "w8a4",
    *,
    keep_int8: Sequence[str] = (),
    most_divergence: float | None = None,
    fine_tuning: FineTune | None = None,
    search: Search = "mse",
    fold_shortcuts: bool = True,
    pixels: Pixels | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> QuantizedNetwork:
    """Quantizes a CNN (Transformers, timm, torchvision or your own) that maps images [N, C, H, W] to one tensor.

    calibration_data: some hundred images as the model takes them: a tensor [N, C, H, W] or batches, each a tensor, a tuple that
    starts with one or a mapping with "pixel_values". scheme: "w8a8", "w8a4", "w4a8" or "w4a4", weights per output channel and
    activations per tensor; values after ReLU get the 4 bits; 8-bit weights stay where images are read and the result is made.
    keep_int8: layers that keep 8 bits. most_divergence: instead, as few layers keep 8 bits as bring the mean divergence of
    the result's softmax to this many nats. fine_tuning: trains with the rounding in place, on the calibration data, without
    labels. search: how activations are clipped, see `observe`. fold_shortcuts: whether a convolution computes the one that its
    result is added to. pixels: how 8-bit pixels become what the model takes; calibration data and the network's input may then
    be uint8. The model is not changed, and may be on a GPU. Raises ValueError for a scheme, layer or data that cannot be,
    `UnsupportedNetwork` for a model.
    """
    scheme_bits(scheme)
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model is a module of torch, got {type(model).__name__}: load it first")
    if isinstance(keep_int8, str):
        raise ValueError(f"keep_int8 is a list of names, got the string {keep_int8!r}")
    if search not in get_args(Search):
        raise ValueError(f"search is one of {', '.join(get_args(Search))}, got {search!r}")
    if fine_tuning is not None and not isinstance(fine_tuning, FineTune):
        raise ValueError(f"fine_tuning is vision.FineTune(epochs=..., rate=...) or None, got {fine_tuning!r}")
    if keep_int8 and most_divergence is not None:
        raise ValueError("keep_int8 names layers and most_divergence finds them: give one of the two")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    batches = image_batches(calibration_data, device, pixels)
    graph = trace(model, batches[0], FUSIONS if fold_shortcuts else FUSIONS[:-1])
    ranges = observe(graph, batches)
    assignment = None
    if most_divergence is not None:
        assignment = choose_int8(graph, ranges, scheme, batches, most_divergence, search, say)
    bits = assign_bits(graph, scheme, tuple(keep_int8) if assignment is None else assignment.keep_int8)
    quantization = calibrate(graph, ranges, bits, search)
    if fine_tuning is not None:
        graph, quantization = fine_tune(graph, quantization, batches, fine_tuning, say)
    return QuantizedNetwork(replace(lower(graph, quantization), pixels=pixels), scheme, assignment)


def image_batches(
    data: Tensor | Iterable[Any], device: torch.device | str, pixels: Pixels | None = None, size: int = 64
) -> list[Tensor]:
    """Batches float32 [N, C, H, W] of calibration data in any of the forms that `quantize` takes.

    Raises ValueError for data without images, or with something else in it.
    """
    if isinstance(data, Tensor):
        data = data.split(size)
    batches = []
    for item in data:
        if isinstance(item, (tuple, list)) and item:
            item = item[0]
        elif not isinstance(item, Tensor) and hasattr(item, "keys") and "pixel_values" in item:
            item = item["pixel_values"]
        if pixels is not None and isinstance(item, Tensor) and item.dim() == 4 and item.dtype == torch.uint8:
            item = pixels.normalized(item.to(device))
        if not isinstance(item, Tensor) or item.dim() != 4 or not item.is_floating_point():
            what = f"{item.dtype} {list(item.shape)}" if isinstance(item, Tensor) else type(item).__name__
            raise ValueError(
                f"calibration images are tensors [N, C, H, W], normalized floats or, with pixels=Pixels(...), uint8; got {what}"
            )
        batches.append(item.to(device, torch.float32))
    if not batches:
        raise ValueError("no calibration images: give a tensor [N, C, H, W] or batches of them")
    return batches
