"""Stages of the product: the chosen kernels and tiles, the weight's place in them, and the operand of 8-bit kernels."""

from __future__ import annotations

from dataclasses import replace

import torch

from lowbit.explain.origin import FollowedWeight, PathStage, dtype_name
from lowbit.formats import ActivationRule, IntFormat, PerBlock, QuantTensor, code_values
from lowbit.hardware.byte_conversions import byte_conversion
from lowbit.hardware.machine import Machine, machine_of, typical_machine
from lowbit.kernels.choose.gemm import choose as choose_tile
from lowbit.kernels.choose.tiles import GemmShape, MmaTile, RingTile, WgmmaTile
from lowbit.ops import KERNELS, Problem, choose, problem_on
from lowbit.pack import scaled_refusals
from lowbit.pack.fragment import ROW_BLOCK, TILE_K

TOKENS = (1, 16, 64, 1024)
"""Numbers of rows of x for which the kernels are listed."""


def kernels_stage(weight: FollowedWeight, machine: Machine) -> PathStage:
    """Returns the stage with the kernel and tile for each M, the reasons, and the refusals of other kernels."""
    lines = []
    for m in TOKENS:
        problem = _problem(weight, m, machine)
        chosen = choose(problem)
        slow = ", which dequantizes all weights at every call" if chosen.is_slow else ""
        if chosen.is_slow and chosen.experts:
            one = choose(replace(problem, experts=0, top_k=1))
            slow = (
                f": each expert that is hit by {one.name} (lowbit/{one.file}), after the host has read how many rows each has"
            )
        lines.append(f"on {machine.product}, M {m}: {chosen.name} (lowbit/{chosen.file}), for {chosen.runs_on}{slow}")
        lines += [f"  {line}" for line in ([] if chosen.is_slow else chosen.tile(problem))]
        others = [(kernel, kernel.refusals(problem)) for kernel in KERNELS if kernel.concerns(problem) and kernel != chosen]
        lines += [f"  not {kernel.name}: {'; '.join(reasons)}" for kernel, reasons in others if reasons]
    return PathStage("lowbit/ops/table.py", "choose", tuple(lines))


def _problem(weight: FollowedWeight, m: int, machine: Machine) -> Problem:
    """Returns the layer's product with x [M, K] in bfloat16."""
    q = weight.q
    return Problem(
        q.scheme, m, *q.shape, torch.bfloat16, machine, scale_dtype=q.scale.dtype, experts=weight.experts, top_k=weight.top_k
    )


def machine_for(sm: int) -> Machine:
    """Returns this machine's GPU if it has this SM version, else the typical product of the version."""
    if torch.cuda.is_available():
        here = machine_of("cuda")
        if here.arch.sm == sm:
            return here
    return typical_machine(sm)


def in_kernels(weight: FollowedWeight, machine: Machine) -> list[PathStage]:
    """Returns one stage per kernel for 16-bit x: the block, warp and pipeline stage that multiply the weight."""
    steps: list[PathStage] = []
    for m in TOKENS:
        problem = _problem(weight, m, machine)
        kernel = choose(problem)
        if kernel.is_slow or kernel.experts or any(step.file == f"lowbit/{kernel.file}" for step in steps):
            continue
        tile = choose_tile(GemmShape(m, *weight.q.shape, weight.format.bits), machine)
        if isinstance(tile, RingTile):
            lines = _in_ring(weight, tile)
        else:
            lines = _in_mma(weight, tile) if isinstance(tile, MmaTile) else _in_wgmma(weight, tile)
        steps.append(PathStage(f"lowbit/{kernel.file}", f"{kernel.name}, M {m}", (str(tile), *lines)))
    return steps


def _in_ring(weight: FollowedWeight, tile: RingTile) -> tuple[str, ...]:
    row_block, step = weight.row // ROW_BLOCK, weight.column // (2 * TILE_K)
    block, inside = divmod(row_block, tile.tile_row_blocks)
    slices = tile.warps_k * tile.splits
    turn, part = divmod(step, slices)
    warp = inside // tile.row_blocks * tile.warps_k + part % tile.warps_k
    return (
        f"row block {row_block} of 16 rows is row block {inside % tile.row_blocks} of warp {warp} of block {block};",
        f"step {step} of 128 k is number {turn} of that warp: slice {part} of {slices} along K, split {part // tile.warps_k};",
        "cp.async copies its words into the warp's ring buffer (copy_block); they are read (read_block), dequantized and",
        "multiplied by mma.sync (multiply); partial sums of all K slices are reduced in a fixed order (reduce_slices,",
        "reduce_splits), then y is stored (apply_epilogue)",
    )


