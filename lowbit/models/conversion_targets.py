"""What a checkpoint can be converted to: each target writes layers and, at the end, states them for config.json."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lowbit.checkpoint import LayerEntry, Manifest, awq, compressed_tensors, gptq, layer_tensors
from lowbit.checkpoint.awq import Awq
from lowbit.checkpoint.compressed_tensors import CompressedTensors, WeightArgs, args_for, write_layer
from lowbit.checkpoint.gptq import Gptq
from lowbit.formats import PerGroup, QuantTensor, Scheme

TARGETS = ("lowbit", "gptq", "awq", "compressed-tensors", "dequantized")


class Target(ABC):
    """A kind of checkpoint."""

    @abstractmethod
    def refusals(self, name: str, q: QuantTensor) -> tuple[str, ...]:
        """Why the files cannot hold this layer beside those written before; empty when they can."""

    @abstractmethod
    def write(self, name: str, q: QuantTensor) -> dict[str, Tensor]:
        """The layer's tensors by suffix."""

    @abstractmethod
    def config(self, kept: list[str], tied: Mapping[str, str]) -> dict[str, Any]:
        """`quantization_config`; `kept` are linear layers in 16 bits, `tied` modules that share a quantized layer's weights."""


@dataclass
class _Lowbit(Target):
    entries: dict[str, LayerEntry] = field(default_factory=dict)

    def refusals(self, name: str, q: QuantTensor) -> tuple[str, ...]:
        return ()

    def write(self, name: str, q: QuantTensor) -> dict[str, Tensor]:
        self.entries[name] = LayerEntry.of(q)
        return layer_tensors(q)

    def config(self, kept: list[str], tied: Mapping[str, str]) -> dict[str, Any]:
        scheme = _most_common(entry.scheme for entry in self.entries.values())
        kept = [name for name in kept if name not in tied]
        return Manifest(scheme, self.entries, tuple(kept), dict(tied)).to_dict()


@dataclass
class _Gptq(Target):
    """GPTQ files state one width and group size, and exceptions by name."""

    v2: bool
    layers: dict[str, tuple[int, int, bool]] = field(default_factory=dict)
    ordered: bool = False

    def refusals(self, name: str, q: QuantTensor) -> tuple[str, ...]:
        return gptq.refusals(q)

    def write(self, name: str, q: QuantTensor) -> dict[str, Tensor]:
        bits, group = q.scheme.weight.bits, _group(q.scheme)
        self.layers[name] = (bits, group, q.zero is None)
        self.ordered |= q.order is not None
        return Gptq(bits, group, self.v2).write(q)

    def config(self, kept: list[str], tied: Mapping[str, str]) -> dict[str, Any]:
        bits, group = Counter((b, g) for b, g, _ in self.layers.values()).most_common(1)[0][0]
        symmetric = all(s for _, _, s in self.layers.values())
        stated = Gptq(bits, group, self.v2, symmetric, act_order=self.ordered).config(kept)
        others = {
            f"+:^{re.escape(name)}$": {"bits": b, "group_size": g}
            for name, (b, g, _) in self.layers.items()
            if (b, g) != (bits, group)
        }
        return stated | ({"dynamic": stated.get("dynamic", {}) | others} if others else {})


@dataclass
class _Awq(Target):
    """AWQ files state one group size for all layers."""

    group: int | None = None

    def refusals(self, name: str, q: QuantTensor) -> tuple[str, ...]:
        reasons = awq.refusals(q)
        if not reasons:
            group = _group(q.scheme)
            self.group = group if self.group is None else self.group
            if group != self.group:
                return (f"AWQ files have groups of one size, here {group} and before {self.group}",)
        return reasons

    def write(self, name: str, q: QuantTensor) -> dict[str, Tensor]:
        return Awq(_group(q.scheme)).write(q)

    def config(self, kept: list[str], tied: Mapping[str, str]) -> dict[str, Any]:
        return Awq(-1 if self.group is None else self.group).config(kept)


@dataclass
class _CompressedTensors(Target):
    layers: dict[WeightArgs, list[str]] = field(default_factory=dict)

    def refusals(self, name: str, q: QuantTensor) -> tuple[str, ...]:
        return compressed_tensors.refusals(q)

    def write(self, name: str, q: QuantTensor) -> dict[str, Tensor]:
        args = args_for(q)
        self.layers.setdefault(args, []).append(name)
        return write_layer(q, args)

    def config(self, kept: list[str], tied: Mapping[str, str]) -> dict[str, Any]:
        return CompressedTensors(tuple(self.layers)).config(kept, self.layers)


def target_of(name: str, *, gptq_v2: bool) -> Target | None:
    """The target called `name`, one of `TARGETS`; None for plain weights. GPTQ files are of version 2 if `gptq_v2`."""
    match name:
        case "lowbit":
            return _Lowbit()
        case "gptq":
            return _Gptq(gptq_v2)
        case "awq":
            return _Awq()
        case "compressed-tensors":
            return _CompressedTensors()
    return None


def _group(scheme: Scheme) -> int:
    return scheme.granularity.size if isinstance(scheme.granularity, PerGroup) else -1


def _most_common(schemes: Iterable[Scheme]) -> Scheme:
    return Counter(schemes).most_common(1)[0][0]
