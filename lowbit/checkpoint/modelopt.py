"""ModelOpt's exports for Transformers (`quant_method: "modelopt"`). These values of `quant_algo` are supported:

    NVFP4, W4A16_NVFP4   weight uint8 [N, K / 2], weight_scale float8_e4m3fn [N, K / 16], weight_scale_2 float32 [];
                         explained in nvfp4.py
    FP8                  weight float8_e4m3fn [N, K], weight_scale and input_scale float32 [], as other fp8 files (fp8.py)
    W4A16_AWQ            weight uint8 [N / 2, K], int4 in two's complement, row 2i in the low nibbles of row i and 2i + 1 in the
                         high ones; weight_scale float [N, K / g], groups are full; pre_quant_scale float [K], a factor of x, if
                         it could not be folded into a norm before the layer

4-bit activations are kept in 16 bits.
Source: ModelOpt 0.47.0, torch/export/unified_export_hf.py, quant_utils.py (pack_int4_in_uint8) and convert_hf_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowbit.checkpoint.foreign import SCALE_DTYPES, ForeignEntry, ForeignLayer, ForeignSchema, config_value
from lowbit.checkpoint.fp8 import Fp8
from lowbit.checkpoint.nvfp4 import SCHEME, nvfp4_shape, read_nvfp4
from lowbit.checkpoint.schema import CheckpointError
from lowbit.formats import ActivationRule, InputTransform, PerGroup, QuantTensor, Scheme, int_format

_NVFP4, _AWQ = ("NVFP4", "W4A16_NVFP4"), "W4A16_AWQ"
_TENSORS = ("weight", "weight_scale", "weight_scale_2")


def schema(config: Mapping[str, Any], where: Path | str) -> ForeignSchema:
    """Returns the schema of one of ModelOpt's exports. Raises CheckpointError for an unsupported algorithm."""
    algorithm = config_value(config, where, ("quant_algo",), str)
    if algorithm == "FP8":
        fp8 = Fp8.from_config({"quant_method": "fp8", "activation_scheme": "static"}, where)
        return replace(fp8, rule=ActivationRule.OWN)  # as lowbit, ModelOpt multiplies x by 448 / amax
    if algorithm == _AWQ:
        return Int4Awq()
    if algorithm not in _NVFP4:
        raise CheckpointError(
            f"{where}: quant_algo {algorithm!r}; supported ModelOpt exports are FP8, {_AWQ}, {', '.join(_NVFP4)}. Export "
            "the model in one of these, or quantize its 16-bit checkpoint here"
        )
    return Nvfp4(algorithm != "W4A16_NVFP4")


@dataclass(frozen=True)
class Nvfp4(ForeignSchema):
    """NVFP4 weights; `activations`: True if the files also state 4-bit activations, which stay in 16 bits here."""

    activations: bool

    name: ClassVar[str] = "modelopt"
    suffixes: ClassVar[tuple[str, ...]] = (*_TENSORS, "input_scale", "pre_quant_scale")
    markers: ClassVar[tuple[str, ...]] = ("weight_scale", "weight_scale_2")

    def entry(self, layer: ForeignLayer) -> ForeignEntry:
        if layer.has("pre_quant_scale"):
            raise layer.error("pre_quant_scale", "not supported in NVFP4 and W4A16_NVFP4 files")
        shape = nvfp4_shape(layer, *_TENSORS)
        notes = ("activations stay in 16 bits, the files asked for fp4_e2m1",) if self.activations else ()
        return ForeignEntry(shape, SCHEME, notes=notes)

    def read(self, layer: ForeignLayer) -> QuantTensor:
        return read_nvfp4(layer, *_TENSORS, divided=False)

    def write(self, q: QuantTensor) -> dict[str, Tensor]:
        raise ValueError("NVFP4 files cannot be written: the two factors of a scale are not stored")


@dataclass(frozen=True)
class Int4Awq(ForeignSchema):
    """4-bit integers in groups; the group size follows from the shapes of weights and scales."""

    name: ClassVar[str] = "modelopt"
    suffixes: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", "pre_quant_scale")
    markers: ClassVar[tuple[str, ...]] = ("weight_scale",)

    def entry(self, layer: ForeignLayer) -> ForeignEntry:
        pairs, k = layer.matrix("weight", (torch.uint8,))
        rows, groups = layer.matrix("weight_scale", SCALE_DTYPES)
        if rows != 2 * pairs or k % groups:
            raise layer.error(
                "weight_scale", f"{2 * pairs} rows of whole groups of {k} input channels are expected, found {rows} x {groups}"
            )
        if layer.has("pre_quant_scale"):
            layer.expect("pre_quant_scale", SCALE_DTYPES, (k,))
        return ForeignEntry((rows, k), Scheme(int_format(4), None, PerGroup(k // groups)))

    def read(self, layer: ForeignLayer) -> QuantTensor:
        entry, stored = self.entry(layer), layer.tensor("weight")
        assert entry.scheme is not None
        signed = torch.stack((stored & 15, stored >> 4), dim=1).reshape(entry.shape)
        of_x = InputTransform(pre_quant_scale=layer.scales("pre_quant_scale") if layer.has("pre_quant_scale") else None)
        return QuantTensor(signed ^ 8, layer.scales("weight_scale"), None, entry.scheme, of_x)

    def write(self, q: QuantTensor) -> dict[str, Tensor]:
        raise ValueError("ModelOpt's files cannot be written")