def _in_mma(weight: FollowedWeight, tile: MmaTile) -> tuple[str, ...]:
    row_blocks, row_block = -(-weight.q.shape[0] // ROW_BLOCK), weight.row // ROW_BLOCK
    row_tile = row_block // (tile.rows // ROW_BLOCK)
    inside = row_block - min(row_tile * (tile.rows // ROW_BLOCK), row_blocks - tile.rows // ROW_BLOCK)
    size, k_tile = TILE_K * tile.warps_k, weight.column // TILE_K
    stages, stage = -(-weight.q.shape[1] // size), weight.column // size
    split = next(i for i in range(tile.splits) if stages * (i + 1) // tile.splits > stage)
    own = f"slice {k_tile % tile.warps_k} of " if tile.warps_k > 1 else ""
    return (
        f"row tile {row_tile}, row block {inside} of {tile.rows // ROW_BLOCK}: row block {inside // tile.warps_n} of the warps "
        f"of row {inside % tile.warps_n}; K split {split};",
        f"k tile {k_tile} is {own}stage {stage}: cp.async copies its words (copy_vector), each of the {tile.warps_m} warps "
        "of the row reads them (read_weights),",
        "dequantizes them in registers (dequantize_row_block), forms operand A (operand_of) and multiplies it by",
        "mma.sync (multiply) while the next 16 k are dequantized; x is operand B, loaded by ldmatrix from shared memory",
    )


def _in_wgmma(weight: FollowedWeight, tile: WgmmaTile) -> tuple[str, ...]:
    row_tile, inside = divmod(weight.row, tile.rows)
    turns, turn = -(-weight.q.shape[1] // 128), weight.column // 128
    split = next((str(i) for i in range(tile.splits) if turns * (i + 1) // tile.splits > turn), "by equal shares of blocks")
    half = "even" if weight.column // TILE_K % 2 == 0 else "odd"
    return (
        f"row tile {row_tile}, row {inside} of {tile.rows}: warpgroup {inside // 64}, warp {inside // ROW_BLOCK}; "
        f"K split {split};",
        f"k tile {weight.column // TILE_K} is the {half} stage of k block {turn}: TMA loads its words (load_weights), the",
        "warp reads them (read_words), dequantizes them in registers (dequantize), forms operand A (operand_a) and starts",
        f"wgmma.mma_async m64n{tile.tokens}k16 on it (start); x is operand B, from shared memory;",
        "code shared with other kernels: lowbit/kernels/parts/operand.py and lowbit/kernels/parts/dequantize.py",
    )


def cpu_stage(q: QuantTensor) -> PathStage:
    """Returns the stage with the packed form on this machine's CPU, and the refusals of faster ones."""
    lines = []
    for dtype in (torch.bfloat16, torch.float32):
        problem = problem_on("cpu", q.scheme, 1, q.shape, dtype)
        chosen = choose(problem)
        slow = "dequantized at every call"
        if q.scheme.activation is None:
            slow = "dequantized once at the first call if the model fits (lowbit/nn/decoding.py), else at every call"
        how = slow if chosen.is_slow else f"{chosen.name} (lowbit/{chosen.file}), packed once at the first call"
        lines.append(f"a layer on this CPU, x {dtype_name(dtype)}: {how}")
        others = [
            kernel for kernel in KERNELS if chosen.is_slow and kernel.concerns(problem) and kernel.form in ("int4", "int8")
        ]
        lines += [f"  not {kernel.name}: {'; '.join(kernel.refusals(problem))}" for kernel in others]
    return PathStage("lowbit/ops/cpu_gemm.py", "cpu_gemm", tuple(lines))


def quantized_input_stages(weight: FollowedWeight, sm: int) -> list[PathStage]:
    """Returns the stages after the value of the code, for a scheme with quantized activations."""
    q = weight.q
    return [_input(q), _operand(weight), kernels_stage(weight, machine_for(sm)), cpu_stage(q)]


def _input(q: QuantTensor) -> PathStage:
    """Returns the stage that quantizes x."""
    fmt = q.scheme.activation
    assert fmt is not None
    rule = q.scheme.rule
    top = (fmt.max - fmt.min) / 2 if rule is ActivationRule.COMPRESSED_TENSORS else fmt.max
    static, shift = q.input_transform.activation_scale, q.input_transform.activation_zero
    if static is not None:
        how = f"by the scale {float(static):.9g} of this layer"
        how += "" if shift is None else f" and its zero {int(shift)}"
        how += " from calibration"
    elif isinstance(q.scheme.granularity, PerBlock):
        how = f"by a scale for each token and {q.scheme.granularity.k} columns, the largest |x| / {top:g}"
    elif q.scheme.activation_zero:
        how = f"by a scale and a zero for each token, its range over {fmt.min:g} to {fmt.max:g}"
    else:
        how = f"by a scale for each token, the largest |x| / {top:g}"
    tool = "" if rule is ActivationRule.OWN else f" as {rule.name.lower().replace('_', '-')} does it,"
    line = f"x is quantized to {fmt.name}{tool} {how} (rounding: lowbit/kernels/reference/activations.py)"
    return PathStage("lowbit/kernels/elementwise/quantize_rows.py", "quantize_rows", (line,))


def _operand(weight: FollowedWeight) -> PathStage:
    """Returns the stage with the 8-bit operand of the tensor core."""
    q, fmt = weight.q, weight.format
    reasons = scaled_refusals(q.scheme, q.scale.dtype)
    value = float(code_values(fmt)[weight.code])
    if reasons:
        lines: tuple[str, ...] = (f"the kernel for 8-bit activations {'; '.join(reasons)}",)
    elif fmt.bits == 8:
        byte = weight.code ^ 128 if isinstance(fmt, IntFormat) else weight.code
        lines = (f"codes of 8 bits are the operand, row by row: code {weight.code} is the byte {byte:#04x}, {value:g}",)
    else:
        c = byte_conversion(fmt, "s8" if isinstance(q.scheme.activation, IntFormat) else "e4m3")
        lines = (
            f"codes in fragment order (lowbit/pack/fragment.py), converted to {c.operand} in registers by",
            f"lowbit/hardware/byte_conversions.py, {c.integer_per_weight:g} integer instructions per weight:",
            f"code {weight.code} becomes {value / c.scale_factor:g},",
            f"times {c.scale_factor:g}, a factor of the packed scale: {value:g}",
        )
    return PathStage("lowbit/pack/scaled.py", "OperandWeight", lines)
