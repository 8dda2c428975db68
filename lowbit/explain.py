"""Follows one real weight through the library, file by file: from its bits on disk to the tensor core's register."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lowbit.checkpoint import CheckpointError, CheckpointReader, TensorInfo, expected_tensors
from lowbit.formats import ActivationRule, IntFormat, NumberFormat, PerBlock, QuantTensor, ZeroPoint, code_values, pack_words
from lowbit.hardware.byte_conversions import byte_conversion
from lowbit.hardware.conversions import Conversion, conversion
from lowbit.hardware.half import HalfType
from lowbit.hardware.machine import Machine, machine_of, typical_machine
from lowbit.hardware.mma import MMA_M16N8K16_F16, MmaAtom, wgmma_f16
from lowbit.kernels.choose.gemm import choose as choose_tile
from lowbit.kernels.choose.tiles import GemmShape, MmaTile, RingTile, WgmmaTile
from lowbit.models.complete import require_complete
from lowbit.models.hf import plan_for
from lowbit.models.names import TensorNames
from lowbit.models.skeleton import skeleton
from lowbit.models.source import resolve
from lowbit.ops import KERNELS, Problem, choose, problem_on
from lowbit.pack import FragmentOrder, scaled_refusals
from lowbit.pack.fragment import ROW_BLOCK, TILE_K, word_places
from lowbit.quantize import rtn


@dataclass(frozen=True)
class Step:
    """One stage of the path: the source file, what in it does the work, and what happens to this weight there."""

    file: str
    what: str
    lines: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Weight:
    """The weight that is followed: element [row, column] of the quantized matrix `q`, as its codes lie."""

    q: QuantTensor
    row: int
    column: int

    @property
    def format(self) -> NumberFormat:
        return self.q.scheme.weight

    @property
    def code(self) -> int:
        return int(self.q.codes[self.row, self.column])

    @property
    def scale_at(self) -> tuple[int, int]:
        """Where its scale (and zero) stands."""
        n, k = self.q.scheme.granularity.block(self.q.shape)
        return self.row // n, self.column // k

    @property
    def dequantized(self) -> float:
        return float(self.q.dequantize_codes()[self.row, self.column])


@dataclass(frozen=True)
class _Place:
    """Where an element of a 64 x 64 tile is: thread, register (counted through the k steps of the tile), half."""

    thread: int
    register: int
    element: int

    @property
    def half(self) -> str:
        return "upper half" if self.element else "lower half"


def explain(
    checkpoint: str | Path,
    layer: str | None = None,
    row: int = 0,
    column: int = 0,
    *,
    scheme: str | None = None,
    sm: int = 90,
) -> list[Step]:
    """The path of weight [row, column] of a layer of a quantized checkpoint, to the tensor cores of SM version `sm`.

    `column` counts as the codes lie; with an order, it meets another channel of x. `layer` None takes the first. With a
    `scheme`, the checkpoint is a 16-bit one, and the path goes through round-to-nearest. Raises CheckpointError for a
    checkpoint that is not of the kind asked for, ValueError for a layer or an index it does not have, a scheme or an SM
    version that is not known.
    """
    atom = (
        wgmma_f16(64) if "wgmma" in typical_machine(sm).arch.features else MMA_M16N8K16_F16
    )  # also says whether `sm` is known
    with resolve(checkpoint).reader() as reader:
        if scheme is None:
            weight, origin = _quantized(reader, layer, row, column)
        else:
            weight, origin = _sixteen_bit(reader, layer, row, column, scheme)
    if weight.q.scheme.activation is not None:
        return [*origin, _meaning(weight), *_with_quantized_input(weight, sm)]
    return [
        *origin,
        _meaning(weight),
        *_registers(weight, atom, sm),
        _kernels(weight.q, _machine(sm)),
        *_in_the_kernels(weight, _machine(sm)),
        _on_cpu(weight.q),
    ]


def render(steps: list[Step]) -> str:
    """The steps as text."""
    blocks = []
    for number, step in enumerate(steps, 1):
        blocks.append("\n".join([f"{number}. {step.file}  {step.what}", *(f"     {line}" for line in step.lines)]))
    return "\n\n".join(blocks)


def _quantized(reader: CheckpointReader, layer: str | None, row: int, column: int) -> tuple[_Weight, list[Step]]:
    """The weight of a lowbit checkpoint, and its place on disk."""
    if reader.manifest is None or not reader.manifest.layers:
        raise CheckpointError(f"{reader.folder}: holds no weights quantized by lowbit; make some with `lowbit quantize`")
    owner = reader.manifest.tied.get(layer or "", layer)
    name = _find(owner, list(reader.manifest.layers), "quantized layer")
    entry = reader.manifest.layers[name]
    _check_index(name, entry.shape, row, column)
    weight = _Weight(reader.layer(name), row, column)
    info, bits = reader.info(f"{name}.weight_packed"), entry.scheme.weight.bits
    first, shift = divmod(column * bits, 8)
    begin = info.begin + row * info.shape[1] + first
    data = _bytes(info, begin, 1 + (shift + bits > 8))
    code = int.from_bytes(data, "little") >> shift & ((1 << bits) - 1)
    lines = [
        _tensor_line(f"{name}.weight_packed", info),
        f"weight [{row}, {column}] is code {column} of row {row}: bits {shift} to {shift + bits - 1} from byte {begin:,},",
        f"where the file has {data.hex(' ')} = {' '.join(f'{b:08b}' for b in data)}: code {code} = 0b{code:0{bits}b}",
    ]
    beside = [tensor for tensor in expected_tensors(name, entry) if tensor != f"{name}.weight_packed"]
    lines += [_tensor_line(tensor, reader.info(tensor)) for tensor in beside]
    return weight, [Step("lowbit/checkpoint/reader.py", "CheckpointReader", tuple(lines))]


def _sixteen_bit(reader: CheckpointReader, layer: str | None, row: int, column: int, scheme: str) -> tuple[_Weight, list[Step]]:
    """The weight of a plain checkpoint: its place on disk, and the code that round-to-nearest chooses."""
    if "quantization_config" in reader.config:
        raise CheckpointError(f"{reader.folder}: is quantized already; leave out the scheme {scheme!r}")
    model = skeleton(reader.folder)
    names = TensorNames(model)
    require_complete(reader.folder, model, {tensor: reader.info(tensor).shape for tensor in reader.names()}, names)
    plan = names.followed(plan_for(model, scheme, None, False), reader.names())
    stored = {module: tensor for tensor, module in names.modules(plan, reader.names()).items()}
    layers = list(plan.linears)
    if not layers:
        reasons = "; ".join(dict.fromkeys(kept.reason for kept in plan.kept)) or "it has no linear layers"
        raise ValueError(f"{reader.folder}: nothing to quantize to {plan.scheme}: {reasons}")
    name = _find(layer, layers, "linear layer")
    _check_index(name, plan.linears[name], row, column)
    info = reader.info(stored[name])
    original = reader.get(stored[name])
    weight = _Weight(rtn(original, plan.scheme), row, column)
    begin = info.begin + (row * info.shape[1] + column) * info.dtype.itemsize
    disk = Step(
        "lowbit/checkpoint/reader.py",
        "CheckpointReader",
        (
            _tensor_line(stored[name], info),
            f"weight [{row}, {column}] is the {info.dtype.itemsize} bytes from byte {begin:,},",
            f"where the file has {_bytes(info, begin, info.dtype.itemsize).hex(' ')}: {float(original[row, column]):.9g}",
        ),
    )
    return weight, [disk, *_choice(weight, float(original[row, column]))]


def _choice(weight: _Weight, original: float) -> list[Step]:
    """How round-to-nearest came to the code, and the bytes that `lowbit quantize` writes for it."""
    q, fmt = weight.q, weight.format
    (n, k), scale = q.scheme.granularity.block(q.shape), float(q.scale[weight.scale_at])
    lines = [f"{n} x {k} weights share one scale; it is rounded to {_dtype(q.scale.dtype)} first: {scale:.9g}"]
    if q.zero is None:
        wanted = original / scale
        lines.append(f"weight / scale = {wanted:.9g}")
    elif q.scheme.zero is ZeroPoint.INTEGER:
        wanted = original / scale + float(q.zero[weight.scale_at])
        lines.append(f"weight / scale + zero {int(q.zero[weight.scale_at])} = {wanted:.9g}")
    else:
        wanted = (original - float(q.zero[weight.scale_at])) / scale
        lines.append(f"(weight - zero {float(q.zero[weight.scale_at]):.9g}) / scale = {wanted:.9g}")
    lines.append(f"the nearest value of {fmt.name} is {float(code_values(fmt)[weight.code]):.9g}, code {weight.code}")
    first, shift = divmod(weight.column * fmt.bits, 8)
    data = pack_words(q.codes[weight.row], fmt.bits)[first : first + 1 + (shift + fmt.bits > 8)]
    words = f"bits {shift} to {shift + fmt.bits - 1} from byte {first} of row {weight.row}: {bytes(data.tolist()).hex(' ')}"
    return [
        Step("lowbit/quantize/rtn.py", "rtn", tuple(lines)),
        Step("lowbit/formats/words.py", "pack_words", (f"in a quantized checkpoint, {words}",)),
    ]


def _find(layer: str | None, names: list[str], kind: str) -> str:
    if layer is None:
        return names[0]
    if layer not in names:
        ending = [name for name in names if name.endswith(f".{layer}")]
        near = ending[:3] or difflib.get_close_matches(layer, names, n=3, cutoff=0.3)
        raise ValueError(f"no {kind} {layer!r}; near: {', '.join(near) or names[0]}")
    return layer


def _check_index(name: str, shape: tuple[int, int], row: int, column: int) -> None:
    n, k = shape
    if not (0 <= row < n and 0 <= column < k):
        raise ValueError(f"{name} is {n} x {k}: row {row}, column {column} is outside")


def _bytes(info: TensorInfo, begin: int, count: int) -> bytes:
    with info.file.open("rb") as file:
        file.seek(begin)
        return file.read(count)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensor_line(name: str, info: TensorInfo) -> str:
    return f"{info.file}: {name} {_dtype(info.dtype)} {list(info.shape)}, bytes {info.begin:,} to {info.end:,}"


def _meaning(weight: _Weight) -> Step:
    q, fmt, code, at = weight.q, weight.format, weight.code, weight.scale_at
    value, scale = float(code_values(fmt)[code]), float(q.scale[at])
    n, k = q.scheme.granularity.block(q.shape)
    lines = [f"scheme {q.scheme}: {fmt.name}, one scale for {n} x {k} weights"]
    if isinstance(fmt, IntFormat):
        lines.append(f"code {code} - offset {fmt.offset} = {value:.9g}")
    else:
        bits = f"{code:0{fmt.bits}b}"
        exponent, mantissa = bits[1 : 1 + fmt.exponent], bits[1 + fmt.exponent :] or "none"
        parts = f"sign {bits[0]}, exponent {exponent} (bias {fmt.bias}), mantissa {mantissa}"
        lines.append(f"code {bits}: {parts} = {value:.9g}")
    if q.zero is None:
        sum_ = f"scale [{at[0]}, {at[1]}] = {scale:.8g}: weight = {value:g} x {scale:.8g}"
    elif q.scheme.zero is ZeroPoint.INTEGER:
        sum_ = f"zero {int(q.zero[at])}, scale {scale:.8g}: weight = ({value:g} - {int(q.zero[at])}) x {scale:.8g}"
    else:
        zero = float(q.zero[at])
        sum_ = f"scale {scale:.8g}, zero {zero:.8g}: weight = {value:g} x {scale:.8g} + {zero:.8g}"
    lines.append(f"{sum_} = {weight.dequantized:.9g}")
    channel = weight.column
    of_x = q.input_transform
    if of_x.hadamard:
        lines.append(f"x is rotated in blocks of {of_x.hadamard} channels first; what follows is of its channels then")
    if of_x.order is not None:
        channel = int(of_x.order[weight.column])
        lines.append(f"order [{weight.column}] = {channel}: it multiplies channel {channel} of x")
    if of_x.pre_quant_scale is not None:
        lines.append(
            f"channel {channel} of x is multiplied by its input scale {float(of_x.pre_quant_scale[channel]):.9g} first"
        )
    if q.low_rank is not None:
        added = float(q.low_rank.up[weight.row].double() @ q.low_rank.down[:, channel].double())
        lines.append(f"the layer adds {added:.9g} to it, its share of a correction of rank {q.low_rank.rank}")
    return Step("lowbit/formats/tensor.py", "QuantTensor.dequantize", tuple(lines))


def _registers(weight: _Weight, atom: MmaAtom, sm: int) -> list[Step]:
    """The register that wants this weight, the packed words that hold its code, and the conversion between the two."""
    layout = FragmentOrder(atom, weight.format)
    rows, ks = layout.tile.coordinates()
    here = np.argwhere((rows == weight.row % ROW_BLOCK) & (ks == weight.column % TILE_K))[0]
    place = _Place(*(int(number) for number in here))
    c = conversion(weight.format, _half_type(weight.format))
    words, packing = _packing(weight, layout, c, place)
    return [_fragment(weight, atom, sm, place), packing, _conversion(weight, c, place, words)]


def _half_type(fmt: NumberFormat) -> HalfType:
    """fp16, or bf16 for the few formats whose exponents only that has."""
    try:
        conversion(fmt, "fp16")
    except ValueError:
        return "bf16"
    return "fp16"


def _fragment(weight: _Weight, atom: MmaAtom, sm: int, place: _Place) -> Step:
    step, register = divmod(place.register, atom.a.registers)
    tile, inside = (weight.row // ROW_BLOCK, weight.column // TILE_K), (weight.row % ROW_BLOCK, weight.column % TILE_K)
    share = "the share of one warp of the warpgroup" if atom.threads > 32 else "a warp's share"
    return Step(
        "lowbit/hardware/mma.py",
        atom.name,
        (
            f"sm {sm}, {atom.section}",
            f"{atom.instruction}: weights are operand A, {atom.m} rows of k {atom.k} in {atom.threads} threads' registers",
            f"tile {list(tile)} of {ROW_BLOCK} x {TILE_K} ({share}): row {inside[0]}, k {inside[1]} of it belongs to",
            f"lane {place.thread}, k step {step}, register a{register}, {place.half}",
        ),
    )


def _packing(weight: _Weight, layout: FragmentOrder, c: Conversion, place: _Place) -> tuple[list[np.uint32], Step]:
    """Packs the tile of this weight: the words its conversion reads, and where its code's bits are in them."""
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
    lines.append("(a kernel that reads the file's dense rows skips this step and the next: lowbit/ops/table.py says which)")
    return words, Step("lowbit/pack/fragment.py", str(layout), tuple(lines))


