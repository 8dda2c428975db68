"""The kernels that run a program and the reasons for their choice, for this GPU or another one.

`DeviceProgram` launches by the same rules. Nothing is packed or compiled here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lowbit.hardware.machine import Machine, machine_of, machine_refusals
from lowbit.kernels.choose.conv import ConvCandidate, block_tile, conv_candidates, pair_layout, pair_tile
from lowbit.pack.conv_block import CHANNELS
from lowbit.pack.stem import StemImages
from lowbit.vision.fusion import fused
from lowbit.vision.lower import FLOAT
from lowbit.vision.memory import half_values, stems
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

SHOWN_NAMES = 3
"""Number of layer names that a line lists; of the others it gives the number."""


@dataclass(frozen=True)
class KernelRow:
    """One launch: its layers, the kernel file below lowbit/kernels/, its tile, the reason for the choice and the cost (in the
    unit of kernels/choose/conv.py). `others` are the other candidates with their costs or reasons."""

    name: str
    kernel: str
    tile: str
    why: str
    turns: float = 0.0
    others: tuple[str, ...] = ()


def current_machine(device: torch.device | None = None) -> Machine | None:
    """Returns the machine of `device` or of the current GPU; None for a CPU and for GPUs that the kernels do not support."""
    if device is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    if device is None or device.type != "cuda" or machine_refusals(device):
        return None
    return machine_of(device)


def kernel_rows(program: Program, batch: int, machine: Machine | None) -> list[KernelRow]:
    """Returns the launches of a program for a batch size, in order; for a CPU (`machine` None), one row per operation."""
    launched = fused(program, batch, machine) if machine is not None else program
    packed, halves = stems(launched), half_values(launched)
    rows = []
    for op in launched.operations:
        if isinstance(op, Convolve):
            choices = convolution_candidates(op, launched, batch, machine, packed.get(op.x), op.y in halves)
            rows.append(_row(op.layer.name or op.y, choices))
        else:
            rows.append(_other(op, launched, machine))
    return rows


def convolution_candidates(
    op: Convolve, program: Program, batch: int, machine: Machine | None, images: StemImages | None, for_torch: bool = False
) -> list[ConvCandidate]:
    """Returns the candidates for a convolution of the program. `for_torch`: its output is stored in fp16, as only
    torch operations read it."""
    _, height, width = program.values[op.x].shape
    spec = replace(op.layer.spec, y="f16") if for_torch else op.layer.spec
    return conv_candidates(spec, (batch, height, width), machine, images, op.pooled)


def kernel_lines(program: Program, batch: int, machine: Machine | None) -> list[str]:
    """Returns the kernels of a program as text, one line per kernel and reason."""
    where = "on the CPU" if machine is None else f"on {machine.product}, batch {batch}"
    found: dict[tuple[str, str], list[str]] = {}
    for row in kernel_rows(program, batch, machine):
        found.setdefault((f"{row.kernel} {row.tile}".strip(), row.why), []).append(row.name)
    lines = []
    for (kernel, why), names in found.items():
        rest = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
        lines.append(f"{where}: {kernel}: {why} ({', '.join(names[:SHOWN_NAMES])}{rest})")
    return lines


def _row(name: str, choices: list[ConvCandidate]) -> KernelRow:
    best = choices[0]
    if best.reasons:
        return KernelRow(name, "no kernel", "", str(best), 0.0, tuple(map(str, choices[1:])))
    tile = "" if best.tile is None else str(best.tile)
    return KernelRow(name, best.kernel, tile, best.why, best.turns, tuple(map(str, choices[1:])))


def _other(op: Operation, program: Program, machine: Machine | None) -> KernelRow:
    """Returns the row of an operation that is not a single convolution."""
    name = op.y.removesuffix(FLOAT)
    match op:
        case FusedBottleneck():
            layers = (op.second.layer, op.third.layer, op.following.layer)
            _, _, width = program.values[op.second.x].shape
            names = " + ".join(layer.name or layer.y for layer in layers)
            if layers[0].channels != CHANNELS:
                line = pair_tile(pair_layout(layers[1].spec, layers[2].spec, True), width).line
                return KernelRow(names, "sm90/conv_pair", line, "three layers, a thread reads again what it has written")
            tile = block_tile(layers[1].x, width, layers[2].spec.outputs, layers[1].second is not None)
            return KernelRow(names, "sm90/conv_block", tile.line, "three layers, codes stay in registers between them")
        case FusedPair():
            third, last = op.third.layer, op.following.layer
            names = " + ".join(layer.name or layer.y for layer in (third, last))
            line = pair_tile(pair_layout(third.spec, last.spec)).line
            return KernelRow(names, "sm90/conv_pair", line, "two layers, a thread reads again what it has written")
        case Compute():
            return KernelRow(name, "torch", "", op.node.reason or "it only rearranges")
    if machine is None:
        return KernelRow(name, "reference/conv", "", "no GPU: computed in plain torch, exact and slow")
    match op:
        case Quantize() | Dequantize():
            return KernelRow(name, "elementwise/relayout", "", "between values as torch has them and packed codes")
        case MapCodes() | GateCodes():
            return KernelRow(name, "elementwise/code_table", "", "no convolution has it inside")
        case ResizeCodes() | ConcatCodes():
            kernel = "resize" if isinstance(op, ResizeCodes) else "concat"
            return KernelRow(name, f"elementwise/{kernel}", "", "no convolution has it inside")
        case SumCodes():
            return KernelRow(name, "elementwise/add", "", "no convolution has it inside")
    assert isinstance(op, (PoolMax, PoolAverage, AverageCodes))
    return KernelRow(name, "elementwise/pool", "", "no convolution has it inside")
