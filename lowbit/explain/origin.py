"""The first stages of the path: the weight's bytes in the file, the code that rounding chose, and its value."""

from __future__ import annotations

import difflib
import re
from collections.abc import Container
from dataclasses import dataclass

import torch
from torch import nn

from lowbit.checkpoint import CheckpointError, CheckpointReader, TensorInfo, expected_tensors
from lowbit.formats import IntFormat, NumberFormat, QuantTensor, ZeroPoint, code_values, pack_words
from lowbit.models.complete import require_complete
from lowbit.models.experts import ExpertReader, expert_sources, experts_per_token
from lowbit.models.hf import plan_for
from lowbit.models.names import TensorNames
from lowbit.models.skeleton import config_of, skeleton
from lowbit.nn.convert import Plan
from lowbit.nn.experts import expert_weights
from lowbit.quantize import rtn


@dataclass(frozen=True)
class PathStage:
    """One stage of the path: the source file, the function or class in it, and what it does to this weight."""

    file: str
    what: str
    lines: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class FollowedWeight:
    """Element [row, column] of the codes of the quantized matrix `q`, which belongs to `expert` if it is one of several: of the
    `experts` of a layer, of which a token has `top_k`."""

    q: QuantTensor
    row: int
    column: int
    expert: int | None = None
    experts: int = 0
    top_k: int = 1

    @property
    def format(self) -> NumberFormat:
        return self.q.scheme.weight

    @property
    def code(self) -> int:
        return int(self.q.codes[self.row, self.column])

    @property
    def scale_at(self) -> tuple[int, int]:
        """Returns the index of its scale and zero."""
        n, k = self.q.scheme.granularity.block(self.q.shape)
        return self.row // n, self.column // k

    @property
    def dequantized(self) -> float:
        return float(self.q.dequantize_codes()[self.row, self.column])


def from_quantized(
    reader: CheckpointReader, layer: str | None, row: int, column: int
) -> tuple[FollowedWeight, list[PathStage]]:
    """Returns the weight of a lowbit checkpoint and the stage that reads it."""
    if reader.manifest is None or not reader.manifest.layers:
        raise CheckpointError(
            f"{reader.folder}: holds no weights quantized by lowbit; run `lowbit quantize` first, or give a --scheme"
        )
    layers = reader.manifest.layers
    owner, expert = _split_expert(reader.manifest.tied.get(layer or "", layer), {n for n in layers if layers[n].experts})
    name = _find(owner, list(layers), "quantized layer")
    entry = layers[name]
    _check_index(name, entry.shape, row, column)
    _check_expert(name, entry.experts, expert)
    if entry.experts:
        top_k = max(1, experts_per_token(config_of(reader.folder)))
        weight = FollowedWeight(reader.experts(name).expert(expert), row, column, expert, entry.experts, top_k)
    else:
        weight = FollowedWeight(reader.layer(name), row, column)
    info, bits = reader.info(f"{name}.weight_packed"), entry.scheme.weight.bits
    first, shift = divmod(column * bits, 8)
    begin = info.begin + (expert * entry.shape[0] + row) * info.shape[-1] + first
    data = _bytes(info, begin, 1 + (shift + bits > 8))
    code = int.from_bytes(data, "little") >> shift & ((1 << bits) - 1)
    lines = [
        _tensor_line(f"{name}.weight_packed", info),
        f"{_of_expert(weight)}weight [{row}, {column}] is code {column} of row {row}: bits {shift} to {shift + bits - 1} "
        f"from byte {begin:,},",
        f"where the file has {data.hex(' ')} = {' '.join(f'{b:08b}' for b in data)}: code {code} = 0b{code:0{bits}b}",
    ]
    beside = [tensor for tensor in expected_tensors(name, entry) if tensor != f"{name}.weight_packed"]
    lines += [_tensor_line(tensor, reader.info(tensor)) for tensor in beside]
    return weight, [PathStage("lowbit/checkpoint/reader.py", "CheckpointReader", tuple(lines))]


