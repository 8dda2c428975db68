"""AWQ files of AutoAWQ's "gemm" version, as AutoAWQ and auto-round write them. For w [N, K] and G groups along K:

    qweight   int32 [K, N / 8]   8 columns of a row to a word; nibble i holds column 0 2 4 6 1 3 5 7 [i] of them
    qzeros    int32 [G, N / 8]   zero points in the same order, as they are
    scales    float [G, N]

    w[n, k] = scales[g, n] * (q[k, n] - z[g, n])  with  g = k // group size

Source: AutoAWQ, awq/modules/linear/gemm.py and awq/utils/packing_utils.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.checkpoint.foreign import (
    SCALE_DTYPES,
    ForeignEntry,
    ForeignLayer,
    ForeignSchema,
    bit_width,
    codes_to_words,
    config_value,
    group_size,
    words_to_codes,
)
from lowbit.checkpoint.schema import CheckpointError
from lowbit.formats import IntFormat, PerChannel, PerGroup, QuantTensor, Scheme, ZeroPoint, uint_format

_COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)
_NIBBLE_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Awq(ForeignSchema):
    """Group size (-1: all of K)."""

    group: int

    name = "awq"
    suffixes = ("qweight", "qzeros", "scales")
    markers = ("qweight", "qzeros", "scales")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: Path | str) -> Awq:
        """From `quantization_config`, or the content of quant_config.json."""
        version = config_value(config, where, ("version", "format"), str, "gemm")
        if version.lower() != "gemm":
            raise CheckpointError(
                f"{where}: AWQ version {version!r}; read is gemm, the others are bound to one kernel: save the model as gemm "
                "with the tool that wrote it"
            )
        bit_width(config_value(config, where, ("bits", "w_bit"), int), where, (4,), "AWQ")
        if config.get("zero_point") is False:
            raise CheckpointError(f"{where}: zero_point is false, but AWQ's gemm files always have zero points")
        return cls(group_size(config_value(config, where, ("group_size", "q_group_size"), int), where))

    def config(self, kept: Iterable[str]) -> dict[str, Any]:
        """`quantization_config` of a model whose linear layers `kept` are not quantized."""
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": self.group,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": list(kept),
        }

    def entry(self, layer: ForeignLayer) -> ForeignEntry:
        return ForeignEntry(self._shape(layer), self._scheme)

    def read(self, layer: ForeignLayer) -> QuantTensor:
        self._shape(layer)
        codes = _unpack(layer.tensor("qweight")).t().contiguous()
        zero = _unpack(layer.tensor("qzeros")).t().contiguous()
        return QuantTensor(codes, layer.scales("scales").t().contiguous(), zero, self._scheme)

    def write(self, q: QuantTensor) -> dict[str, Tensor]:
        zero = q.zero if q.zero is not None else torch.full_like(q.scale, 8, dtype=torch.uint8)
        return {"qweight": _pack(q.codes.t()), "qzeros": _pack(zero.t()), "scales": q.scale.t().contiguous()}

    @property
    def _scheme(self) -> Scheme:
        return Scheme(uint_format(4), None, PerChannel() if self.group == -1 else PerGroup(self.group), ZeroPoint.INTEGER)

    def _shape(self, layer: ForeignLayer) -> tuple[int, int]:
        groups, n = layer.matrix("scales", SCALE_DTYPES)
        k, words = layer.matrix("qweight", (torch.int32,))
        if 8 * words != n:
            raise layer.error("qweight", f"{n} channels (as scales has) fill {n / 8:g} words a row, found {(k, words)}")
        size = k if self.group == -1 else self.group
        if groups != -(-k // size):
            raise layer.error("scales", f"{groups} groups do not divide {k} input channels into groups of {size}")
        layer.expect("qzeros", (torch.int32,), (groups, words))
        return n, k


def refusals(q: QuantTensor) -> tuple[str, ...]:
    """Why AWQ files cannot hold `q`; empty when they can."""
    scheme, reasons = q.scheme, []
    if not isinstance(scheme.weight, IntFormat) or scheme.weight.bits != 4:
        return (f"AWQ files hold 4-bit integers, these are {scheme.weight.name}",)
    if scheme.zero is ZeroPoint.FLOAT:
        reasons.append("zero points in AWQ files are integers, these are floating-point numbers")
    if not isinstance(scheme.granularity, (PerGroup, PerChannel)):
        reasons.append(f"scales in AWQ files are of groups or channels, not as in {scheme}")
    if q.shape[0] % 8:
        reasons.append(f"words of AWQ files hold 8 output channels, N {q.shape[0]} is no multiple")
    if isinstance(scheme.granularity, PerGroup) and q.shape[1] % scheme.granularity.size:
        reasons.append(f"groups in AWQ files are full, {scheme.granularity.size} does not divide K {q.shape[1]}")
    if q.scale.dtype == torch.float32:
        reasons.append("scales in AWQ files have 16 bits, these have 32 (compressed-tensors files take them)")
    if q.order is not None:
        reasons.append("AWQ files have no channel order (act-order; GPTQ files have one)")
    if q.input_scale is not None:
        reasons.append("AWQ files have no scale of the input's channels")
    if q.low_rank is not None:
        reasons.append("AWQ files have no low-rank correction")
    return tuple(reasons)


def _unpack(words: Tensor) -> Tensor:
    """uint8 [R, 8 C] of int32 [R, C], columns in their own order."""
    nibbles = words_to_codes(words, 4, 8 * words.shape[1]).unflatten(1, (-1, 8))
    return nibbles[..., _NIBBLE_OF_COLUMN].flatten(1)


def _pack(codes: Tensor) -> Tensor:
    """int32 [R, C] of uint8 [R, 8 C]; the inverse of `_unpack`."""
    return codes_to_words(codes.unflatten(1, (-1, 8))[..., _COLUMN_OF_NIBBLE].flatten(1), 4)
