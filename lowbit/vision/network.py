"""`quantize` converts a torch CNN to an integer network and reports what stayed in floating point."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn

from lowbit.formats.conv import CODES
from lowbit.hardware.machine import Machine
from lowbit.vision.bits import assign_bits, calibrate, scheme_bits
from lowbit.vision.compensate import compensate
from lowbit.vision.finetune import FineTune, fine_tune
from lowbit.vision.kernels import KernelRow, current_machine, kernel_lines, kernel_rows
from lowbit.vision.lower import FLOAT, lower
from lowbit.vision.observe import Search, observe
from lowbit.vision.pixels import Pixels
from lowbit.vision.program import (
    Compute,
    ConcatCodes,
    Convolve,
    GateCodes,
    MapCodes,
    PoolAverage,
    PoolMax,
    Program,
    ResizeCodes,
    SumCodes,
)
from lowbit.vision.sensitivity import Assignment, choose_int8
from lowbit.vision.trace import FUSIONS, trace

if TYPE_CHECKING:
    from lowbit.vision.device import DeviceProgram

MOST_BATCH_SIZES = 4
"""Number of batch sizes whose memory and CUDA graph a network keeps on a GPU."""


@dataclass(frozen=True)
class LayerRow:
    """A row of the report: input and output storage, weight bits and multiply-adds per image."""

    name: str
    kind: str
    weight_bits: int
    storage: str
    products: int


class QuantizedNetwork(nn.Module):
    """An integer network. `network(images)` takes the model's float input [N, C, H, W], or uint8 pixels if it can normalize
    them, and returns the model's result in float32: a tensor, or tensors in tuples and dictionaries as the model returns them.

    Images on a GPU are computed by the kernels, with one CUDA graph per batch size. Images on a CPU, and `reference`, use the
    exact reference, which gives the same codes. `assignment`: the layers that were kept in int8 because of their measured
    sensitivity. Codes are not parameters, so the module has no state dict; `lowbit.vision.save` writes it.
    """

    def __init__(self, program: Program, scheme: str, assignment: Assignment | None = None) -> None:
        super().__init__()
        self.program, self.scheme, self.assignment = program, scheme, assignment
        self._launched: dict[tuple[torch.device, int], Any] = {}

    def forward(self, images: Tensor) -> Any:
        """Returns the result for images [N, C, H, W]. Raises ValueError for another image size than traced, and for a GPU
        that the kernels do not support (use `reference` there)."""
        if images.device.type != "cuda":
            return self.reference(images)
        return self.on_device(self._checked(images).shape[0], images.device).run(images)

    def reference(self, images: Tensor) -> Any:
        """Returns the result of `forward`, computed slowly by `kernels/reference/conv.py` on any device."""
        with torch.no_grad():
            return self.program.to(images.device).run(self._checked(images))

    def on_device(self, batch: int, device: torch.device) -> DeviceProgram:
        """Returns the program for one batch size on a GPU, compiled at the first call. The last MOST_BATCH_SIZES programs are
        cached."""
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
        """Moves the layers to the device for `to`, `cuda` and `cpu`; dtypes do not change."""
        self.program = self.program.to(fn(torch.zeros(())).device)
        return self

    @property
    def kept(self) -> dict[str, str]:
        """Operations that stayed in floating point, by name, with the reason; without operations that only rearrange
        elements."""
        return {
            op.node.name.removesuffix(FLOAT): op.node.reason
            for op in self.program.operations
            if isinstance(op, Compute) and op.node.reason
        }

    def rows(self) -> list[LayerRow]:
        """Returns the operations on codes, in order."""
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
            elif isinstance(op, (PoolMax, PoolAverage, SumCodes, MapCodes, GateCodes, ResizeCodes, ConcatCodes)):
                kinds = {PoolMax: "max pool", PoolAverage: "average pool", MapCodes: "activation", GateCodes: "gate",
                         ConcatCodes: "concat"}  # fmt: skip
                kind = kinds.get(type(op), "")
                if isinstance(op, SumCodes):
                    kind = " + ".join(["add"] * (op.other is not None) + ["relu"] * op.layer.relu)
                if isinstance(op, ResizeCodes):
                    kind = f"resize, {op.layer.mode}"
                read = " + ".join(
                    dict.fromkeys(values[name].storage for name in (op.parts if isinstance(op, ConcatCodes) else (op.x,)))
                )
                found.append(LayerRow(op.y.removesuffix(FLOAT), kind, 0, f"{read} -> {values[op.y].storage}", 0))
        return found

    def extra_repr(self) -> str:
        """Returns the report; torch prints it with the module."""
        return "\n".join(self.lines())

    def kernels(self, batch: int = 1, machine: Machine | None = None) -> list[KernelRow]:
        """Returns the launches for a batch size, in order, with the other candidates.

        `machine` is one of `lowbit.hardware.machine.MACHINES`; by default the current GPU, or the CPU.
        """
        return kernel_rows(self.program, batch, current_machine() if machine is None else machine)

    def lines(self, batch: int = 1, machine: Machine | None = None) -> list[str]:
        """Returns the report as lines: what is integer, what stayed in floating point and why, and the kernels with their
        reasons for a batch size. `machine` as in `kernels`."""
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
        return out + kernel_lines(self.program, batch, current_machine() if machine is None else machine)


def _kind(op: Convolve) -> str:
    layer = op.layer
    height, width = layer.kernel
    parts = [f"{height}x{width}" + (f"/{layer.stride[0]}" if max(layer.stride) > 1 else "")]
    if layer.groups > 1:
        parts[0] += " depthwise" if layer.weight.shape[:2] == (layer.groups, 1) else f" in {layer.groups} groups"
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
    compensation: bool = False,
    fine_tuning: FineTune | None = None,
    search: Search = "mse",
    fold_shortcuts: bool = True,
    pixels: Pixels | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> QuantizedNetwork:
    """Quantizes a CNN (Transformers, timm, torchvision or your own) that maps images [N, C, H, W] to tensors.

    calibration_data: a few hundred images in the model's input format: a tensor [N, C, H, W], or batches, each a tensor, a
        tuple that starts with one, or a mapping with "pixel_values".
    scheme: "w8a8", "w8a4", "w4a8" or "w4a4". Weights have a scale per output channel, activations one per tensor. Only
        outputs of ReLUs get 4 bits. The layers that read the images or produce the result keep 8-bit weights.
    keep_int8: layers that keep 8 bits.
    most_divergence: instead of `keep_int8`, keeps layers in 8 bits until the mean KL divergence of the softmax of the result is
        at most this many nats, see `choose_int8`; of several results and of maps, until their relative squared error is.
    compensation: rounds 4-bit weights by GPTQ and corrects the mean of each channel, see `compensate`; takes no training.
    fine_tuning: quantization-aware training on the calibration data, without labels.
    search: how activations are clipped, see `observe`.
    fold_shortcuts: computes shortcut convolutions inside the convolution whose result they are added to.
    pixels: normalization of 8-bit pixels; calibration data and the network's input may then be uint8.

    The model is not changed and may be on a GPU. Raises ValueError for an unsupported scheme, layer or data, and
    `UnsupportedNetwork` for an unsupported model.
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
        rounding = batches if compensation else ()
        assignment = choose_int8(graph, ranges, scheme, batches, most_divergence, search, say, rounding)
    bits = assign_bits(graph, scheme, tuple(keep_int8) if assignment is None else assignment.keep_int8)
    quantization = calibrate(graph, ranges, bits, search)
    exact = graph
    if compensation:
        graph, quantization = compensate(graph, quantization, batches)
    if fine_tuning is not None:
        graph, quantization = fine_tune(graph, quantization, batches, fine_tuning, say, exact)
    return QuantizedNetwork(replace(lower(graph, quantization), pixels=pixels), scheme, assignment)


def image_batches(
    data: Tensor | Iterable[Any], device: torch.device | str, pixels: Pixels | None = None, size: int = 64
) -> list[Tensor]:
    """Returns batches float32 [N, C, H, W] of calibration data in any form that `quantize` accepts.

    Raises ValueError if there are no images or an item is not an image batch.
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