def from_16_bit(
    reader: CheckpointReader, layer: str | None, row: int, column: int, scheme: str
) -> tuple[FollowedWeight, list[PathStage]]:
    """Returns the weight of a 16-bit checkpoint, rounded to nearest, and the stages that read and round it."""
    if "quantization_config" in reader.config:
        raise CheckpointError(f"{reader.folder}: is quantized already; leave out --scheme {scheme}")
    model = skeleton(reader.folder)
    names = TensorNames(model)
    require_complete(reader.folder, model, {tensor: reader.info(tensor).shape for tensor in reader.names()}, names)
    plan = names.followed(plan_for(model, scheme, None, False), reader.names())
    stored = {module: tensor for tensor, module in names.modules(plan, reader.names()).items()}
    layers = [*plan.linears, *plan.experts]
    if not layers:
        reasons = "; ".join(dict.fromkeys(kept.reason for kept in plan.kept)) or "it has no linear layers"
        raise ValueError(f"{reader.folder}: nothing to quantize to {plan.scheme}: {reasons}")
    layer, expert = _split_expert(layer, plan.experts)
    name = _find(layer, layers, "linear layer")
    if name in plan.experts:
        return _expert_from_16_bit(reader, model, names, plan, name, expert, row, column)
    _check_index(name, plan.linears[name], row, column)
    info = reader.info(stored[name])
    original = reader.get(stored[name])
    weight = FollowedWeight(rtn(original, plan.scheme), row, column)
    begin = info.begin + (row * info.shape[1] + column) * info.dtype.itemsize
    disk = PathStage(
        "lowbit/checkpoint/reader.py",
        "CheckpointReader",
        (
            _tensor_line(stored[name], info),
            f"weight [{row}, {column}] is the {info.dtype.itemsize} bytes from byte {begin:,},",
            f"where the file has {_bytes(info, begin, info.dtype.itemsize).hex(' ')}: {float(original[row, column]):.9g}",
        ),
    )
    return weight, [disk, *_rounding_stages(weight, float(original[row, column]))]


def _expert_from_16_bit(
    reader: CheckpointReader, model: nn.Module, names: TensorNames, plan: Plan, name: str, expert: int, row: int, column: int
) -> tuple[FollowedWeight, list[PathStage]]:
    """Returns the weight of an expert, rounded to nearest, and the stages that read and round it."""
    count, *shape = plan.experts[name]
    _check_index(name, (shape[0], shape[1]), row, column)
    _check_expert(name, count, expert)
    source = expert_sources(names, reader.names(), plan.experts)[name]
    experts = expert_weights(model.get_submodule(name.rpartition(".")[0]))
    assert experts is not None
    original = experts.matrices(ExpertReader(reader, source)(expert))
    top_k = max(1, experts_per_token(model.config))
    weight = FollowedWeight(rtn(original, plan.scheme), row, column, expert, count, top_k)
    tensors = [group[expert] for group in source.tensors.values()] if source.is_stacked else source.names
    lines = [_tensor_line(tensor, reader.info(tensor)) for tensor in tensors]
    if source.converter is not None:
        how = ", ".join(type(operation).__name__ for operation in source.converter.operations)
        lines.append(f"Transformers makes {name} of them while loading ({how})")
    value = float(original[row, column])
    lines.append(f"{_of_expert(weight)}weight [{row}, {column}] of {shape[0]} x {shape[1]} is {value:.9g}")
    disk = PathStage("lowbit/models/experts.py", "ExpertReader", tuple(lines))
    return weight, [disk, *_rounding_stages(weight, value)]


def expert_stage(weight: FollowedWeight) -> list[PathStage]:
    """Returns the stage of the experts' product, for the weight of an expert."""
    if weight.expert is None:
        return []
    lines = (
        f"expert {weight.expert} is read for the tokens that the router sends to it, once for all of them, and not at all",
        "without one; on a GPU one launch multiplies all experts, else they are multiplied one after another",
    )
    return [PathStage("lowbit/ops/experts.py", "expert_mlp", lines)]


def _split_expert(layer: str | None, experts: Container[str]) -> tuple[str | None, int]:
    """Returns the name of the weights and the expert of `model.layers.0.mlp.experts.5.gate_up_proj`; expert 0 by default."""
    match = re.fullmatch(r"(.+\.)(\d+)\.(\w+)", layer or "")
    if match is not None and match[1] + match[3] in experts:
        return match[1] + match[3], int(match[2])
    return layer, 0


