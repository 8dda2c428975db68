"""compressed-tensors files, as llm-compressor writes them. For a layer with weights w [N, K]:

    pack-quantized      weight_packed int32 [N, W]: integers of 1 to 8 bits, value + 2^(bits - 1), little-endian along K
                        weight_shape int64 [2]; with zero points weight_zero_point int32 [W', G], packed the same way along N
    int-quantized       weight int8 [N, K]; with zero points weight_zero_point int8
    float-quantized     weight float8_e4m3fn [N, K]
    naive-quantized     as int- or float-quantized, by the type
    mxfp4-pack-quantized, mxfp8-quantized, mxfp6-pack-quantized
                        weight_packed uint8 (mxfp8: weight) and weight_scale uint8 [N, K / 32], exponents of two plus 127
    nvfp4-pack-quantized, which is only read
                        weight_packed, weight_scale float8_e4m3fn [N, K / 16], weight_global_scale, their divisor (nvfp4.py)

Pack-, int- and float-quantized layers also have weight_scale [1], [N, 1], [N, G] or, for blocks, [N / n, K / k] (rounded up);
w = scale * (q - zero point). W and W' are numbers of words, G that of groups.

Since 0.18 words are dense (W = ceil(K * bits / 32)); before, each word held 32 // bits codes and its high bits were unused.
Both are read (their widths differ) and written. A layer belongs to the `config_groups` entry that its tensors fit, so no
regular expression of an untrusted file is executed. Activations are quantized as in that tool (the scheme's rule _ct).
Source: compressed-tensors 0.17.0, 0.18.0, 0.19.0, 0.20.0.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.checkpoint.compressed_groups import (
    E4M3,
    FLOAT,
    INT,
    MX,
    NVFP4,
    PACKED,
    WeightArgs,
    activation_json,
    weight_args,
    weights_json,
)
from lowbit.checkpoint.foreign import (
    SCALE_DTYPES,
    ForeignEntry,
    ForeignLayer,
    ForeignSchema,
    codes_to_words,
    is_e8m0,
    read_e8m0,
    read_fp8,
    words_to_codes,
    write_e8m0,
)
from lowbit.checkpoint.nvfp4 import nvfp4_shape, read_nvfp4
from lowbit.checkpoint.schema import MAX_DIMENSION, CheckpointError
from lowbit.formats import (
    FloatFormat,
    IntFormat,
    PerBlock,
    PerGroup,
    PerTensor,
    QuantTensor,
    ZeroPoint,
    pack_words,
    packed_bytes,
    scale_shape,
    unpack_words,
)

_NVFP4_TENSORS = ("weight_packed", "weight_scale", "weight_global_scale")


@dataclass(frozen=True)
class CompressedTensors(ForeignSchema):
    """The config groups of a checkpoint; `new_words`: written by 0.18 or later (None: unknown)."""

    groups: tuple[WeightArgs, ...]
    new_words: bool | None = True
    kv_cache: bool = False

    name = "compressed-tensors"
    suffixes = (
        *("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
        *("weight_global_scale", "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point"),
    )
    markers = ("weight_packed", "weight_scale")
    small = ("weight_shape",)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: Path | str) -> CompressedTensors:
        """Returns the schema of a `quantization_config`."""
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or not groups or len(groups) > 1000:
            raise CheckpointError(f"{where}: config_groups is an object of groups, got {str(groups)[:80]!r}")
        if isinstance(config.get("sparsity_config"), Mapping) and config["sparsity_config"].get("format", "dense") != "dense":
            raise CheckpointError(f"{where}: sparse weights ({config['sparsity_config']['format']!r}) are not supported")
        args = [weight_args(group, config.get("format"), f"{where}: {name}") for name, group in groups.items()]
        version = re.match(r"(\d{1,4})\.(\d{1,4})", str(config.get("version", "")))
        new_words = None if version is None else (int(version[1]), int(version[2])) >= (0, 18)
        return cls(tuple(dict.fromkeys(args)), new_words, config.get("kv_cache_scheme") is not None)

    def config(self, kept: Iterable[str], targets: Mapping[WeightArgs, list[str]]) -> dict[str, Any]:
        """Returns the `quantization_config` of a model; `targets` maps arguments to layers, `kept` are the others."""
        groups = {}
        for i, (args, names) in enumerate(targets.items()):
            groups[f"group_{i}"] = {
                "targets": ["Linear"] if len(targets) == 1 else sorted(names),
                "weights": weights_json(args),
                "input_activations": None if args.activation is None else activation_json(args),
                "output_activations": None,
                "format": args.layout,
            }
        formats = {args.layout for args in targets}
        return {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": list(kept),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
            "version": "0.18.0",
        }

    def entry(self, layer: ForeignLayer) -> ForeignEntry:
        shape, args = self.fit(layer)
        notes = [f"{args.left_out}: activations stay in 16 bits"] if args.left_out else []
        if args.outputs:
            notes.append("the files state quantized outputs, which stay in 16 bits")
        if layer.has("weight_zero_point") and not args.zero:
            notes.append("zero points of symmetric weights are ignored; all must be zero")
        return ForeignEntry(shape, args.scheme, notes=tuple(notes))

    def used(self, layer: ForeignLayer) -> frozenset[str]:
        _, args = self.fit(layer)
        codes = {"weight_packed", "weight_shape"} if layer.has("weight_packed") else {"weight"}
        if args.layout == NVFP4:
            return frozenset(_NVFP4_TENSORS)
        zeros = set() if args.layout in MX else {"weight_zero_point"}  # `read` checks that those of symmetric weights are 0
        return frozenset(codes | zeros | {"weight_scale"} | ({"input_scale", "input_zero_point"} if args.static else set()))

    def read(self, layer: ForeignLayer) -> QuantTensor:
        shape, args = self.fit(layer)
        q = read_layer(layer, shape, args)
        if not args.zero and args.layout not in MX and layer.has("weight_zero_point"):
            _expect_no_zeros(layer, args, shape)
        if not args.static:
            return q
        scale = layer.scales("input_scale").float().reshape(1)
        if args.activation_zero:
            zero = layer.tensor("input_zero_point").to(torch.int32).reshape(1)
            return q.with_input(activation_scale=scale, activation_zero=zero)
        if layer.has("input_zero_point") and bool(layer.tensor("input_zero_point").float().any()):
            raise layer.error("input_zero_point", "config.json states symmetric activations, but this zero point is not zero")
        return q.with_input(activation_scale=scale)

    def write(self, q: QuantTensor) -> dict[str, Tensor]:
        return write_layer(q, args_for(q))

    def fit(self, layer: ForeignLayer) -> tuple[tuple[int, int], WeightArgs]:
        """Returns shape and arguments of a layer: those of the only group that its tensors fit."""
        fits, reasons = [], []
        for args in self.groups:
            try:
                fits.append(_shape_and_args(layer, args, self.new_words))
            except CheckpointError as error:
                reasons.append(error)
        if not fits:
            raise (
                reasons[0]
                if len(reasons) == 1
                else CheckpointError(
                    f"{layer.where}: {layer.name}: fits none of the {len(reasons)} config_groups; first reason: {reasons[0]}"
                )
            )
        shape, args = fits[0]
        wide: dict[str, Any] = {"activation": None, "static": False, "activation_zero": False}
        weights = [(size, dataclasses.replace(other, left_out="", outputs=False, **wide)) for size, other in fits]
        if any(other != weights[0] for other in weights[1:]):
            raise CheckpointError(f"{layer.where}: {layer.name}: fits several config_groups with different weights")
        if any(other != args for _, other in fits):
            args = dataclasses.replace(args, **wide, left_out="its tensors fit several config_groups")
        return shape, args


def args_for(q: QuantTensor) -> WeightArgs:
    """Returns the arguments for `write_layer`. Raises ValueError with the reasons if `q` cannot be written."""
    if reasons := refusals(q):
        raise ValueError("; ".join(reasons))
    scheme, zero, static = q.scheme, q.zero is not None, q.input_transform.parts.activation_scale
    fmt = scheme.weight
    if isinstance(fmt, IntFormat):
        layout = PACKED if scheme.activation is None else INT
        of_x = (scheme.activation, static, scheme.activation_zero)
        return WeightArgs(layout, fmt.bits, False, scheme.granularity, zero, *of_x)
    layout = FLOAT
    if isinstance(scheme.granularity, PerGroup):
        layout = next(name for name, known in MX.items() if known == fmt)
    return WeightArgs(layout, fmt.bits, True, scheme.granularity, zero, scheme.activation, static)


def refusals(q: QuantTensor) -> tuple[str, ...]:
    """Returns why compressed-tensors files cannot represent `q`; empty if they can."""
    scheme, fmt, reasons = q.scheme, q.scheme.weight, []
    if scheme.zero is ZeroPoint.FLOAT:
        reasons.append("zero points in compressed-tensors files are integers, these are floating-point numbers")
    if isinstance(fmt, FloatFormat):
        if isinstance(scheme.granularity, PerGroup):
            if fmt not in MX.values() or scheme.granularity.size != 32 or not is_e8m0(q.scale):
                reasons.append(
                    f"floats in groups of compressed-tensors files are groups of 32 with power-of-two scales (MX), not {scheme}"
                )
        elif fmt != E4M3:
            reasons.append(f"floats in compressed-tensors files are e4m3, or in MX groups of 32, not {fmt.name} as in {scheme}")
    elif isinstance(scheme.granularity, PerBlock):
        reasons.append(
            f"integers in compressed-tensors files have scales of groups, channels or tensors, not of blocks as in {scheme}"
        )
    elif isinstance(scheme.granularity, PerTensor) and q.zero is not None:
        reasons.append("zero points in compressed-tensors files go with scales of groups or channels, not of the whole tensor")
    if isinstance(scheme.granularity, PerGroup) and q.shape[1] % scheme.granularity.size:
        reasons.append(f"groups in compressed-tensors files are full, {scheme.granularity.size} does not divide K {q.shape[1]}")
    if isinstance(scheme.activation, FloatFormat) and scheme.activation != E4M3:
        reasons.append(f"activations in compressed-tensors files are integers or e4m3, not {scheme.activation.name}")
    words = q.input_transform.parts.words("activation_scale", "activation_zero")
    reasons += [f"compressed-tensors files as written here have no {what}" for what in words]
    if q.low_rank is not None:
        reasons.append("compressed-tensors files have no low-rank correction")
    return tuple(reasons)


def read_layer(layer: ForeignLayer, shape: tuple[int, int], args: WeightArgs) -> QuantTensor:
    """Returns the QuantTensor of a layer that fits its arguments. Raises CheckpointError for invalid values."""
    (n, k), grid = shape, scale_shape(args.granularity, shape)
    if args.layout in MX:
        scale = read_e8m0(layer, "weight_scale")
        if args.layout == "mxfp8-quantized":
            return QuantTensor(read_fp8(layer, "weight"), scale, None, args.scheme)
        return QuantTensor(unpack_words(layer.tensor("weight_packed"), args.bits, k), scale, None, args.scheme)
    if args.layout == NVFP4:
        return dataclasses.replace(read_nvfp4(layer, *_NVFP4_TENSORS, divided=True), scheme=args.scheme)
    scale = layer.scales("weight_scale").reshape(grid)
    if args.float:
        return QuantTensor(read_fp8(layer, "weight"), scale, None, args.scheme)
    zero = None
    if args.layout == PACKED:
        codes = _unpack(layer.tensor("weight_packed"), args, k)
        if args.zero:
            zero = _unpack(layer.tensor("weight_zero_point").t(), args, n).t().contiguous()
    else:
        codes = _offset_binary(layer, "weight", args.bits)
        if args.zero:
            zero = _offset_binary(layer, "weight_zero_point", args.bits).reshape(grid)
    if args.bits == 1:  # -1 and 0 as integers of 2 bits
        codes, zero = codes + 1, None if zero is None else zero + 1
    return QuantTensor(codes, scale, zero, args.scheme)


def write_layer(q: QuantTensor, args: WeightArgs) -> dict[str, Tensor]:
    """Returns the tensors by suffix; the inverse of `CompressedTensors.read`.

    A static scale gets the dtype of the weights' scales, as in that tool's files, if that is exact.
    """
    of_x_tensors, of_x = {}, q.input_transform
    if of_x.activation_scale is not None:
        narrow = of_x.activation_scale.to(q.scale.dtype)
        of_x_tensors["input_scale"] = narrow if torch.equal(narrow.float(), of_x.activation_scale) else of_x.activation_scale
    if of_x.activation_zero is not None:
        of_x_tensors["input_zero_point"] = of_x.activation_zero.to(torch.int8)
    return _weight_tensors(q, args) | of_x_tensors


def _weight_tensors(q: QuantTensor, args: WeightArgs) -> dict[str, Tensor]:
    """Returns the weight's tensors by suffix; the inverse of `read_layer`."""
    per_tensor = isinstance(args.granularity, PerTensor)
    scale = q.scale.reshape(1) if per_tensor else q.scale.contiguous()
    if args.layout in MX:
        scale = write_e8m0(q.scale)
        if args.layout != "mxfp8-quantized":
            return {"weight_packed": pack_words(q.codes, args.bits), "weight_scale": scale}
    if args.float:
        return {"weight": q.codes.contiguous().view(torch.float8_e4m3fn), "weight_scale": scale}
    codes, zero = q.codes, q.zero
    if args.bits == 1:
        codes, zero = codes - 1, None if zero is None else zero - 1
    if args.layout == PACKED:
        tensors = {"weight_packed": _pack(codes, args), "weight_scale": scale, "weight_shape": torch.tensor(q.shape)}
        if zero is not None:
            tensors["weight_zero_point"] = _pack(zero.t(), args).t().contiguous()
        return tensors
    half = 1 << (args.bits - 1)
    tensors = {"weight": (codes.to(torch.int16) - half).to(torch.int8), "weight_scale": scale}
    if zero is not None:
        signed = (zero.to(torch.int16) - half).to(torch.int8)
        tensors["weight_zero_point"] = signed.reshape(1) if per_tensor else signed
    return tensors


