"""bitsandbytes' 4-bit files (NF4 and FP4), as Transformers saves them. The weights [N, K], flattened row by row, are cut into
blocks of 64 (`blocksize`) with one scale each:

    weight                      uint8 [N * K / 2, 1]: two codes a byte, the first in the high nibble
    weight.absmax               float32 [blocks], or uint8 [blocks] with double quantization
    weight.quant_map            float32 [16]: the value of each code
    weight.nested_absmax        float32 [blocks / nested_blocksize], weight.nested_quant_map float32 [256]:
                                absmax = nested_quant_map[code] * nested_absmax[block] + nested_offset
    weight.quant_state.bitsandbytes__nf4 (or __fp4)   uint8, JSON with shape, dtype, blocksize, ...

    w = quant_map[code] * absmax

The 16 values of NF4 are neither evenly spaced nor eXmY floats, and blocks may cross rows. So no scheme here represents such a
layer without rounding its weights again, which a conversion must not do silently. Layers are therefore read as 16-bit weights,
equal to those with which bitsandbytes multiplies. To quantize them again is a separate, explicit step. Source: bitsandbytes
0.45 and later, functional.py (QuantState.from_dict, dequantize_blockwise, dequantize_4bit).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.checkpoint.foreign import ForeignEntry, ForeignLayer, ForeignSchema, config_value
from lowbit.checkpoint.schema import MAX_DIMENSION, CheckpointError
from lowbit.formats import QuantTensor

_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_REFUSAL = (
    "the 16 values of bitsandbytes' {kind} are on no grid that a scheme here has, so converting would round the weights a "
    "second time; write them out as 16-bit weights (--to dequantized) and quantize those (lowbit quantize), or better the "
    "16-bit checkpoint they came from"
)
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class _State:
    """The quantization state in a layer's JSON tensor."""

    kind: str
    shape: tuple[int, int]
    dtype: torch.dtype
    block: int
    nested_block: int
    nested_offset: float


@dataclass(frozen=True)
class Bitsandbytes(ForeignSchema):
    """4-bit layers; each layer's tensors state all parameters."""

    name = "bitsandbytes"
    suffixes = (
        *("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
        *_STATES,
    )
    markers = ("weight.absmax", *_STATES)
    small = _STATES

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: Path | str) -> Bitsandbytes:
        """Returns the schema of a `quantization_config`."""
        if not config_value(config, where, ("load_in_4bit", "_load_in_4bit"), bool, False):
            raise CheckpointError(
                f"{where}: bitsandbytes' LLM.int8() is not supported (it selects outlier columns at run time); quantize the "
                "16-bit checkpoint, for example with --scheme w8a16"
            )
        return cls()

    def entry(self, layer: ForeignLayer) -> ForeignEntry:
        state = _state(layer)
        (n, k), blocks = state.shape, -(-math.prod(state.shape) // state.block)
        layer.expect("weight", (torch.uint8,), ((n * k + 1) // 2, 1))
        layer.expect("weight.quant_map", (torch.float32,), (16,))
        if layer.has("weight.nested_absmax"):
            layer.expect("weight.absmax", (torch.uint8,), (blocks,))
            layer.expect("weight.nested_absmax", (torch.float32,), (-(-blocks // state.nested_block),))
            layer.expect("weight.nested_quant_map", (torch.float32,), (256,))
        else:
            layer.expect("weight.absmax", (torch.float32,), (blocks,))
        return ForeignEntry((n, k), None, _REFUSAL.format(kind=state.kind.upper()))

    def used(self, layer: ForeignLayer) -> frozenset[str]:
        return frozenset(self.suffixes) - set(_STATES) | {next(s for s in _STATES if layer.has(s))}

    def read(self, layer: ForeignLayer) -> QuantTensor:
        raise layer.error("weight", self.entry(layer).refusal)

    def write(self, q: QuantTensor) -> dict[str, Tensor]:
        raise ValueError("bitsandbytes files cannot be written")

    def dequantize(self, layer: ForeignLayer, dtype: torch.dtype) -> Tensor:
        """Returns the weights, rounded to the dtype of the file and then to `dtype`, as in bitsandbytes."""
        shape = self.entry(layer).shape
        state, data = _state(layer), layer.tensor("weight").flatten()
        codes = torch.stack((data >> 4, data & 15), dim=1).flatten()[: shape[0] * shape[1]].long()
        absmax = layer.tensor("weight.absmax")
        if layer.has("weight.nested_absmax"):
            nested = layer.scales("weight.nested_absmax").repeat_interleave(state.nested_block)[: absmax.numel()]
            absmax = layer.scales("weight.nested_quant_map")[absmax.long()] * nested + state.nested_offset
        else:
            absmax = layer.scales("weight.absmax")
        values = layer.scales("weight.quant_map")[codes] * absmax.repeat_interleave(state.block)[: codes.numel()]
        return values.to(state.dtype).to(dtype).reshape(shape)


def _state(layer: ForeignLayer) -> _State:
    suffix = next((s for s in _STATES if layer.has(s)), _STATES[0])
    try:
        raw = json.loads(bytes(layer.tensor(suffix).to(torch.uint8).tolist()))
    except (ValueError, RecursionError) as error:
        raise layer.error(suffix, f"not JSON ({error})") from error
    if not isinstance(raw, dict):
        raise layer.error(suffix, "not a JSON object")
    shape, dtype, offset = raw.get("shape"), _DTYPES.get(str(raw.get("dtype"))), raw.get("nested_offset", 0.0)
    blocks = raw.get("blocksize"), raw.get("nested_blocksize", 1)
    good = isinstance(shape, list) and len(shape) == 2 and all(type(v) is int and 0 < v < MAX_DIMENSION for v in shape)
    if not good or dtype is None or not all(type(v) is int and 0 < v <= 1 << 20 for v in blocks):
        raise layer.error(suffix, f"shape, dtype or block sizes are invalid: {str(raw)[:200]}")
    if type(offset) not in (int, float) or not math.isfinite(offset):
        raise layer.error(suffix, f"nested_offset must be a number, got {offset!r}")
    assert isinstance(shape, list)
    return _State(suffix[-3:], (shape[0], shape[1]), dtype, int(str(blocks[0])), int(str(blocks[1])), float(offset))
