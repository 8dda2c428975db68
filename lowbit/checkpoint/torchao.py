"""torchao files, as Transformers saves them (`quant_method: "torchao"`). For a layer with weights w [N, K]:

    Int8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig
                           _weight_qdata int8 [N, K], _weight_scale float [N / n, K / k], _weight_zero_point int8, all zero
    IntxWeightOnlyConfig   these tensors with integers of 2 to 8 bits, one per byte, and zero points
    Float8WeightOnlyConfig, Float8DynamicActivationFloat8WeightConfig
                           _weight_qdata float8_e4m3fn [N, K], _weight_scale

    w = (qdata - zero point) * scale; each block of n x k weights has one scale; n and k divide N and K

int4 in other layouts (Int4WeightOnlyConfig) depends on one kernel each and is refused. Activations that torchao quantizes
dynamically stay in 16 bits, since its rounding rule is not supported.
Source: torchao 0.18.0, quantization/quantize_/workflows and prototype/safetensors; Transformers, quantizer_torchao.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.checkpoint.foreign import SCALE_DTYPES, ForeignEntry, ForeignLayer, ForeignSchema, bit_width, read_fp8
from lowbit.checkpoint.schema import CheckpointError
from lowbit.formats import (
    Granularity,
    PerBlock,
    PerChannel,
    PerGroup,
    PerTensor,
    QuantTensor,
    Scheme,
    ZeroPoint,
    float_format,
    int_format,
    uint_format,
)

_INT8 = ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig")
_INTX = "IntxWeightOnlyConfig"
_FLOAT8 = ("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig")
_READ = (*_INT8, _INTX, *_FLOAT8)


@dataclass(frozen=True)
class Torchao(ForeignSchema):
    """Bits of the integers (0: float8 weights), whether they have zero points, and whether torchao quantizes activations."""

    bits: int
    zero: bool = False
    activations: bool = False

    name = "torchao"
    suffixes = (
        *("_weight_qdata", "_weight_scale", "_weight_zero_point", "_weight_scale_and_zero", "_weight_per_tensor_scale"),
        *("_weight_act_pre_scale", "_weight_act_quant_scale", "_weight_act_quant_zero_point", "_weight_act_per_tensor_scale"),
    )
    markers = ("_weight_qdata", "_weight_scale")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: Path | str) -> Torchao:
        """Returns the schema of a `quantization_config`."""
        kind, options = _quant_type(config, where)
        if kind not in _READ:
            raise CheckpointError(
                f"{where}: torchao's {kind} is not supported; supported are {', '.join(_READ)}. Quantize the 16-bit checkpoint "
                "with lowbit quantize, for example with --scheme w4a16_g128"
            )
        if kind in _INT8:
            return cls(8, activations=kind != _INT8[0])
        if kind in _FLOAT8:
            dtype = _named(options.get("weight_dtype"))
            if dtype not in ("float8_e4m3fn", "None"):
                raise CheckpointError(f"{where}: weight_dtype is {dtype}; supported are weights in float8_e4m3fn")
            return cls(0, activations=kind != _FLOAT8[0])
        packing, dtype = _named(options.get("intx_packing_format")), _named(options.get("weight_dtype"))
        if packing not in ("UNPACKED_TO_INT8", "unpacked_to_int8", "None"):
            raise CheckpointError(f"{where}: intx_packing_format {packing}; supported is UNPACKED_TO_INT8")
        bits = int(dtype[3:]) if dtype[:3] == "int" and dtype[3:].isdigit() else -1
        bit_width(bits, f"{where}: weight_dtype {dtype}", range(2, 9), "torchao's")
        return cls(bits, zero=_named(options.get("mapping_type")) == "ASYMMETRIC")

    def entry(self, layer: ForeignLayer) -> ForeignEntry:
        shape = layer.matrix("_weight_qdata", (torch.float8_e4m3fn if self.bits == 0 else torch.int8,))
        for suffix in layer.tensors:
            if suffix not in ("_weight_qdata", "_weight_scale", "_weight_zero_point"):
                raise layer.error(
                    suffix, "static activations and other layouts of torchao are not supported; start from 16 bits"
                )
        grid = layer.matrix("_weight_scale", SCALE_DTYPES)
        scheme = self._scheme(layer, shape, grid)
        if layer.has("_weight_zero_point"):
            layer.expect("_weight_zero_point", (torch.int8,), grid)
        elif self.zero:
            raise layer.error("_weight_zero_point", "missing, and config.json says that the weights are asymmetric")
        notes = ("activations stay in 16 bits, torchao rounds them to 8 by a rule of its own",) if self.activations else ()
        return ForeignEntry(shape, scheme, notes=notes)

    def read(self, layer: ForeignLayer) -> QuantTensor:
        scheme = self.entry(layer).scheme
        assert scheme is not None
        scale = layer.scales("_weight_scale")
        if self.bits == 0:
            return QuantTensor(read_fp8(layer, "_weight_qdata"), scale, None, scheme)
        codes, zero = self._codes(layer, "_weight_qdata"), None
        if self.zero:
            zero = self._codes(layer, "_weight_zero_point")
        elif layer.has("_weight_zero_point") and bool(layer.tensor("_weight_zero_point").any()):
            raise layer.error(
                "_weight_zero_point", "config.json says that the weights are symmetric, some zero points are not 0"
            )
        return QuantTensor(codes, scale, zero, scheme)

    def write(self, q: QuantTensor) -> dict[str, Tensor]:
        scale = q.scale.contiguous()
        if self.bits == 0:
            return {"_weight_qdata": q.codes.contiguous().view(torch.float8_e4m3fn), "_weight_scale": scale}
        half = 1 << (self.bits - 1)
        zero = torch.full_like(scale, half, dtype=torch.uint8) if q.zero is None else q.zero
        return {
            "_weight_qdata": (q.codes.to(torch.int16) - half).to(torch.int8),
            "_weight_scale": scale,
            "_weight_zero_point": (zero.to(torch.int16) - half).to(torch.int8),
        }

    def _scheme(self, layer: ForeignLayer, shape: tuple[int, int], grid: tuple[int, int]) -> Scheme:
        if shape[0] % grid[0] or shape[1] % grid[1]:
            raise layer.error("_weight_scale", f"{grid} scales do not divide a matrix of {shape} into equal blocks")
        n, k = shape[0] // grid[0], shape[1] // grid[1]
        granularity: Granularity
        if n == 1:
            granularity = PerChannel() if grid[1] == 1 else PerGroup(k)
        else:
            granularity = PerTensor() if grid == (1, 1) else PerBlock(n, k)
        if self.bits == 0:
            return Scheme(float_format(4, 3), None, granularity)
        if self.zero:
            return Scheme(uint_format(self.bits), None, granularity, ZeroPoint.INTEGER)
        return Scheme(int_format(self.bits), None, granularity)

    def _codes(self, layer: ForeignLayer, suffix: str) -> Tensor:
        """Returns the codes uint8 of signed integers. Raises CheckpointError for values beyond their bits."""
        values, half = layer.tensor(suffix).to(torch.int16), 1 << (self.bits - 1)
        if bool(((values < -half) | (values >= half)).any()):
            raise layer.error(
                suffix, f"values from {int(values.min())} to {int(values.max())} are beyond {self.bits}-bit integers"
            )
        return (values + half).to(torch.uint8)


def _quant_type(config: Mapping[str, Any], where: Path | str) -> tuple[str, Mapping[str, Any]]:
    """Returns name and options of the configuration, which must be the same for all layers."""
    stated = config.get("quant_type")
    found = stated.get("default") if isinstance(stated, Mapping) else stated
    if isinstance(found, Mapping) and found.get("_type") in ("FqnToConfig", "ModuleFqnToConfig"):
        data = found.get("_data")
        named = next(iter(data.values()), None) if isinstance(data, Mapping) else None
        inner = [value for value in named.values() if value is not None] if isinstance(named, Mapping) else []
        if not inner or any(value != inner[0] for value in inner):
            raise CheckpointError(
                f"{where}: {found['_type']} with {len(inner)} configurations; supported are files all of whose layers have one"
            )
        found = inner[0]
    if not isinstance(found, Mapping) or not isinstance(found.get("_data"), Mapping):
        raise CheckpointError(
            f"{where}: quant_type is an object with torchao's configuration under default, got {str(stated)[:80]!r}; files "
            "older than that are pickles: save the model again with a newer torchao and Transformers"
        )
    return str(found.get("_type")), found["_data"]


def _named(value: Any) -> str:
    """Returns the name of an enumeration's member or of a type in torchao's JSON."""
    return str(value.get("_data") if isinstance(value, Mapping) else value)