def _shape_and_args(layer: ForeignLayer, args: WeightArgs, new_words: bool | None) -> tuple[tuple[int, int], WeightArgs]:
    """Returns the layer's shape and its resolved arguments. Raises CheckpointError if the tensors do not fit."""
    if layer.has("weight_g_idx"):
        raise layer.error("weight_g_idx", "an act-order permutation, which compressed-tensors no longer reads; quantize again")
    if layer.has("weight_global_scale") and args.layout != NVFP4:
        raise layer.error("weight_global_scale", f"belongs to NVFP4, but config.json states {args.layout}")
    args = args.resolved(layer)
    if args.static:
        layer.expect("input_scale", SCALE_DTYPES, (1,), (), (1, 1))
    if args.static and args.activation_zero:
        layer.expect("input_zero_point", (torch.int8,), (1,), (), (1, 1))
    if args.layout == PACKED:
        return _packed_shape(layer, args, new_words)
    if args.layout == NVFP4:
        return nvfp4_shape(layer, *_NVFP4_TENSORS), args
    if args.layout in MX:
        fp8 = args.layout == "mxfp8-quantized"
        n, width = layer.matrix("weight" if fp8 else "weight_packed", (torch.float8_e4m3fn if fp8 else torch.uint8,))
        k = width if fp8 else width * 8 // args.bits
        if k % 32 or (not fp8 and packed_bytes(k, args.bits) != width):
            raise layer.error("weight" if fp8 else "weight_packed", f"rows of {width} do not hold whole groups of 32 weights")
        layer.expect("weight_scale", (torch.uint8, torch.float8_e8m0fnu), (n, k // 32))
        return (n, k), args
    shape = layer.matrix("weight", (torch.float8_e4m3fn if args.float else torch.int8,))
    layer.expect("weight_scale", SCALE_DTYPES, *_scale_shapes(args, shape))
    if args.zero:
        layer.expect("weight_zero_point", (torch.int8,), *_scale_shapes(args, shape))
    return shape, args


def _packed_shape(layer: ForeignLayer, args: WeightArgs, new_words: bool | None) -> tuple[tuple[int, int], WeightArgs]:
    n, words = layer.matrix("weight_packed", (torch.int32,))
    layer.expect("weight_shape", (torch.int64,), (2,))
    rows, k = (int(v) for v in layer.tensor("weight_shape").tolist())
    dense, padded = -(-k * args.bits // 32), -(-k // (32 // args.bits))
    if rows != n or not 0 < k < MAX_DIMENSION or words not in (dense, padded):
        raise layer.error(
            "weight_packed", f"{args.bits}-bit codes of the shape in weight_shape, {(rows, k)}, are [{rows}, {dense}], or "
            f"[{rows}, {padded}] with padded words, found {(n, words)}",
        )  # fmt: skip
    old = words != dense
    if dense == padded and 32 % args.bits and k > 32 // args.bits:
        if new_words is None:
            raise layer.error("weight_packed", "dense and padded words have the same length, and config.json has no `version`")
        old = not new_words
    layer.expect("weight_scale", SCALE_DTYPES, *_scale_shapes(args, (n, k)))
    if args.zero:
        zero_words = -(-n // (32 // args.bits)) if old else -(-n * args.bits // 32)
        layer.expect("weight_zero_point", (torch.int32,), (zero_words, scale_shape(args.granularity, (n, k))[1]))
    return (n, k), dataclasses.replace(args, padded=old)


def _scale_shapes(args: WeightArgs, shape: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    grid = scale_shape(args.granularity, shape)
    return ((1,), (1, 1), ()) if isinstance(args.granularity, PerTensor) else (grid,)


def _unpack(words: Tensor, args: WeightArgs, count: int) -> Tensor:
    """Unpacks words int32 [R, W] to codes uint8 [R, count]."""
    if not args.padded:
        return words_to_codes(words, args.bits, count)
    mask = (1 << args.bits) - 1
    codes = [((words >> shift) & mask).to(torch.uint8) for shift in range(0, 33 - args.bits, args.bits)]
    return torch.stack(codes, dim=-1).flatten(1)[:, :count].contiguous()


def _pack(codes: Tensor, args: WeightArgs) -> Tensor:
    """Packs codes uint8 [R, C] to words int32 [R, W]; the inverse of `_unpack`."""
    if not args.padded:
        return codes_to_words(codes, args.bits)
    per_word = 32 // args.bits
    filled = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_word)).unflatten(1, (-1, per_word))
    shifts = torch.arange(per_word, device=codes.device) * args.bits
    words = (filled.to(torch.int64) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _expect_no_zeros(layer: ForeignLayer, args: WeightArgs, shape: tuple[int, int]) -> None:
    """Raises CheckpointError unless all zero points of a layer that config.json states as symmetric are zero."""
    zeros = layer.tensor("weight_zero_point")
    if args.layout == PACKED and zeros.dtype == torch.int32 and zeros.dim() == 2:
        values = _unpack(zeros.t(), args, shape[0]).to(torch.int16) - (1 << (args.bits - 1))
    else:
        values = zeros.float()
    if bool((values != 0).any()):
        raise layer.error(
            "weight_zero_point", f"config.json states symmetric: true, but zero points from {values.min().item():g} to "
            f"{values.max().item():g} are stored; correct config.json, or quantize again",
        )  # fmt: skip


def _offset_binary(layer: ForeignLayer, suffix: str, bits: int) -> Tensor:
    """Returns the codes uint8 of int8 values. Raises CheckpointError for values beyond `bits` bits."""
    values, half = layer.tensor(suffix).to(torch.int16), 1 << (bits - 1)
    if bool(((values < -half) | (values >= half)).any()):
        raise layer.error(suffix, f"values from {int(values.min())} to {int(values.max())} are beyond {bits}-bit integers")
    return (values + half).to(torch.uint8)
