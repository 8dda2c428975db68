"""gpt-oss's own files (`quant_method: "mxfp4"`): stacked experts in e2m1, in groups of 32 with power-of-two scales. For E
experts with gate and up [2 I, K] and down [K, I]:

    gate_up_proj_blocks  uint8 [E, 2 I, K / 32, 16]   codes of a group, the even one in the low nibble
    gate_up_proj_scales  uint8 [E, 2 I, K / 32]       exponents of two plus 127
    gate_up_proj_bias    float [E, 2 I]
    down_proj_blocks     uint8 [E, K, I / 32, 16], down_proj_scales and down_proj_bias likewise

w = code * 2^(exponent - 127). Rows of the gate and of up alternate, the gate's first. All other layers have 16 bits.
Source: Transformers 5.23, integrations/mxfp4.py; openai/gpt-oss, gpt_oss/torch/weights.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.checkpoint.experts import MAX_EXPERTS, ExpertEntry, ExpertSchema, ExpertTensors, alternating, gate_first
from lowbit.checkpoint.foreign import SCALE_DTYPES, ForeignEntry, ForeignLayer, ForeignSchema, read_e8m0, write_e8m0
from lowbit.checkpoint.schema import CheckpointError
from lowbit.formats import PerGroup, QuantTensor, Scheme, float_format, pack_words, unpack_words

GROUP, BYTES = 32, 16
SCHEME = Scheme(float_format(2, 1), None, PerGroup(GROUP))


@dataclass(frozen=True)
class Mxfp4(ForeignSchema):
    """gpt-oss's files. They have no quantized layers but stacked experts (`stacked`)."""

    name = "mxfp4"
    suffixes = ()
    markers = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: Path | str) -> Mxfp4:
        """Returns the schema of a `quantization_config`, whose only fields are names of layers that are not quantized."""
        return cls()

    @property
    def stacked(self) -> ExpertSchema:
        return Mxfp4Experts()

    def entry(self, layer: ForeignLayer) -> ForeignEntry:
        raise CheckpointError(f"{layer.where}: {layer.name}: mxfp4 files have quantized experts only")

    def read(self, layer: ForeignLayer) -> QuantTensor:
        raise CheckpointError(f"{layer.where}: {layer.name}: mxfp4 files have quantized experts only")

    def write(self, q: QuantTensor) -> dict[str, Tensor]:
        raise ValueError("mxfp4 files have quantized experts only")


class Mxfp4Experts(ExpertSchema):
    """The stacked experts of gpt-oss's files."""

    suffixes = tuple(f"{name}_{kind}" for name in ("gate_up_proj", "down_proj") for kind in ("blocks", "scales", "bias"))
    markers = tuple(name for name in suffixes if name.endswith(("_blocks", "_scales")))

    def entry(self, layer: ForeignLayer) -> ExpertEntry:
        experts, rows, k = self._shape(layer, "gate_up_proj")
        others, n, width = self._shape(layer, "down_proj")
        if rows % 2 or (others, n, 2 * width) != (experts, k, rows):
            raise layer.error(
                "down_proj_blocks", f"{others} experts [{n}, {width}] do not go with {experts} of gate and up [{rows}, {k}]"
            )
        for name, size in (("gate_up_proj", rows), ("down_proj", n)):
            if layer.has(f"{name}_bias"):
                layer.expect(f"{name}_bias", SCALE_DTYPES, (experts, size))
        biased = layer.has("gate_up_proj_bias") or layer.has("down_proj_bias")
        return ExpertEntry(experts, ForeignEntry((rows, k), SCHEME), ForeignEntry((n, width), SCHEME), biased=biased)

    def read(self, layer: ForeignLayer) -> ExpertTensors:
        self.entry(layer)
        biases = [layer.scales(f"{n}_bias") if layer.has(f"{n}_bias") else None for n in ("gate_up_proj", "down_proj")]
        return ExpertTensors(
            tuple(self._matrices(layer, "gate_up_proj", halves=True)), tuple(self._matrices(layer, "down_proj")),
            None if biases[0] is None else gate_first(biases[0]), biases[1],
        )  # fmt: skip

    def write(self, experts: ExpertTensors) -> dict[str, Tensor]:
        """Returns the tensors of a layer by suffix; the inverse of `read`. Raises ValueError for other schemes."""
        tensors: dict[str, Tensor] = {}
        for name, matrices in (("gate_up_proj", experts.gate_up), ("down_proj", experts.down)):
            if any(q.scheme != SCHEME or q.input_transform.parts or q.low_rank is not None for q in matrices):
                raise ValueError(f"mxfp4 files hold experts in {SCHEME} alone, got {matrices[0].scheme}")
            codes, scale = torch.stack([q.codes for q in matrices]), torch.stack([q.scale for q in matrices])
            if name == "gate_up_proj":
                codes, scale = alternating(codes), alternating(scale)
            blocks = pack_words(codes.flatten(0, 1), 4).reshape(*scale.shape, BYTES)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": write_e8m0(scale)}
        for name, bias in (("gate_up_proj", experts.gate_up_bias), ("down_proj", experts.down_bias)):
            if bias is not None:
                tensors[f"{name}_bias"] = alternating(bias) if name == "gate_up_proj" else bias
        return tensors

    @staticmethod
    def _shape(layer: ForeignLayer, name: str) -> tuple[int, int, int]:
        """Returns (experts, N, K) of one projection, and checks its two tensors."""
        experts, n, groups, width = shape = layer.shape(f"{name}_blocks", (torch.uint8,), 4)
        if width != BYTES or experts > MAX_EXPERTS:
            raise layer.error(f"{name}_blocks", f"groups of {GROUP} codes have {BYTES} bytes each, found {shape}")
        layer.expect(f"{name}_scales", (torch.uint8, torch.float8_e8m0fnu), (experts, n, groups))
        return experts, n, groups * GROUP

    @staticmethod
    def _matrices(layer: ForeignLayer, name: str, halves: bool = False) -> list[QuantTensor]:
        """Returns the matrices of one projection; `halves`: with the rows of the gate before those of up."""
        blocks, scale = layer.tensor(f"{name}_blocks"), read_e8m0(layer, f"{name}_scales")
        if halves:
            blocks, scale = gate_first(blocks), gate_first(scale)
        k = scale.shape[2] * GROUP
        return [
            QuantTensor(unpack_words(codes.flatten(1), 4, k), each, None, SCHEME)
            for codes, each in zip(blocks, scale, strict=True)
        ]
