"""The tensors of a quantized layer in TensorRT-LLM's checkpoints, by `quant_algo` in config.json.

    W4A16_AWQ as ModelOpt exports it: weights in row-major order, which `trtllm-build` repacks for a GPU
        weight                    int8 [N/2, K], two's complement, the even row of two in the low nibble
        weights_scaling_factor    float [N, K/g]
        prequant_scaling_factor   float [K] or [1, K], the pre_quant_scale of x
    W8A16, W4A16: bytes in the layout of one generation of GPUs
        weight                    int8 [K, N * bits / 8]
        per_channel_scale         float [N]
    W4A16_GPTQ, W8A16_GPTQ, and W4A16_AWQ that TensorRT-LLM converted itself: likewise
        weight                    the same bytes under the model's type, fp16 or bf16 [K, N * bits / 16] (or as int8)
        weights_scaling_factor    float [K/g, N]
        zero                      float [K/g, N], (8 - zero point) * scale, rounded: w = (code - 8) * scale + zero
        prequant_scaling_factor   as above

A shape [K, ..] is that of w^T, but the bytes have one of three layouts of `pack/tensorrt_llm.py`. The layout depends on the GPU
that converted the model and on the release, and config.json does not state it. The user adds the field `weight_order`, which
TensorRT-LLM's readers ignore.

Source: TensorRT-LLM, load_weights_from_gptq (tensorrt_llm/models/llama/convert.py), weight_only_quantize_dict
(tensorrt_llm/models/convert_utils.py), preprocess_perlayer_weights (tensorrt_llm/models/modeling_utils.py),
postprocess_weight_only_groupwise and preprocess_weights_for_mixed_gemm (tensorrt_llm/quantization/functional.py,
cutlass_preprocessors.cpp); files that ModelOpt 0.41 exports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowbit.checkpoint import CheckpointError
from lowbit.checkpoint.foreign import MAX_GROUP, SCALE_DTYPES, ForeignEntry, ForeignLayer, ForeignSchema
from lowbit.formats import (
    IDENTITY,
    InputTransform,
    PerChannel,
    PerGroup,
    QuantTensor,
    Scheme,
    ZeroPoint,
    int_format,
    uint_format,
)
from lowbit.pack import ColumnMajorTileInterleave, Layout, PermutedColumnMajor, SignedColumnMajor
from lowbit.pack.tensorrt_llm import from_signed_row_major

AWQ = "W4A16_AWQ"

ORDERS: dict[str, Layout] = {
    "interleaved": ColumnMajorTileInterleave(),
    "permuted": PermutedColumnMajor(),
    "column_major": SignedColumnMajor(),
}
"""Allowed values of `weight_order` in config.json."""

_HOW_TO_SAY = (
    'state it in config.json, "weight_order": "interleaved" if TensorRT-LLM converted the model on a GPU of sm_75 to sm_89, or '
    'of sm_120 and newer; on Hopper (sm_90) "permuted", or "column_major" with a release of 2024 and "interleaved" with one of '
    '2023; on sm_100 "column_major". With the wrong one the model answers nonsense, so ask it something'
)

_CHANNELS = {"W8A16": 8, "W4A16": 4}
_GROUPS = {"W8A16_GPTQ": 8, "W4A16_GPTQ": 4, AWQ: 4}
READ = (AWQ, *_CHANNELS, "W4A16_GPTQ", "W8A16_GPTQ")


def schema(config: Mapping[str, Any], where: Path, weight_type: torch.dtype) -> ForeignSchema:
    """Returns the schema of the layers of a checkpoint with this config.json, at `where`.

    weight_type: the dtype of its quantized weights. Raises CheckpointError for unsupported algorithms, and if the order of
    weights is not stated.
    """
    stated = config["quantization"]
    algorithm, group, zeros = stated.get("quant_algo"), stated.get("group_size"), bool(stated.get("has_zero_point"))
    if algorithm not in READ:
        raise CheckpointError(
            f"{where}: quant_algo {algorithm!r}; of TensorRT-LLM's checkpoints those of {', '.join(READ)} are read. Export the "
            "model for Transformers with the tool that quantized it"
        )
    if algorithm in _CHANNELS:
        return PerChannelWeights(_CHANNELS[algorithm], _order(config, where, algorithm))
    if type(group) is not int or not 0 < group <= MAX_GROUP:
        raise CheckpointError(f"{where}: group_size is a positive number, got {group!r}")
    if algorithm != AWQ or weight_type.is_floating_point:
        return GroupedWeights(_GROUPS[algorithm], group, zeros, _order(config, where, algorithm))
    if zeros:
        raise CheckpointError(f"{where}: has_zero_point is true, and weights in plain order have no zero points")
    return PlainAwq(group)


def _order(config: Mapping[str, Any], where: Path, algorithm: str) -> Layout:
    order = config.get("weight_order")
    if order is None:
        raise CheckpointError(
            f"{where}: weights of {algorithm} lie in the order of one generation of GPUs, which the files do not name; "
            f"{_HOW_TO_SAY}"
        )
    if not isinstance(order, str) or order not in ORDERS:
        raise CheckpointError(f"{where}: weight_order is {order!r}, one of {', '.join(ORDERS)} is expected; {_HOW_TO_SAY}")
    return ORDERS[order]


class _Schema(ForeignSchema):
    """Base class: schemas that are only read."""

    name: ClassVar[str] = "tensorrt-llm"

    def write(self, q: QuantTensor) -> dict[str, Tensor]:
        raise ValueError("layers of TensorRT-LLM are written fused: models/tensorrt_llm.py")


@dataclass(frozen=True)
class PlainAwq(_Schema):
    """ModelOpt's W4A16_AWQ, in groups of `group`."""

    group: int

    suffixes: ClassVar[tuple[str, ...]] = ("weight", "weights_scaling_factor", "prequant_scaling_factor")
    markers: ClassVar[tuple[str, ...]] = ("weights_scaling_factor",)

    def entry(self, layer: ForeignLayer) -> ForeignEntry:
        pairs, k = layer.matrix("weight", (torch.int8, torch.uint8))
        _check_groups(layer, k, self.group)
        layer.expect("weights_scaling_factor", SCALE_DTYPES, (2 * pairs, k // self.group))
        _check_factors(layer, k)
        return ForeignEntry((2 * pairs, k), Scheme(int_format(4), None, PerGroup(self.group)))

    def read(self, layer: ForeignLayer) -> QuantTensor:
        entry, stored = self.entry(layer), layer.tensor("weight").t().contiguous()
        assert entry.scheme is not None
        codes = from_signed_row_major(stored, 4, 2 * stored.shape[1])
        return QuantTensor(codes, layer.scales("weights_scaling_factor"), None, entry.scheme, _input_transform(layer))


@dataclass(frozen=True)
class PerChannelWeights(_Schema):
    """W8A16 and W4A16: integers of `bits` bits in an `order`, a scale for each output channel."""

    bits: int
    order: Layout

    suffixes: ClassVar[tuple[str, ...]] = ("weight", "per_channel_scale")
    markers: ClassVar[tuple[str, ...]] = ("per_channel_scale",)

    def entry(self, layer: ForeignLayer) -> ForeignEntry:
        shape = _shape(layer, self.bits, self.order, (torch.int8, torch.uint8))
        layer.expect("per_channel_scale", SCALE_DTYPES, (shape[0],), (1, shape[0]))
        return ForeignEntry(shape, Scheme(int_format(self.bits), None, PerChannel()))

    def read(self, layer: ForeignLayer) -> QuantTensor:
        entry = self.entry(layer)
        assert entry.scheme is not None
        scale = layer.scales("per_channel_scale").reshape(-1, 1)
        return QuantTensor(_codes(layer, self.bits, self.order, entry.shape), scale, None, entry.scheme)


@dataclass(frozen=True)
class GroupedWeights(_Schema):
    """W4A16_GPTQ and similar: integers of `bits` bits in an `order`, group scales, and with `zeros` floating-point zeros.

    Zeros that are all 0 are dropped. Others are converted in float32, in which (code - 8) * scale + zero equals
    code * scale + (zero - 8 * scale); the integer zero points of GPTQ cannot be recovered from the rounded zeros.
    """

    bits: int
    group: int
    zeros: bool
    order: Layout

    suffixes: ClassVar[tuple[str, ...]] = ("weight", "weights_scaling_factor", "zero", "prequant_scaling_factor")
    markers: ClassVar[tuple[str, ...]] = ("weights_scaling_factor",)
    small: ClassVar[tuple[str, ...]] = ("zero",)

    def entry(self, layer: ForeignLayer) -> ForeignEntry:
        types = (torch.float16, torch.bfloat16, torch.int8, torch.uint8)
        n, k = _shape(layer, self.bits, self.order, types)
        _check_groups(layer, k, self.group)
        layer.expect("weights_scaling_factor", SCALE_DTYPES, (k // self.group, n))
        if self.zeros:
            layer.expect("zero", SCALE_DTYPES, (k // self.group, n))
        elif layer.has("zero"):
            raise layer.error("zero", "config.json says has_zero_point false; one of the two is wrong")
        _check_factors(layer, k)
        if self._added(layer) is None:
            return ForeignEntry((n, k), Scheme(int_format(self.bits), None, PerGroup(self.group)))
        return ForeignEntry((n, k), Scheme(uint_format(self.bits), None, PerGroup(self.group), ZeroPoint.FLOAT))

    def read(self, layer: ForeignLayer) -> QuantTensor:
        entry, zero = self.entry(layer), self._added(layer)
        assert entry.scheme is not None
        scale = layer.scales("weights_scaling_factor").t().contiguous()
        if zero is not None:
            scale = scale.float()
            zero = zero.t().float().contiguous() - scale * (1 << (self.bits - 1))
        codes = _codes(layer, self.bits, self.order, entry.shape)
        return QuantTensor(codes, scale, zero, entry.scheme, _input_transform(layer))

    def _added(self, layer: ForeignLayer) -> Tensor | None:
        if not self.zeros:
            return None
        zero = layer.scales("zero")
        return zero if bool(zero.any()) else None


def _shape(layer: ForeignLayer, bits: int, order: Layout, types: tuple[torch.dtype, ...]) -> tuple[int, int]:
    """Returns (N, K) of weights stored under the shape of w^T; raises CheckpointError if `order` cannot have that shape."""
    k, width = layer.matrix("weight", types)
    n = width * layer.tensors["weight"].dtype.itemsize * 8 // bits
    if reasons := order.refusals(bits, (n, k)):
        raise layer.error("weight", f"N {n} and K {k} do not go with the weight_order of config.json: {'; '.join(reasons)}")
    return n, k


def _codes(layer: ForeignLayer, bits: int, order: Layout, shape: tuple[int, int]) -> Tensor:
    """Returns codes uint8 [N, K] of preprocessed bytes."""
    (plane,) = order.plane_shapes(bits, shape)
    return order.unpack((layer.tensor("weight").contiguous().view(torch.uint8).reshape(plane),), bits, shape)


def _check_groups(layer: ForeignLayer, k: int, group: int) -> None:
    if k % group:
        raise layer.error("weight", f"{k} input channels are no whole groups of {group}")


def _check_factors(layer: ForeignLayer, k: int) -> None:
    if layer.has("prequant_scaling_factor"):
        layer.expect("prequant_scaling_factor", SCALE_DTYPES, (k,), (1, k))


def _input_transform(layer: ForeignLayer) -> InputTransform:
    """Returns the pre_quant_scale, or the identity if it is 1 everywhere."""
    if not layer.has("prequant_scaling_factor"):
        return IDENTITY
    factor = layer.scales("prequant_scaling_factor").reshape(-1)
    return IDENTITY if bool((factor == 1).all()) else InputTransform(pre_quant_scale=factor.clone())
