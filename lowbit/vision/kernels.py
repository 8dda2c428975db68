"""Which kernels run a program, and why: of the GPU in hand, or of one that is not there.

The rows are those by which `DeviceProgram` launches; nothing is packed or compiled for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lowbit.hardware.machine import Machine, machine_of, machine_refusals
from lowbit.kernels.choose.conv import Candidate, block_tile, conv_candidates
from lowbit.pack.stem import StemImages
from lowbit.vision.fusion import fused
from lowbit.vision.lower import FLOAT
from lowbit.vision.memory import of_torch, stems
from lowbit.vision.program import (
    AverageCodes,
    Compute,
    Convolve,
    Dequantize,
    FusedBottleneck,
    Operation,
    PoolAverage,
    PoolMax,
    Program,
    Quantize,
    SumCodes,
)

SHOWN_NAMES = 3
"""Layers that a line names; it counts the others."""


@dataclass(frozen=True)
class KernelRow:
    """One launch: the layers in it, the kernel's file below lowbit/kernels/ and its tile, why it was chosen and its cost in
    turns (kernels/choose/conv.py); every other candidate, with what it would cost or why it cannot."""

    name: str
    kernel: str
    tile: str
    why: str
    turns: float = 0.0
    others: tuple[str, ...] = ()


def machine_here(device: torch.device | None = None) -> Machine | None:
    """The GPU `device`, or the current one; None for a CPU, and where there is no GPU that kernels are for."""
    if device is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    if device is None or device.type != "cuda" or machine_refusals(device):
        return None
    return machine_of(device)


def kernel_rows(program: Program, batch: int, machine: Machine | None) -> list[KernelRow]:
    """The launches of a program for a batch of this size, in order; on a CPU, where `machine` is None, those of its parts."""
    launched = fused(program, batch, machine) if machine is not None else program
    packed, elsewhere = stems(launched), of_torch(launched)
    rows = []
    for op in launched.operations:
        if isinstance(op, Convolve):
            choices = convolution_candidates(op, launched, batch, machine, packed.get(op.x), op.y in elsewhere)
            rows.append(_row(op.layer.name or op.y, choices))
        else:
            rows.append(_other(op, launched, machine))
    return rows


def convolution_candidates(
    op: Convolve, program: Program, batch: int, machine: Machine | None, images: StemImages | None, of_torch: bool = False
) -> list[Candidate]:
    """What was considered for a convolution of the program; `of_torch` says whether only torch reads what it makes."""
    _, height, width = program.values[op.x].shape
    spec = replace(op.layer.spec, y="f16") if of_torch else op.layer.spec
    return conv_candidates(spec, (batch, height, width), machine, images, op.pooled)


def kernel_lines(program: Program, batch: int, machine: Machine | None) -> list[str]:
    """The kernels of a program, those of one reason together, a line each."""
    where = "on the CPU" if machine is None else f"on {machine.product}, batch {batch}"
    found: dict[tuple[str, str], list[str]] = {}
    for row in kernel_rows(program, batch, machine):
        found.setdefault((f"{row.kernel} {row.tile}".strip(), row.why), []).append(row.name)
    lines = []
    for (kernel, why), names in found.items():
        rest = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
        lines.append(f"{where}: {kernel}: {why} ({', '.join(names[:SHOWN_NAMES])}{rest})")
    return lines


def _row(name: str, choices: list[Candidate]) -> KernelRow:
    best = choices[0]
    if best.reasons:
        return KernelRow(name, "no kernel", "", str(best), 0.0, tuple(map(str, choices[1:])))
    tile = "" if best.tile is None else str(best.tile)
    return KernelRow(name, best.kernel, tile, best.why, best.turns, tuple(map(str, choices[1:])))


def _other(op: Operation, program: Program, machine: Machine | None) -> KernelRow:
    """An operation that is no convolution of its own."""
    name = op.y.removesuffix(FLOAT)
    match op:
        case FusedBottleneck():
            layers = (op.second.layer, op.third.layer, op.following.layer)
            _, _, width = program.values[op.second.x].shape
            tile = block_tile(layers[1].x, width, layers[2].spec.outputs, layers[1].second is not None)
            names = " + ".join(layer.name or layer.y for layer in layers)
            return KernelRow(names, "sm90/conv_block", tile.line, "three layers, codes stay in registers between them")
        case Compute():
            return KernelRow(name, "torch", "", op.node.reason or "it only rearranges")
    if machine is None:
        return KernelRow(name, "reference/conv", "", "no GPU: computed in plain torch, exact and slow")
    match op:
        case Quantize() | Dequantize():
            return KernelRow(name, "elementwise/relayout", "", "between values as torch has them and packed codes")
        case SumCodes():
            return KernelRow(name, "elementwise/add", "", "no convolution has it inside")
    assert isinstance(op, (PoolMax, PoolAverage, AverageCodes))
    return KernelRow(name, "elementwise/pool", "", "no convolution has it inside")
