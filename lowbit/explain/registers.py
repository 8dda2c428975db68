"""Stages for 16-bit activations: the weight's register, its bits in the packed words, and the conversion between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from lowbit.explain.origin import FollowedWeight, PathStage
from lowbit.formats import NumberFormat, ZeroPoint
from lowbit.hardware.conversions import Conversion, conversion
from lowbit.hardware.half import HalfType
from lowbit.hardware.mma import MmaAtom
from lowbit.pack import FragmentOrder
from lowbit.pack.fragment import ROW_BLOCK, TILE_K, word_places


@dataclass(frozen=True)
class FragmentPlace:
    """The position of an element of a 64 x 64 tile: thread, register (counted over the k steps), half of the register."""

    thread: int
    register: int
    element: int

    @property
    def half(self) -> str:
        return "upper half" if self.element else "lower half"


def register_stages(weight: FollowedWeight, atom: MmaAtom, sm: int) -> list[PathStage]:
    """Returns the stages for the operand register, the packed words with the code, and the conversion."""
    layout = FragmentOrder(atom, weight.format)
    rows, ks = layout.tile.coordinates()
    here = np.argwhere((rows == weight.row % ROW_BLOCK) & (ks == weight.column % TILE_K))[0]
    place = FragmentPlace(*(int(number) for number in here))
    c = conversion(weight.format, _half_type(weight.format))
    words, packing = _packing(weight, layout, c, place)
    return [_fragment(weight, atom, sm, place), packing, _conversion(weight, c, place, words)]


def _half_type(fmt: NumberFormat) -> HalfType:
    """Returns fp16, or bf16 for formats whose exponent range fp16 lacks."""
    try:
        conversion(fmt, "fp16")
    except ValueError:
        return "bf16"
    return "fp16"


def _fragment(weight: FollowedWeight, atom: MmaAtom, sm: int, place: FragmentPlace) -> PathStage:
    step, register = divmod(place.register, atom.a.registers)
    tile, inside = (weight.row // ROW_BLOCK, weight.column // TILE_K), (weight.row % ROW_BLOCK, weight.column % TILE_K)
    owner = "one warp of the warpgroup" if atom.threads > 32 else "one warp"
    return PathStage(
        "lowbit/hardware/mma.py",
        atom.name,
        (
            f"sm {sm}, {atom.section}",
            f"{atom.instruction}: weights are operand A, {atom.m} rows of k {atom.k} in {atom.threads} threads' registers",
            f"tile {list(tile)} of {ROW_BLOCK} x {TILE_K} ({owner}): its row {inside[0]}, k {inside[1]} is in",
            f"lane {place.thread}, k step {step}, register a{register}, {place.half}",
        ),
    )


def _packing(
    weight: FollowedWeight, layout: FragmentOrder, c: Conversion, place: FragmentPlace
) -> tuple[list[np.uint32], PathStage]:
    """Packs the tile of this weight; returns the words that its conversion reads, and the stage with the code's bits."""
    row_block, k_tile, bits = weight.row // ROW_BLOCK, weight.column // TILE_K, weight.format.bits
    (plane,) = layout.pack(weight.q.codes[row_block * ROW_BLOCK :, k_tile * TILE_K :][:ROW_BLOCK, :TILE_K], bits)
    (shape,) = layout.plane_shapes(bits, weight.q.shape)
    places = word_places(bits)[place.thread]
    own = plane[0, 0][places].numpy().view(np.uint32)
    run, register = divmod(place.register, c.registers)
    first = run * c.fields.words
    words = list(own[first : first + c.fields.words])
    lines = [f"{plane.nbytes:,} bytes for this tile, each lane's codes side by side", f"int32 {list(shape)}:"]
    where: dict[int, list[tuple[int, int]]] = {}
    for bit, (word, at) in enumerate(c.fields.places[register]):
        where.setdefault(first + word, []).append((bit, at + place.element * c.fields.window))
    for number, bits_there in where.items():
        parts = ", ".join(f"bit {bit} at {at}: {int(own[number]) >> at & 1}" for bit, at in reversed(bits_there))
        lines.append(f"word [{row_block}, {k_tile}, {int(places[number])}] = {own[number]:08x}, of the code {parts}")
    lines.append("(kernels that read the file's dense rows skip this step and the next: lowbit/ops/table.py lists them)")
    return words, PathStage("lowbit/pack/fragment.py", str(layout), tuple(lines))


def _conversion(weight: FollowedWeight, c: Conversion, place: FragmentPlace, words: list[np.uint32]) -> PathStage:
    """Executes the conversion of the packed words and applies scale and zero to the result."""
    values, register = c.program.registers(words), place.register % c.registers
    lines = [
        f"{c.name}: {c.integer_per_weight:g} integer and {c.half_per_weight:g} half instructions per weight; executed,",
        *(f"{name} = {int(values[name]):08x}" for name in c.program.inputs),
        *(f"{step.ptx():52} // {int(values[step.dest]):08x}" for step in c.program.instructions),
    ]
    half = float(c.run(words)[register, place.element])
    lines.append(f"output {register} = {c.program.outputs[register]}, {place.half}: {half:.9g}")
    value = half * c.scale_factor
    if c.scale_factor != 1:
        lines.append(f"times {c.scale_factor:g}, a factor of the packed scale: {value:.9g}")
    scaled = "with its scale" if weight.q.zero is None else "with its scale and zero"
    lines.append(f"{scaled} the weight is {_scaled(weight, value):.9g}")
    return PathStage("lowbit/hardware/conversions.py", f"conversion({c.format.name}, {c.dtype})", tuple(lines))


def _scaled(weight: FollowedWeight, value: float) -> float:
    """Returns the converted `value` with scale and zero applied in float32."""
    q, at = weight.q, weight.scale_at
    v, scale = torch.tensor(value, dtype=torch.float32), q.scale[at].float()
    if q.zero is None:
        return float(v * scale)
    zero = q.zero[at].float()
    return float((v - zero) * scale if q.scheme.zero is ZeroPoint.INTEGER else v * scale + zero)
