"""8-bit floats outside compressed-tensors. Weights are float8_e4m3fn [N, K], multiplied by their scales:

    quant_method fp8          weight_scale_inv float32 [ceil(N / n), ceil(K / k)] with weight_block_size [n, k] (DeepSeek's
                              128 x 128; despite "inv" it is a factor), or exponents of two; without blocks one scale,
                              weight_scale_inv or weight_scale, [] or [1]
    quant_method fbgemm_fp8   weight_scale float32 [N, 1]

An input_scale or activation_scale, [] or [1], is the static scale of the layer's input. Without one, activations are quantized
as in Transformers' kernels (the scheme's rules _hf and _fb): per group as long as a block, or per token.
Source: Transformers, integrations/finegrained_fp8.py and integrations/fbgemm_fp8.py, with
kernels-community/finegrained-fp8 (act_quant.py) and FBGEMM (quantize.cu); vLLM's fp8 checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.checkpoint.foreign import (
    MAX_GROUP,
    SCALE_DTYPES,
    ForeignEntry,
    ForeignLayer,
    ForeignSchema,
    config_value,
    read_e8m0,
    read_fp8,
    write_e8m0,
)
from lowbit.checkpoint.schema import CheckpointError
from lowbit.formats import (
    ActivationRule,
    Granularity,
    InputTransform,
    PerBlock,
    PerChannel,
    PerTensor,
    QuantTensor,
    Scheme,
    float_format,
    scale_shape,
)

FBGEMM_CEILING = 1200.0
"""The only supported `activation_scale_ub` (kernels/reference/activations.py), Transformers' default."""

_E4M3 = float_format(4, 3)
_STATIC = ("activation_scale", "input_scale")


@dataclass(frozen=True)
class Fp8(ForeignSchema):
    """Granularity of the scales, the name of their tensor (None: either of two), whether they are exponents, whether
    activations are quantized dynamically; `rule` of their quantization, `left_out`: why they are not quantized.

    A per-tensor scale is written as weight_scale [], or as weight_scale_inv [1, 1] by a schema from `fit`.
    """

    granularity: Granularity
    scale_name: str | None
    exponents: bool = False
    dynamic: bool = True
    rule: ActivationRule = ActivationRule.FINEGRAINED_FP8
    left_out: str = ""

    name = "fp8"
    suffixes = ("weight", "weight_scale", "weight_scale_inv", *_STATIC, "input_scale_ub")
    markers = ("weight_scale", "weight_scale_inv")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: Path | str) -> Fp8:
        """Returns the schema of a `quantization_config`."""
        if config.get("quant_method") == "fbgemm_fp8":
            ceiling = config.get("activation_scale_ub", FBGEMM_CEILING)
            left_out = "" if ceiling == FBGEMM_CEILING else f"activation_scale_ub is {ceiling!r}, supported is {FBGEMM_CEILING}"
            return cls(PerChannel(), "weight_scale", dynamic=not left_out, rule=ActivationRule.FBGEMM, left_out=left_out)
        fmt = config_value(config, where, ("fmt",), str, "e4m3")
        if fmt not in ("e4m3", "float8_e4m3fn"):
            raise CheckpointError(f"{where}: fmt is {fmt!r}; supported are weights in e4m3")
        dynamic = config_value(config, where, ("activation_scheme",), str, "dynamic") == "dynamic"
        block = config.get("weight_block_size")
        if block is None:
            return cls(PerTensor(), None, dynamic=dynamic)
        if not (isinstance(block, list) and len(block) == 2 and all(type(v) is int and 0 < v <= MAX_GROUP for v in block)):
            raise CheckpointError(f"{where}: weight_block_size is two positive numbers [n, k] or null, got {block!r}")
        return cls(PerBlock(*block), "weight_scale_inv", config.get("scale_fmt") == "ue8m0", dynamic)

    def entry(self, layer: ForeignLayer) -> ForeignEntry:
        shape = layer.matrix("weight", (torch.float8_e4m3fn,))
        grid, name = scale_shape(self.granularity, shape), self._scale_of(layer)
        dtypes: tuple[torch.dtype, ...] = SCALE_DTYPES
        if self.exponents:
            dtypes = (*SCALE_DTYPES, torch.float8_e8m0fnu, torch.uint8)
        layer.expect(name, dtypes, *(((1,), (), (1, 1)) if isinstance(self.granularity, PerTensor) else (grid,)))
        static = self._static_of(layer)
        if static is not None:
            layer.expect(static, SCALE_DTYPES, (1,), (), (1, 1))
        why = self.left_out or ("there is no scale for activations" if not self.dynamic and static is None else "")
        notes = (f"{why}: activations stay in 16 bits",) if why else ()
        return ForeignEntry(shape, self._scheme(static is not None), notes=notes)

    def used(self, layer: ForeignLayer) -> frozenset[str]:
        return frozenset({"weight", self._scale_of(layer), self._static_of(layer) or "weight"})

    def read(self, layer: ForeignLayer) -> QuantTensor:
        entry = self.entry(layer)
        assert entry.scheme is not None
        name = self._scale_of(layer)
        exponents = layer.tensor(name).dtype not in SCALE_DTYPES
        scale = read_e8m0(layer, name) if exponents else layer.scales(name)
        static = self._static_of(layer)
        return QuantTensor(
            read_fp8(layer, "weight"), scale.reshape(scale_shape(self.granularity, entry.shape)), None, entry.scheme,
            InputTransform(activation_scale=None if static is None else layer.scales(static).float().reshape(1)),
        )  # fmt: skip

    def write(self, q: QuantTensor) -> dict[str, Tensor]:
        scale = q.scale.contiguous()
        name = self.scale_name or "weight_scale"
        if isinstance(self.granularity, PerTensor):
            scale = scale.reshape(() if name == "weight_scale" else (1, 1))
        elif self.exponents:
            scale = write_e8m0(scale).view(torch.float8_e8m0fnu)
        static = q.input_transform.activation_scale
        beside = {} if static is None else {"input_scale": static}
        return {"weight": q.codes.contiguous().view(torch.float8_e4m3fn), name: scale, **beside}

    def fit(self, layer: ForeignLayer) -> Fp8:
        """Returns this schema with the name of a layer's scale."""
        return replace(self, scale_name=self._scale_of(layer))

    def _scale_of(self, layer: ForeignLayer) -> str:
        if self.scale_name is not None:
            return self.scale_name
        return "weight_scale_inv" if layer.has("weight_scale_inv") else "weight_scale"

    @staticmethod
    def _static_of(layer: ForeignLayer) -> str | None:
        return next((suffix for suffix in _STATIC if layer.has(suffix)), None)

    def _scheme(self, static: bool) -> Scheme:
        if not (self.dynamic or static):
            return Scheme(_E4M3, None, self.granularity)
        return Scheme(_E4M3, _E4M3, self.granularity, rule=self.rule)
