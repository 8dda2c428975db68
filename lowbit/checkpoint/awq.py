"""AWQ files of AutoAWQ's "gemm" version, as AutoAWQ, GPTQModel and auto-round write them. For w [N, K] and G groups along K:

    qweight   int32 [K, N / 8]   8 columns of a row per word; nibble i holds column (0 2 4 6 1 3 5 7)[i] of these
    qzeros    int32 [G, N / 8]   zero points in the same order, unchanged
    scales    float [G, N]

    w[n, k] = scales[g, n] * (q[k, n] - z[g, n])  with  g = k // group size

Files without zero points (`zero_point: false`, auto-round's symmetric weights) still have qzeros, which are all 8. auto-round's
own format also has 5, 6 and 7 bits: columns in the same order, as one stream of bits along a row. Source: AutoAWQ,
awq/modules/linear/gemm.py and awq/utils/packing_utils.py.
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
    group_of,
    group_size,
    words_to_codes,
)
from lowbit.checkpoint.schema import CheckpointError
from lowbit.formats import IntFormat, PerChannel, PerGroup, QuantTensor, Scheme, ZeroPoint, int_format, uint_format

_COLUMN_AT_PLACE = (0, 2, 4, 6, 1, 3, 5, 7)
_PLACE_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)
_BITS = (4, 5, 6, 7)


@dataclass(frozen=True)
class Awq(ForeignSchema):
    """Group size (-1: all of K); `symmetric`: all zeros are the middle, 8 at 4 bits; bits per weight. `mixed`: layers may
    differ in bits and group size (one of `sizes`)."""

    group: int
    symmetric: bool = False
    bits: int = 4
    mixed: bool = False
    sizes: tuple[int, ...] = ()

    name = "awq"
    suffixes = ("qweight", "qzeros", "scales")
    markers = ("qweight", "qzeros", "scales")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: Path | str) -> Awq:
        """Returns the schema of a `quantization_config`, or of the content of quant_config.json."""
        version = config_value(config, where, ("version", "format"), str, "gemm")
        if version.lower() != "gemm":
            raise CheckpointError(
                f"{where}: AWQ version {version!r}; supported is gemm: save the model as gemm with the tool that wrote it"
            )
        bit_width(config_value(config, where, ("bits", "w_bit"), int), where, (4,), "AWQ")
        symmetric = not config_value(config, where, ("zero_point",), bool, True)
        return cls(group_size(config_value(config, where, ("group_size", "q_group_size"), int), where), symmetric)

    def config(self, kept: Iterable[str]) -> dict[str, Any]:
        """Returns the `quantization_config` of a model whose linear layers `kept` are not quantized."""
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": self.group,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": list(kept),
        }

    def entry(self, layer: ForeignLayer) -> ForeignEntry:
        n, k, bits, group = self._sizes(layer)
        return ForeignEntry((n, k), _scheme(bits, group, self.symmetric))

    def read(self, layer: ForeignLayer) -> QuantTensor:
        _, _, bits, group = self._sizes(layer)
        codes = _unpack(layer.tensor("qweight"), bits).t().contiguous()
        zero = _unpack(layer.tensor("qzeros"), bits).t().contiguous()
        scale = layer.scales("scales").t().contiguous()
        if not self.symmetric:
            return QuantTensor(codes, scale, zero, _scheme(bits, group, False))
        middle = 1 << (bits - 1)
        if bool((zero != middle).any()):
            raise layer.error(
                "qzeros", f"config.json states zero_point: false, but the stored zero points, from {int(zero.min())} to "
                f"{int(zero.max())}, are not all {middle}; set zero_point: true if they are valid",
            )  # fmt: skip
        return QuantTensor(codes, scale, None, _scheme(bits, group, True))

    def write(self, q: QuantTensor) -> dict[str, Tensor]:
        bits = q.scheme.weight.bits
        zero = q.zero if q.zero is not None else torch.full_like(q.scale, 1 << (bits - 1), dtype=torch.uint8)
        return {"qweight": _pack(q.codes.t(), bits), "qzeros": _pack(zero.t(), bits), "scales": q.scale.t().contiguous()}

    def _sizes(self, layer: ForeignLayer) -> tuple[int, int, int, int]:
        """Returns (N, K, bits, group size) of a layer, and checks its shapes."""
        groups, n = layer.matrix("scales", SCALE_DTYPES)
        k, words = layer.matrix("qweight", (torch.int32,))
        bits = 32 * words // n if self.mixed else self.bits
        if bits not in _BITS or bits * n != 32 * words or n % 8:
            raise layer.error("qweight", f"{n} channels (as scales has) fill {n * bits / 32:g} words a row, found {(k, words)}")
        group = group_of(layer, groups, k, (self.group, *self.sizes))
        layer.expect("qzeros", (torch.int32,), (groups, words))
        return n, k, bits, group


def refusals(q: QuantTensor) -> tuple[str, ...]:
    """Returns why AWQ files cannot represent `q`; empty if they can."""
    scheme, reasons = q.scheme, []
    if not isinstance(scheme.weight, IntFormat) or scheme.weight.bits != 4:
        return (f"AWQ files hold 4-bit integers, not {scheme.weight.name}",)
    if scheme.zero is ZeroPoint.FLOAT:
        reasons.append("zero points in AWQ files are integers, these are floating-point numbers")
    if not isinstance(scheme.granularity, (PerGroup, PerChannel)):
        reasons.append(f"scales in AWQ files are of groups or channels, not as in {scheme}")
    if q.shape[0] % 8:
        reasons.append(f"N must be a multiple of 8 in AWQ files, not {q.shape[0]}")
    if isinstance(scheme.granularity, PerGroup) and q.shape[1] % scheme.granularity.size:
        reasons.append(f"groups in AWQ files are full, {scheme.granularity.size} does not divide K {q.shape[1]}")
    if q.scale.dtype == torch.float32:
        reasons.append("scales in AWQ files have 16 bits, these have 32 (compressed-tensors files take them)")
    reasons += [f"AWQ files have no {what}" for what in q.input_transform.parts.words()]
    if q.low_rank is not None:
        reasons.append("AWQ files have no low-rank correction")
    return tuple(reasons)


def _scheme(bits: int, group: int, symmetric: bool) -> Scheme:
    granularity = PerChannel() if group == -1 else PerGroup(group)
    if symmetric:
        return Scheme(int_format(bits), None, granularity)
    return Scheme(uint_format(bits), None, granularity, ZeroPoint.INTEGER)


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Unpacks int32 [R, C * bits / 32] to uint8 [R, C] with columns in natural order."""
    codes = words_to_codes(words, bits, 32 * words.shape[1] // bits).unflatten(1, (-1, 8))
    return codes[..., _PLACE_OF_COLUMN].flatten(1)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Packs uint8 [R, C] to int32 [R, C * bits / 32]; the inverse of `_unpack`."""
    return codes_to_words(codes.unflatten(1, (-1, 8))[..., _COLUMN_AT_PLACE].flatten(1), bits)