def _conversion(weight: _Weight, c: Conversion, place: _Place, words: list[np.uint32]) -> Step:
    """Executes the conversion of the packed words, and scales what comes out."""
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
        lines.append(f"times {c.scale_factor:g}, which the scale takes over: {value:.9g}")
    scaled = "with its scale" if weight.q.zero is None else "with its scale and zero"
    lines.append(f"{scaled} the weight is {_scaled(weight, value):.9g}")
    return Step("lowbit/hardware/conversions.py", f"conversion({c.format.name}, {c.dtype})", tuple(lines))


def _scaled(weight: _Weight, value: float) -> float:
    """Scale and zero applied in float32 to the value that the conversion gave, not to the one in the table."""
    q, at = weight.q, weight.scale_at
    v, scale = torch.tensor(value, dtype=torch.float32), q.scale[at].float()
    if q.zero is None:
        return float(v * scale)
    zero = q.zero[at].float()
    return float((v - zero) * scale if q.scheme.zero is ZeroPoint.INTEGER else v * scale + zero)


TOKENS = (1, 16, 64, 1024)
"""Rows of x for which the kernels are named."""


def _kernels(q: QuantTensor, machine: Machine) -> Step:
    """Which kernel multiplies the layer on a GPU, with which tile and why, and why not the others made for it."""
    lines = []
    for m in TOKENS:
        problem = _problem(q, m, machine)
        chosen = choose(problem)
        slow = ", which decodes all weights at every call" if chosen.is_slow else ""
        lines.append(f"on {machine.product}, M {m}: {chosen.name} (lowbit/{chosen.file}), for {chosen.runs_on}{slow}")
        lines += [f"  {line}" for line in ([] if chosen.is_slow else chosen.tile(problem))]
        others = [(kernel, kernel.refusals(problem)) for kernel in KERNELS if kernel.concerns(problem) and kernel != chosen]
        lines += [f"  not {kernel.name}: {'; '.join(reasons)}" for kernel, reasons in others if reasons]
    return Step("lowbit/ops/table.py", "choose", tuple(lines))