def _check_expert(name: str, count: int, expert: int) -> None:
    if count and expert >= count:
        raise ValueError(f"{name} has {count} experts, 0 to {count - 1}, got {expert}")


def _of_expert(weight: FollowedWeight) -> str:
    return "" if weight.expert is None else f"expert {weight.expert}: "


def _rounding_stages(weight: FollowedWeight, original: float) -> list[PathStage]:
    """Returns the stages that round the weight to a code and pack the code into bytes."""
    q, fmt = weight.q, weight.format
    (n, k), scale = q.scheme.granularity.block(q.shape), float(q.scale[weight.scale_at])
    lines = [f"{n} x {k} weights share one scale; it is rounded to {dtype_name(q.scale.dtype)} first: {scale:.9g}"]
    if q.zero is None:
        lines.append(f"weight / scale = {original / scale:.9g}")
    elif q.scheme.zero is ZeroPoint.INTEGER:
        zero = int(q.zero[weight.scale_at])
        lines.append(f"weight / scale + zero {zero} = {original / scale + zero:.9g}")
    else:
        zero_value = float(q.zero[weight.scale_at])
        lines.append(f"(weight - zero {zero_value:.9g}) / scale = {(original - zero_value) / scale:.9g}")
    lines.append(f"the nearest value of {fmt.name} is {float(code_values(fmt)[weight.code]):.9g}, code {weight.code}")
    first, shift = divmod(weight.column * fmt.bits, 8)
    data = pack_words(q.codes[weight.row], fmt.bits)[first : first + 1 + (shift + fmt.bits > 8)]
    words = f"bits {shift} to {shift + fmt.bits - 1} from byte {first} of row {weight.row}: {bytes(data.tolist()).hex(' ')}"
    return [
        PathStage("lowbit/quantize/rtn.py", "rtn", tuple(lines)),
        PathStage("lowbit/formats/words.py", "pack_words", (f"in a quantized checkpoint, {words}",)),
    ]


def _find(layer: str | None, names: list[str], kind: str) -> str:
    if layer is None:
        return names[0]
    if layer not in names:
        ending = [name for name in names if name.endswith(f".{layer}")]
        near = ending[:3] or difflib.get_close_matches(layer, names, n=3, cutoff=0.3)
        raise ValueError(f"no {kind} {layer!r}; similar names: {', '.join(near) or names[0]}")
    return layer


def _check_index(name: str, shape: tuple[int, int], row: int, column: int) -> None:
    n, k = shape
    if not (0 <= row < n and 0 <= column < k):
        raise ValueError(f"{name} is {n} x {k}: --row {row}, --column {column} is outside; rows and columns start at 0")


def _bytes(info: TensorInfo, begin: int, count: int) -> bytes:
    with info.file.open("rb") as file:
        file.seek(begin)
        return file.read(count)


def dtype_name(dtype: torch.dtype) -> str:
    """Returns a dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")


def _tensor_line(name: str, info: TensorInfo) -> str:
    return f"{info.file}: {name} {dtype_name(info.dtype)} {list(info.shape)}, bytes {info.begin:,} to {info.end:,}"


def value_stage(weight: FollowedWeight) -> PathStage:
    """Returns the stage that computes the value of the code."""
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
        lines.append(f"x is rotated in blocks of {of_x.hadamard} channels first; the channels below are those of the result")
    if of_x.order is not None:
        channel = int(of_x.order[weight.column])
        lines.append(f"order [{weight.column}] = {channel}: it multiplies channel {channel} of x")
    if of_x.pre_quant_scale is not None:
        lines.append(
            f"channel {channel} of x is multiplied by its pre_quant_scale {float(of_x.pre_quant_scale[channel]):.9g} first"
        )
    if q.low_rank is not None:
        added = float(q.low_rank.up[weight.row].double() @ q.low_rank.down[:, channel].double())
        lines.append(f"the low-rank correction (rank {q.low_rank.rank}) adds {added:.9g} to it")
    return PathStage("lowbit/formats/tensor.py", "QuantTensor.dequantize", tuple(lines))
