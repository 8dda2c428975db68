"""8-bit floats outside compressed-tensors. Weights are float8_e4m3fn [N, K], multiplied by their scales:

    quant_method fp8          weight_scale_inv float32 [ceil(N / n), ceil(K / k)] with weight_block_size [n, k] (DeepSeek's
                              128 x 128; despite "inv" it is a factor), or exponents of two; without blocks one scale,
                              weight_scale_inv or weight_scale, [] or [1]
    quant_method fbgemm_fp8   weight_scale float32 [N, 1]

Stacked experts (`Fp8Experts`) have gate_up_proj [E, 2 I, K] with gate_up_proj_scale_inv [E, ceil(2 I / n), ceil(K / k)], and
down_proj [E, K, I] likewise; or all four with their last two dimensions transposed. Single experts are like linear layers.

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

from lowbit.checkpoint.experts import MAX_EXPERTS, ExpertEntry, ExpertSchema, ExpertTensors
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
    """The layout of one configuration. scale_name: the tensor of the scales; None: weight_scale or weight_scale_inv.
    exponents: scales are stored as exponents of two. dynamic: activations are quantized dynamically. rule: the rule of their
    quantization. left_out: why they are not quantized, or empty.

    A per-tensor scale is written as weight_scale [], or as weight_scale_inv [1, 1] if that is the `scale_name`.
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

    @property
    def stacked(self) -> ExpertSchema | None:
        return Fp8Experts(self) if isinstance(self.granularity, PerBlock) else None

    def entry(self, layer: ForeignLayer) -> ForeignEntry:
        shape = layer.matrix("weight", (torch.float8_e4m3fn,))
        grid, name = scale_shape(self.granularity, shape), self._scale_of(layer)
        layer.expect(name, self.scale_dtypes, *(((1,), (), (1, 1)) if isinstance(self.granularity, PerTensor) else (grid,)))
        static = self._static_of(layer)
        if static is not None:
            layer.expect(static, SCALE_DTYPES, (1,), (), (1, 1))
        why = self.left_out or ("there is no scale for activations" if not self.dynamic and static is None else "")
        notes = (f"{why}: activations stay in 16 bits",) if why else ()
        return ForeignEntry(shape, self.scheme(static is not None), notes=notes)

    def used(self, layer: ForeignLayer) -> frozenset[str]:
        return frozenset({"weight", self._scale_of(layer), self._static_of(layer) or "weight"})

    def read(self, layer: ForeignLayer) -> QuantTensor:
        entry = self.entry(layer)
        assert entry.scheme is not None
        scale = read_scales(layer, self._scale_of(layer))
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

    @property
    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes that scales may have."""
        return (*SCALE_DTYPES, torch.float8_e8m0fnu, torch.uint8) if self.exponents else SCALE_DTYPES

    def scheme(self, static: bool) -> Scheme:
        """Returns the scheme of a layer. static: its activations have a static scale."""
        if not (self.dynamic or static):
            return Scheme(_E4M3, None, self.granularity)
        return Scheme(_E4M3, _E4M3, self.granularity, rule=self.rule)


class Fp8Experts(ExpertSchema):
    """Stacked experts with scales per block, as Transformers' FP8Experts has them. Static scales of activations are ignored,
    because each expert has its own scale and an `ExpertTensor` has one for all."""

    suffixes = tuple(
        f"{name}{kind}" for name in ("gate_up_proj", "down_proj") for kind in ("", "_scale_inv", "_activation_scale")
    )
    markers = ("gate_up_proj_scale_inv", "down_proj_scale_inv")

    def __init__(self, linear: Fp8) -> None:
        self.linear = linear

    def entry(self, layer: ForeignLayer) -> ExpertEntry:
        experts, *gate_up = layer.shape("gate_up_proj", (torch.float8_e4m3fn,), 3)
        others, *down = layer.shape("down_proj", (torch.float8_e4m3fn,), 3)
        transposed = self._transposed(layer)
        if experts != others or experts > MAX_EXPERTS or transposed is None:
            raise layer.error(
                "down_proj", f"{others} experts {down} do not go with {experts} of gate and up {gate_up}: shapes are "
                "[E, 2 I, K] and [E, K, I], or both transposed",
            )  # fmt: skip
        for name, stored in (("gate_up_proj", gate_up), ("down_proj", down)):
            grid = scale_shape(self._block(transposed), (stored[0], stored[1]))
            layer.expect(f"{name}_scale_inv", self.linear.scale_dtypes, (experts, *grid))
        static = any(layer.has(f"{name}_activation_scale") for name in ("gate_up_proj", "down_proj"))
        notes = ("static scales of experts' activations are ignored: activations stay in 16 bits",) if static else ()
        entries = [
            ForeignEntry((k, n) if transposed else (n, k), self.linear.scheme(False), notes=notes) for n, k in (gate_up, down)
        ]
        return ExpertEntry(experts, entries[0], entries[1])

    def read(self, layer: ForeignLayer) -> ExpertTensors:
        entry, transposed = self.entry(layer), bool(self._transposed(layer))
        assert entry.gate_up.scheme is not None
        return ExpertTensors(
            tuple(self._matrices(layer, "gate_up_proj", entry.gate_up.scheme, transposed)),
            tuple(self._matrices(layer, "down_proj", entry.gate_up.scheme, transposed)),
        )

    @staticmethod
    def _transposed(layer: ForeignLayer) -> bool | None:
        """Returns whether the matrices are stored as [K, N]; None if the shapes fit neither."""
        gate_up, down = (layer.shape(name, (torch.float8_e4m3fn,), 3)[1:] for name in ("gate_up_proj", "down_proj"))
        if gate_up == (2 * down[1], down[0]):
            return False
        return True if gate_up == (down[1], 2 * down[0]) else None

    def _block(self, transposed: bool) -> PerBlock:
        block = self.linear.granularity
        assert isinstance(block, PerBlock)
        return PerBlock(block.k, block.n) if transposed else block

    @staticmethod
    def _matrices(layer: ForeignLayer, name: str, scheme: Scheme, transposed: bool) -> list[QuantTensor]:
        codes, scale = read_fp8(layer, name), read_scales(layer, f"{name}_scale_inv")
        if transposed:
            codes, scale = codes.transpose(1, 2).contiguous(), scale.transpose(1, 2).contiguous()
        return [QuantTensor(each, of_blocks, None, scheme) for each, of_blocks in zip(codes, scale, strict=True)]


def read_scales(layer: ForeignLayer, suffix: str) -> Tensor:
    """Returns the scales in a tensor, which has floats or exponents of two."""
    return layer.scales(suffix) if layer.tensor(suffix).dtype in SCALE_DTYPES else read_e8m0(layer, suffix)