def _problem(q: QuantTensor, m: int, machine: Machine) -> Problem:
    """A product of the layer with x in bfloat16."""
    return Problem(q.scheme, m, *q.shape, torch.bfloat16, machine, scale_dtype=q.scale.dtype)


def _machine(sm: int) -> Machine:
    """The GPU here, if it is of this version, else the product that stands for it."""
    if torch.cuda.is_available():
        here = machine_of("cuda")
        if here.arch.sm == sm:
            return here
    return typical_machine(sm)


def _in_the_kernels(weight: _Weight, machine: Machine) -> list[Step]:
    """Where the weight is in the kernels for 16-bit x: the block, the warp and the stage that multiply it."""
    steps: list[Step] = []
    for m in TOKENS:
        problem = _problem(weight.q, m, machine)
        kernel = choose(problem)
        if kernel.is_slow or any(step.file == f"lowbit/{kernel.file}" for step in steps):
            continue
        tile = choose_tile(GemmShape(m, *weight.q.shape, weight.format.bits), machine)
        if isinstance(tile, RingTile):
            lines = _in_ring(weight, tile)
        else:
            lines = _in_mma(weight, tile) if isinstance(tile, MmaTile) else _in_wgmma(weight, tile)
        steps.append(Step(f"lowbit/{kernel.file}", f"{kernel.name}, M {m}", (str(tile), *lines)))
    return steps


