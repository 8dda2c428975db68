"""Kernel fusion: replaces operations of a program by operations that one kernel computes.

The codes stay the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from lowbit.hardware.machine import Machine
from lowbit.kernels.choose.conv import block_refusals, pair_refusals, whole_refusals
from lowbit.ops.conv import STEM_POOL, stem_pool_refusals
from lowbit.vision.memory import stems
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
)

KERNEL_FUSIONS = ("stem", "blocks", "pairs", "whole")
""""stem": a stem and its max-pool. "blocks": the second and third convolution of a 64-channel bottleneck and the first one
of the next. "pairs": the third convolution of a bottleneck and the first one of the next. "whole": as "blocks", with 128 or 256
channels; pairs are what is left."""

UNMEASURED_FUSIONS: tuple[str, ...] = ()
"""Fusions that are made only where they are asked for, until they are measured."""


def fused(
    program: Program, batch: int, machine: Machine | None, fusions: Collection[str] = KERNEL_FUSIONS
) -> Program:  # fmt: skip
    """Returns the program with the fusions that kernels of `machine` support (None: a CPU). Raises ValueError for a name
    that is not in `KERNEL_FUSIONS` or `UNMEASURED_FUSIONS`."""
    known = (*KERNEL_FUSIONS, *UNMEASURED_FUSIONS)
    unknown = sorted(set(fusions) - set(known))
    if unknown:
        raise ValueError(f"fusions of kernels are {', '.join(known)}, got {unknown[0]!r}")
    program = with_codes_of_means(program)
    if "stem" in fusions:
        program = with_pooled_stems(program, machine)
    if "blocks" in fusions:
        program = with_blocks(program, batch, machine, block_refusals)
    if "whole" in fusions:
        program = with_blocks(program, batch, machine, whole_refusals)
    return with_pairs(program, batch, machine) if "pairs" in fusions else program


def with_codes_of_means(program: Program) -> Program:
    """Merges average pools with the quantization of their means if nothing else reads the means."""
    operations: dict[str, Operation] = {operation.y: operation for operation in program.operations}
    for op in program.operations:
        pool = operations.get(op.x) if isinstance(op, Quantize) else None
        if not isinstance(op, Quantize) or not isinstance(pool, PoolAverage) or pool.y in program.results:
            continue
        if [name for other in program.operations for name in other.inputs].count(pool.y) == 1:
            operations[op.y] = AverageCodes(op.y, pool.x, pool.scale, op.factor)
            del operations[pool.y]
    return replace(program, operations=tuple(operations.values()))


def with_blocks(
    program: Program, batch: int, machine: Machine | None, refusals: Callable[..., tuple[str, ...]]
) -> Program:  # fmt: skip
    """Returns the program with three convolutions merged into a `FusedBottleneck` wherever a kernel supports them: where
    `refusals` of their specs, the size and the machine is empty.

    Only the third convolution may read the second's output. Other operations may read the third's output too.
    """
    operations = {operation.y: operation for operation in program.operations}
    for third in program.operations:
        second = operations.get(third.x) if isinstance(third, Convolve) and third.y in operations else None
        if not isinstance(third, Convolve) or not isinstance(second, Convolve) or second.pooled or second.y in program.results:
            continue
        reads = [name for op in program.operations for name in op.inputs].count(second.y)
        shape = program.values[second.x].shape
        if reads > 1 or (third.residual is None) == (third.second is None) or len(shape) != 3:
            continue
        size = (batch, shape[1], shape[2])
        for op in program.operations:
            if not isinstance(op, Convolve) or op.y not in operations or op.inputs != (third.y,):
                continue
            if not refusals(second.layer.spec, third.layer.spec, op.layer.spec, size, machine):
                operations[third.y] = FusedBottleneck(second, third, op)
                del operations[second.y], operations[op.y]
                break
    return replace(program, operations=tuple(operations.values()))


def with_pairs(program: Program, batch: int, machine: Machine | None) -> Program:
    """Returns the program with a convolution that adds something and one that reads its output merged into a `FusedPair`
    wherever a kernel supports them. Other operations may read the output of the first one too."""
    operations = {operation.y: operation for operation in program.operations}
    for third in program.operations:
        if not isinstance(third, Convolve) or (third.residual is None) == (third.second is None):
            continue
        shape = program.values[third.y].shape
        for op in program.operations:
            if not isinstance(op, Convolve) or op.y not in operations or op.inputs != (third.y,) or len(shape) != 3:
                continue
            if not pair_refusals(third.layer.spec, op.layer.spec, (batch, shape[1], shape[2]), machine):
                operations[third.y] = FusedPair(third, op)
                del operations[op.y]
                break
    return replace(program, operations=tuple(operations.values()))


def with_pooled_stems(program: Program, machine: Machine | None) -> Program:
    """Merges stems with their max-pool if it matches `STEM_POOL` and is the only reader, and if the kernels of `machine`
    support it."""
    packed = stems(program)
    operations = {operation.y: operation for operation in program.operations}
    for pool in program.operations:
        if not isinstance(pool, PoolMax) or (pool.kernel, pool.stride, pool.padding) != STEM_POOL:
            continue
        stem = operations.get(pool.x)
        readers = [op for op in program.operations if pool.x in op.inputs]
        if not isinstance(stem, Convolve) or stem.x not in packed or len(readers) > 1 or stem.y in program.results:
            continue
        if not stem_pool_refusals(stem.layer, machine):
            del operations[stem.y]
            operations[pool.y] = replace(stem, y=pool.y, pooled=True)
    return replace(program, operations=tuple(operations.values()))
