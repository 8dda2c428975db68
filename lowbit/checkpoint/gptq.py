"""GPTQ files, as AutoGPTQ, GPTQModel and auto-round write them. For a layer with weights w [N, K] and G groups along K:

    qweight   int32 [K * bits / 32, N]   codes, a little-endian stream of bits down each column
    qzeros    int32 [G, N * bits / 32]   zero points, a stream along each row; version 1 stores z - 1
    scales    float [G, N]
    g_idx     int32 [K]                  group of each input channel; absent: channel // group size

    w[n, k] = scales[g, n] * (q[k, n] - z[g, n])  with  g = g_idx[k]

Act-order ("desc_act") files have a g_idx that is not monotonic. The QuantTensor stores their columns sorted by group, and
`order` is the channel of each column. The sort is stable, so writing restores g_idx exactly.

At 2, 4 and 8 bits, writers of version 1 subtract 1 from each field of whole 32-bit words, so that a zero of 0 borrows from its
neighbour; adding to whole words restores every zero. At other widths they subtract from each field separately. (Older
GPTQModel used other constants at 3 bits; its symmetric files are refused, since their zeros are not the middle.) Widths of 5,
6 and 7 bits are refused, because the files do not show how they are stored: by GPTQModel as bit planes, by auto-round as a
stream. In auto-round's own format they are always a stream (auto_round.py).
Source: AutoGPTQ, GPTQModel 7.7.0 (utils/model.py), auto-round 0.16.1 (qlinear_torch_zp.py).
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
from lowbit.formats import (
    InputTransform,
    IntFormat,
    PerChannel,
    PerGroup,
    QuantTensor,
    Scheme,
    ZeroPoint,
    int_format,
    uint_format,
)

BITS = (2, 3, 4, 8)
STREAM_BITS = (2, 3, 4, 5, 6, 7, 8)
"""Bit widths of files that state that their codes are one stream of bits."""


@dataclass(frozen=True)
class Gptq(ForeignSchema):
    """Bits per weight; group size (-1: all of K); `v2`: zeros are stored unchanged, else minus 1; `symmetric` (None: the zeros
    decide); `mixed`: layers may differ in bits, symmetry and group size (one of `sizes`); `act_order`: g_idx is required;
    `stream`: 5, 6 and 7 bits are one stream of bits."""

    bits: int
    group: int
    v2: bool = False
    symmetric: bool | None = None
    mixed: bool = False
    sizes: tuple[int, ...] = ()
    act_order: bool = False
    stream: bool = False

    name = "gptq"
    suffixes = ("qweight", "qzeros", "scales", "g_idx")
    markers = ("qweight", "qzeros", "scales", "g_idx")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: Path | str) -> Gptq:
        """Returns the schema of a `quantization_config`, or of the content of quantize_config.json."""
        version = config_value(config, where, ("checkpoint_format", "format"), str, "gptq")
        version = "marlin" if config.get("is_marlin_format") else version
        if version not in ("gptq", "gptq_v2"):
            raise CheckpointError(
                f"{where}: checkpoint_format {version!r}; supported are gptq and gptq_v2: save the model "
                "in one of these with the tool that wrote it"
            )
        if config.get("pack_dtype") not in (None, "int32"):
            raise CheckpointError(f"{where}: pack_dtype is {config['pack_dtype']!r}; supported are words of int32")
        mixed = bool(config.get("dynamic"))
        return cls(
            bits=bit_width(config_value(config, where, ("bits", "w_bit"), int), where, BITS, "GPTQ"),
            group=group_size(config_value(config, where, ("group_size", "q_group_size"), int), where),
            sizes=_other_sizes(config["dynamic"], where) if mixed else (),
            v2=version == "gptq_v2",
            symmetric=None if mixed else config_value(config, where, ("sym",), bool, None),
            mixed=mixed,
            act_order=config_value(config, where, ("desc_act",), bool, False),
        )

    def config(self, kept: Iterable[str]) -> dict[str, Any]:
        """Returns the `quantization_config` of a model whose linear layers `kept` are not quantized."""
        dynamic: dict[str, Any] = {rf"-:^{name.replace('.', chr(92) + '.')}$": {} for name in kept if name != "lm_head"}
        return {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group,
            "desc_act": self.act_order,
            "sym": bool(self.symmetric),
            "lm_head": False,
            "checkpoint_format": "gptq_v2" if self.v2 else "gptq",
            "pack_dtype": "int32",
        } | ({"dynamic": dynamic} if dynamic else {})

    def entry(self, layer: ForeignLayer) -> ForeignEntry:
        n, k, bits, group = self._sizes(layer)
        zero = ZeroPoint.NONE if self.symmetric else ZeroPoint.INTEGER
        return ForeignEntry((n, k), _scheme(bits, group, zero))

    def read(self, layer: ForeignLayer) -> QuantTensor:
        n, k, bits, group = self._sizes(layer)
        codes = words_to_codes(layer.tensor("qweight").t(), bits, k)
        zero = self._zeros(layer.tensor("qzeros"), bits, n).t().contiguous()
        scale = layer.scales("scales").t().contiguous()
        order = _order(layer, k, group)
        if order is not None:
            codes = codes[:, order.long()]
        middle = 1 << (bits - 1)
        if self.symmetric is not False and bool((zero == middle).all()):
            return QuantTensor(codes, scale, None, _scheme(bits, group, ZeroPoint.NONE), InputTransform(order))
        if self.symmetric:
            raise layer.error(
                "qzeros", f"sym is true, but zero points from {int(zero.min())} to {int(zero.max())} are stored, not {middle}; "
                "save the model as gptq_v2 with the tool that wrote it",
            )  # fmt: skip
        return QuantTensor(codes, scale, zero, _scheme(bits, group, ZeroPoint.INTEGER), InputTransform(order))

    def write(self, q: QuantTensor) -> dict[str, Tensor]:
        k, bits = q.shape[1], q.scheme.weight.bits
        codes, size = q.codes, q.scheme.granularity.block(q.shape)[1]
        g_idx = (torch.arange(k, dtype=torch.int32, device=codes.device) // size).to(torch.int32)
        if q.input_transform.order is not None:
            order = q.input_transform.order.long()
            codes = torch.empty_like(codes).index_copy_(1, order, codes)
            g_idx = torch.empty_like(g_idx).index_copy_(0, order, g_idx)
        zero = q.zero if q.zero is not None else torch.full_like(q.scale, 1 << (bits - 1), dtype=torch.uint8)
        return {
            "qweight": codes_to_words(codes, bits).t().contiguous(),
            "qzeros": self._zero_words(zero.t(), bits),
            "scales": q.scale.t().contiguous(),
            "g_idx": g_idx,
        }

    def _sizes(self, layer: ForeignLayer) -> tuple[int, int, int, int]:
        """Returns (N, K, bits, group size) of a layer, and checks its shapes; group size -1 for all of K."""
        groups, n = layer.matrix("scales", SCALE_DTYPES)
        rows, columns = layer.matrix("qweight", (torch.int32,))
        bits, group = self.bits, self.group
        if self.mixed:
            zero_words, allowed = layer.matrix("qzeros", (torch.int32,))[1], STREAM_BITS if self.stream else BITS
            bits = 32 * zero_words // n
            if bits not in allowed or bits * n != 32 * zero_words:
                raise layer.error("qzeros", f"{zero_words} words hold the zeros of {n} channels at none of {allowed} bits")
        if columns != n or (32 * rows) % bits or (n * bits) % 32:
            raise layer.error(
                "qweight", f"{bits}-bit codes of {n} channels (as scales has) are [K * {bits} / 32, {n}] with K and {n} "
                f"filling whole words, found {(rows, columns)}",
            )  # fmt: skip
        k = 32 * rows // bits
        if self.mixed:
            group = group_of(layer, groups, k, (group, *self.sizes))
        if groups != -(-k // (k if group == -1 else group)):
            raise layer.error("scales", f"{groups} groups do not divide {k} input channels into groups of {group}")
        layer.expect("qzeros", (torch.int32,), (groups, n * bits // 32))
        if layer.has("g_idx"):
            layer.expect("g_idx", (torch.int32,), (k,))
        elif self.act_order and group != -1:
            raise layer.error("g_idx", "missing, and desc_act says that the channels are not in the order of their groups")
        return n, k, bits, group

    def _zeros(self, words: Tensor, bits: int, n: int) -> Tensor:
        """Returns the zeros uint8 [G, N] of the words of a file."""
        if self.v2:
            return words_to_codes(words, bits, n)
        if 32 % bits:
            return (words_to_codes(words, bits, n) + 1) & ((1 << bits) - 1)
        return words_to_codes(_wrapped(words.to(torch.int64) + _one_in_each_field(bits)), bits, n)

    def _zero_words(self, zeros: Tensor, bits: int) -> Tensor:
        """Returns the words of zeros; the inverse of `_zeros`."""
        if self.v2:
            return codes_to_words(zeros, bits)
        if 32 % bits:
            return codes_to_words((zeros - 1) & ((1 << bits) - 1), bits)
        return _wrapped(codes_to_words(zeros, bits).to(torch.int64) - _one_in_each_field(bits))


def refusals(q: QuantTensor) -> tuple[str, ...]:
    """Returns why GPTQ files cannot represent `q`; empty if they can."""
    (n, k), scheme, reasons = q.shape, q.scheme, []
    if not isinstance(scheme.weight, IntFormat):
        return (f"GPTQ files hold integers, not {scheme.weight.name}",)
    if scheme.weight.bits not in BITS:
        reasons.append(f"GPTQ files have codes of {', '.join(map(str, BITS))} bits, not {scheme.weight.name}")
    if scheme.zero is ZeroPoint.FLOAT:
        reasons.append("zero points in GPTQ files are integers, these are floating-point numbers")
    if not isinstance(scheme.granularity, (PerGroup, PerChannel)):
        reasons.append(f"scales in GPTQ files are of groups or channels, not as in {scheme}")
    if (n * scheme.weight.bits) % 32 or (k * scheme.weight.bits) % 32:
        reasons.append(f"N {n} and K {k} must fill whole 32-bit words of {scheme.weight.bits}-bit codes")
    if q.scale.dtype == torch.float32:
        reasons.append("scales in GPTQ files have 16 bits, these have 32 (compressed-tensors files take them)")
    reasons += [f"GPTQ files have no {what}" for what in q.input_transform.parts.words("order")]
    if q.low_rank is not None:
        reasons.append("GPTQ files have no low-rank correction")
    return tuple(reasons)


def _other_sizes(dynamic: Any, where: Path | str) -> tuple[int, ...]:
    """Returns the group sizes in `dynamic`, the exceptions by layer."""
    if not isinstance(dynamic, Mapping):
        raise CheckpointError(f"{where}: dynamic is an object of exceptions by pattern, got {str(dynamic)[:80]!r}")
    stated = [value["group_size"] for value in dynamic.values() if isinstance(value, Mapping) and "group_size" in value]
    if wrong := [size for size in stated if type(size) is not int]:
        raise CheckpointError(f"{where}: dynamic: a group_size is a number, got {wrong[0]!r}")
    return tuple(dict.fromkeys(group_size(size, where) for size in stated))


def _scheme(bits: int, group: int, zero: ZeroPoint) -> Scheme:
    weight = int_format(bits) if zero is ZeroPoint.NONE else uint_format(bits)
    return Scheme(weight, None, PerChannel() if group == -1 else PerGroup(group), zero)


def _order(layer: ForeignLayer, k: int, group: int) -> Tensor | None:
    """Returns the channels sorted by group, int32 [K], or None if they are sorted already."""
    if not layer.has("g_idx"):
        return None
    g_idx = layer.tensor("g_idx")
    natural = torch.arange(k, device=g_idx.device) // (k if group == -1 else group)
    if bool((g_idx == natural).all()):
        return None
    ordered, order = torch.sort(g_idx, stable=True)
    if bool((ordered != natural).any()):
        counts = f"from {int(ordered[0])} to {int(ordered[-1])}"
        raise layer.error(
            "g_idx", f"the groups ({counts}) do not have {group} of the {k} channels each, which lowbit does not support; "
            "quantize again with groups of one size",
        )  # fmt: skip
    return order.to(torch.int32)


def _one_in_each_field(bits: int) -> int:
    return sum(1 << shift for shift in range(0, 32, bits))


def _wrapped(words: Tensor) -> Tensor:
    """Converts int64 to int32, modulo 2^32."""
    low = words & 0xFFFFFFFF
    return torch.where(low >= 1 << 31, low - (1 << 32), low).to(torch.int32)