def _in_ring(weight: _Weight, tile: RingTile) -> tuple[str, ...]:
    row_block, step = weight.row // ROW_BLOCK, weight.column // (2 * TILE_K)
    block, inside = divmod(row_block, tile.tile_row_blocks)
    slices = tile.warps_k * tile.splits
    turn, part = divmod(step, slices)
    warp = inside // tile.row_blocks * tile.warps_k + part % tile.warps_k
    return (
        f"row block {row_block} of 16 rows is row block {inside % tile.row_blocks} of warp {warp} of block {block};",
        f"step {step} of 128 k is number {turn} of that warp: slice {part} of {slices} along K, split {part // tile.warps_k};",
        "its words come by cp.async into the warp's own ring (copy_block), are read (read_block), decoded and multiplied by",
        "mma.sync (multiply); sums of all slices of K meet in a fixed order (reduce_slices, reduce_splits), then y is stored "
        "(apply_epilogue)",
    )


def _in_mma(weight: _Weight, tile: MmaTile) -> tuple[str, ...]:
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
        f"k tile {k_tile} is {own}stage {stage} of all: its words come by cp.async (copy_vector), are read by each of the "
        f"{tile.warps_m} warps of the row (read_weights),",
        "decoded in registers (dequantize_row_block), made operand A (operand_of) and multiplied by",
        "mma.sync (multiply) while those of the next 16 k are decoded; x is operand B, by ldmatrix from shared memory",
    )


