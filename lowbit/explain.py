"""Follows one real weight through the library, file by file: from its bits on disk to the tensor core's register."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lowbit.checkpoint import CheckpointError, CheckpointReader, LayerEntry
from lowbit.formats import IntFormat, QuantTensor, ZeroPoint, code_values, pack_words
from lowbit.hardware.conversions import Conversion, conversion
from lowbit.hardware.mma import wgmma_f16
from lowbit.ops import Problem, candidates
from lowbit.pack import FragmentOrder
from lowbit.pack.fragment import TILE

ATOM = wgmma_f16(64)


@dataclass(frozen=True)
class Step:
    """One stage of the path: the source file, what in it does the work, and what happens to this weight there."""

    file: str
    what: str
    lines: tuple[str, ...]


def explain(checkpoint: str | Path, layer: str | None = None, row: int = 0, column: int = 0) -> list[Step]:
    """The path of weight [row, column] of a layer of a quantized checkpoint; `layer` None takes the first.

    Raises CheckpointError for a checkpoint that is not lowbit's, ValueError for a layer or an index it does not have.
    """
    with CheckpointReader(checkpoint) as reader:
        if reader.manifest is None or not reader.manifest.layers:
            raise CheckpointError(f"{checkpoint}: holds no weights quantized by lowbit; make some with `lowbit quantize`")
        name = _find(layer, list(reader.manifest.layers))
        entry = reader.manifest.layers[name]
        n, k = entry.shape
        if not (0 <= row < n and 0 <= column < k):
            raise ValueError(f"{name} is {n} x {k}: row {row}, column {column} is outside")
        q = reader.layer(name)
        return [
            _on_disk(reader, name, entry, row, column),
            _meaning(q, row, column),
            _place(row, column),
            *_registers(q, row, column),
            _kernels(entry),
        ]


def render(steps: list[Step]) -> str:
    """The steps as text."""
    blocks = []
    for number, step in enumerate(steps, 1):
        blocks.append("\n".join([f"{number}. {step.file}  {step.what}", *(f"     {line}" for line in step.lines)]))
    return "\n\n".join(blocks)


def _find(layer: str | None, names: list[str]) -> str:
    if layer is None:
        return names[0]
    if layer not in names:
        ending = [name for name in names if name.endswith(f".{layer}")]
        near = ending[:3] or difflib.get_close_matches(layer, names, n=3, cutoff=0.3)
        raise ValueError(f"no quantized layer {layer!r}; near: {', '.join(near) or names[0]}; `lowbit inspect` lists all")
    return layer


def _on_disk(reader: CheckpointReader, name: str, entry: LayerEntry, row: int, column: int) -> Step:
    info, bits = reader.info(f"{name}.weight_packed"), entry.scheme.weight.bits
    first, shift = divmod(column * bits, 8)
    begin = info.begin + row * info.shape[1] + first
    count = 1 + (shift + bits > 8)
    with info.file.open("rb") as file:
        file.seek(begin)
        data = file.read(count)
    code = int.from_bytes(data, "little") >> shift & ((1 << bits) - 1)
    scale = reader.info(f"{name}.weight_scale")
    return Step(
        "lowbit/checkpoint/reader.py",
        "CheckpointReader",
        (
            f"{info.file}: {name}.weight_packed uint8 {list(info.shape)}, bytes {info.begin:,} to {info.end:,}",
            f"weight [{row}, {column}] is code {column} of row {row}: bits {shift} to {shift + bits - 1} from byte {begin:,},",
            f"where the file has {data.hex(' ')} = {' '.join(f'{b:08b}' for b in data)}: code {code} = 0b{code:0{bits}b}",
            f"{name}.weight_scale {str(scale.dtype).removeprefix('torch.')} {list(scale.shape)}",
        ),
    )


def _meaning(q: QuantTensor, row: int, column: int) -> Step:
    fmt, code = q.scheme.weight, int(q.codes[row, column])
    value = float(code_values(fmt)[code])
    n, k = q.scheme.granularity.block(q.shape)
    at = (row // n, column // k)
    scale = float(q.scale[at])
    lines = [f"scheme {q.scheme}: {fmt.name}, one scale for {n} x {k} weights"]
    if isinstance(fmt, IntFormat):
        lines.append(f"code {code} - offset {fmt.offset} = {value:.9g}")
    else:
        bits = f"{code:0{fmt.bits}b}"
        exponent, mantissa = bits[1 : 1 + fmt.exponent], bits[1 + fmt.exponent :] or "none"
        parts = f"sign {bits[0]}, exponent {exponent} (bias {fmt.bias}), mantissa {mantissa}"
        lines.append(f"code {bits}: {parts} = {value:.9g}")
    if q.zero is None:
        lines.append(
            f"scale [{at[0]}, {at[1]}] = {scale:.8g}: weight = {value:g} x {scale:.8g} = {_weight(q, row, column):.8g}"
        )
    elif q.scheme.zero is ZeroPoint.INTEGER:
        zero = int(q.zero[at])
        lines.append(
            f"zero {zero}, scale {scale:.8g}: weight = ({value:g} - {zero}) x {scale:.8g} = {_weight(q, row, column):.8g}"
        )
    else:
        zero_value = float(q.zero[at])
        product = f"{value:g} x {scale:.8g} + {zero_value:.8g}"
        lines.append(f"scale {scale:.8g}, zero {zero_value:.8g}: weight = {product} = {_weight(q, row, column):.8g}")
    return Step("lowbit/formats/tensor.py", "QuantTensor.dequantize", tuple(lines))


def _weight(q: QuantTensor, row: int, column: int) -> float:
    return float(q.dequantize()[row, column])


def _locate(row: int, column: int) -> tuple[int, int, int]:
    """(thread, register, element) that holds an element of a 64 x 64 tile in fragment order."""
    rows, ks = FragmentOrder(ATOM).tile.coordinates()
    thread, register, element = np.argwhere((rows == row % TILE) & (ks == column % TILE))[0]
    return int(thread), int(register), int(element)


def _place(row: int, column: int) -> Step:
    thread, register, element = _locate(row, column)
    step, within = divmod(register, ATOM.a.registers)
    return Step(
        "lowbit/hardware/mma.py",
        str(ATOM.name),
        (
            f"{ATOM.instruction}: weights are operand A, 64 rows of k {ATOM.k} in the registers of 128 threads",
            f"tile ({row // TILE}, {column // TILE}) of {TILE} x {TILE}: row {row % TILE}, k {column % TILE} of it belongs to",
            f"thread {thread} (warp {thread // 32}, lane {thread % 32}), k step {step}, register a{within}, "
            f"{'upper' if element else 'lower'} half",
        ),
    )


def _registers(q: QuantTensor, row: int, column: int) -> list[Step]:
    """Packing of this weight's tile, and the conversion of the words that hold it."""
    fmt = q.scheme.weight
    thread, register, element = _locate(row, column)
    tile = q.codes[row // TILE * TILE :, column // TILE * TILE :][:TILE, :TILE]
    planes = FragmentOrder(ATOM).pack(tile, fmt.bits)
    dtype = "fp16" if not _needs_bf16(q) else "bf16"
    c = conversion(fmt, dtype)  # type: ignore[arg-type]
    run, within = divmod(register, c.registers)
    words, notes = [], []
    for plane, width, count in zip(planes, c.planes, c.words, strict=True):
        mine = plane[0, 0, :, thread].reshape(-1).numpy().view(np.uint32)  # the thread's words, vector by vector
        used = mine[run * count : (run + 1) * count]
        words += [np.uint32(word) for word in used]
        notes.append(
            f"plane of {width} bits int32 {list(plane.shape)}: thread {thread} holds {len(mine)} words, here "
            + " ".join(f"{word:08x}" for word in used)
        )
    half = float(c.run(words)[within, element])
    pack_step = Step(
        "lowbit/pack/fragment.py",
        "FragmentOrder",
        (f"{len(pack_words(tile, fmt.bits).reshape(-1)):,} bytes of this tile, each thread's codes side by side:", *notes),
    )
    return [pack_step, _conversion_step(c, within, element, half, q, row, column)]


def _needs_bf16(q: QuantTensor) -> bool:
    try:
        conversion(q.scheme.weight, "fp16")
    except ValueError:
        return True
    return False


def _conversion_step(c: Conversion, register: int, element: int, half: float, q: QuantTensor, row: int, column: int) -> Step:
    lines = [
        f"{c.name}: {c.integer_per_weight:g} integer and {c.half_per_weight:g} half instructions per weight",
        *c.program.ptx().splitlines(),
        f"register {register} = {c.program.outputs[register]}, {'upper' if element else 'lower'} half: {half:.9g}",
    ]
    value = half * c.scale_factor
    if c.scale_factor != 1:
        lines.append(f"times {c.scale_factor:g}, which the scale takes over: {value:.9g}")
    lines.append(f"with its scale{' and zero' if q.zero is not None else ''} the weight is {_weight(q, row, column):.8g}")
    return Step("lowbit/hardware/conversions.py", f"conversion({c.format.name}, {c.dtype})", tuple(lines))


def _kernels(entry: LayerEntry) -> Step:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.float32
    lines = []
    for m in (1, 64):
        problem = Problem(entry.scheme, m, *entry.shape, dtype, device)
        lines.append(str(problem))
        chosen = False
        for backend, reasons in candidates(problem):
            verdict = "; ".join(reasons) if reasons else ("could run too" if chosen else f"runs ({backend.where})")
            chosen = chosen or not reasons
            lines.append(f"  {backend.name}: {verdict}")
    return Step("lowbit/ops/dispatch.py", "choose_backend", tuple(lines))