def _in_wgmma(weight: _Weight, tile: WgmmaTile) -> tuple[str, ...]:
    row_tile, inside = divmod(weight.row, tile.rows)
    turns, turn = -(-weight.q.shape[1] // 128), weight.column // 128
    split = next((str(i) for i in range(tile.splits) if turns * (i + 1) // tile.splits > turn), "by equal shares of blocks")
    half = "even" if weight.column // TILE_K % 2 == 0 else "odd"
    return (
        f"row tile {row_tile}, row {inside} of {tile.rows}: warpgroup {inside // 64}, warp {inside // ROW_BLOCK}; K split "
        f"{split};",
        f"k tile {weight.column // TILE_K} is the {half} stage of turn {turn}: TMA brings its words (load_weights), the warp",
        "waits for them (read_words), decodes them in registers (dequantize), makes these operand A (operand_a) and starts",
        f"wgmma.mma_async m64n{tile.tokens}k16 on them (start); x is operand B, from shared memory;",
        "what other kernels do alike is in lowbit/kernels/parts/operand.py and lowbit/kernels/parts/dequantize.py",
    )


def _on_cpu(q: QuantTensor) -> Step:
    """The form in which a layer holds the weight on this machine's CPU, and why not in a faster one."""
    lines = []
    for dtype in (torch.bfloat16, torch.float32):
        problem = problem_on("cpu", q.scheme, 1, q.shape, dtype)
        chosen = choose(problem)
        slow = "decoded at every call"
        if q.scheme.activation is None:
            slow = "decoded once at the first call if the model fits (lowbit/nn/decoding.py), else at every call"
        how = slow if chosen.is_slow else f"{chosen.name} (lowbit/{chosen.file}), packed once at the first call"
        lines.append(f"a layer on this CPU, x {_dtype(dtype)}: {how}")
        others = [
            kernel for kernel in KERNELS if chosen.is_slow and kernel.concerns(problem) and kernel.form in ("int4", "int8")
        ]
        lines += [f"  not {kernel.name}: {'; '.join(kernel.refusals(problem))}" for kernel in others]
    return Step("lowbit/ops/cpu_gemm.py", "cpu_gemm", tuple(lines))


def _with_quantized_input(weight: _Weight, sm: int) -> list[Step]:
    """From the meaning of the code on, under a scheme that quantizes activations."""
    q = weight.q
    return [_input(q), _operand(weight), _kernels(q, _machine(sm)), _on_cpu(q)]


def _input(q: QuantTensor) -> Step:
    """What happens to x before the product."""
    fmt = q.scheme.activation
    assert fmt is not None
    rule = q.scheme.rule
    top = (fmt.max - fmt.min) / 2 if rule is ActivationRule.COMPRESSED_TENSORS else fmt.max
    static, shift = q.input_transform.activation_scale, q.input_transform.activation_zero
    if static is not None:
        how = f"by the scale {float(static):.9g} of this layer"
        how += "" if shift is None else f" and its zero {int(shift)}"
        how += ", found by calibration"
    elif isinstance(q.scheme.granularity, PerBlock):
        how = f"by a scale for each token and {q.scheme.granularity.k} columns, the largest |x| / {top:g}"
    elif q.scheme.activation_zero:
        how = f"by a scale and a zero for each token, its range over {fmt.min:g} to {fmt.max:g}"
    else:
        how = f"by a scale for each token, the largest |x| / {top:g}"
    tool = "" if rule is ActivationRule.OWN else f" as {rule.name.lower().replace('_', '-')} does it,"
    line = f"x becomes {fmt.name}{tool} {how} (lowbit/kernels/reference/activations.py says how it is rounded)"
    return Step("lowbit/kernels/elementwise/quantize_rows.py", "quantize_rows", (line,))


def _operand(weight: _Weight) -> Step:
    """The byte that the tensor core multiplies."""
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
            f"codes in the order of the fragments (lowbit/pack/fragment.py), made {c.operand} in registers by",
            f"lowbit/hardware/byte_conversions.py, {c.integer_per_weight:g} integer instructions per weight:",
            f"code {weight.code} becomes {value / c.scale_factor:g},",
            f"times {c.scale_factor:g}, which the scale takes over: {value:g}",
        )
    return Step("lowbit/pack/scaled.py", "OperandWeight", lines)
