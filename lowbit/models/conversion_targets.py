"""The checkpoint formats that a conversion writes: the tensors of each layer and, at the end, `quantization_config`."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowbit._version import __version__
from lowbit.checkpoint import CheckpointError, LayerEntry, Manifest, awq, compressed_tensors, gptq, layer_tensors
from lowbit.checkpoint.awq import Awq
from lowbit.checkpoint.compressed_groups import WeightArgs
from lowbit.checkpoint.compressed_tensors import CompressedTensors, args_for, write_layer
from lowbit.checkpoint.gptq import Gptq
from lowbit.formats import ExpertTensor, InputTransform, PerGroup, QuantTensor, Scheme
from lowbit.models import tensorrt_llm

TARGETS = ("lowbit", "gptq", "awq", "compressed-tensors", "tensorrt-llm", "dequantized")

NOTHING_QUANTIZED = (
    "none of its tensors is quantized; load it with Transformers (gguf_file=..), or write it as a 16-bit checkpoint first "
    "(lowbit convert --to dequantized)"
)


class Target(ABC):
    """A checkpoint format to convert to."""

    @abstractmethod
    def refusals(self, name: str, q: QuantTensor) -> tuple[str, ...]:
        """Returns why the files cannot represent this layer together with the earlier ones; empty if they can."""

    @abstractmethod
    def tensors(self, name: str, q: QuantTensor) -> dict[str, Tensor]:
        """Returns the tensors that are complete after this layer, by their names in the files."""

    def plain(self, name: str) -> tuple[str, ...]:
        """Returns the names in the files for a tensor outside the quantized layers."""
        return (name,)

    @abstractmethod
    def config(self, kept: list[str], tied: Mapping[str, str]) -> Manifest | dict[str, Any]:
        """Returns `quantization_config`; `kept`: linear layers in 16 bits, `tied`: modules that share a quantized layer's
        weights."""


class _TensorsPerLayer(Target):
    """Formats in which each layer has its own tensors, under its name."""

    @abstractmethod
    def write(self, name: str, q: QuantTensor) -> dict[str, Tensor]:
        """Returns the layer's tensors by suffix."""

    def tensors(self, name: str, q: QuantTensor) -> dict[str, Tensor]:
        return {f"{name}.{suffix}": tensor for suffix, tensor in self.write(name, q).items()}


@dataclass
class LowbitTarget(_TensorsPerLayer):
    """lowbit's own files, in which the experts of a layer are one entry for each of their two weights."""

    entries: dict[str, LayerEntry] = field(default_factory=dict)

    def refusals(self, name: str, q: QuantTensor) -> tuple[str, ...]:
        return ()

    def write(self, name: str, q: QuantTensor) -> dict[str, Tensor]:
        self.entries[name] = LayerEntry.of(q)
        return layer_tensors(q)

    def experts(self, parameter: str, q: ExpertTensor) -> dict[str, Tensor]:
        """Returns the tensors of a weight of experts by their names in the files; `parameter` is its name in the model."""
        self.entries[parameter] = LayerEntry.of(q)
        return {f"{parameter}.{suffix}": tensor for suffix, tensor in layer_tensors(q).items()}

    def config(self, kept: list[str], tied: Mapping[str, str]) -> Manifest:
        return manifest_of(self.entries, kept, tied)


@dataclass
class _GptqTarget(_TensorsPerLayer):
    """GPTQ files state one width and group size, and exceptions by name."""

    v2: bool
    layers: dict[str, tuple[int, int, bool]] = field(default_factory=dict)
    ordered: bool = False

    def refusals(self, name: str, q: QuantTensor) -> tuple[str, ...]:
        return gptq.refusals(q)

    def write(self, name: str, q: QuantTensor) -> dict[str, Tensor]:
        bits, group = q.scheme.weight.bits, _group(q.scheme)
        self.layers[name] = (bits, group, q.zero is None)
        self.ordered |= q.input_transform.parts.order
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
class _AwqTarget(_TensorsPerLayer):
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
class _CompressedTensorsTarget(_TensorsPerLayer):
    layers: dict[WeightArgs, list[str]] = field(default_factory=dict)

    def refusals(self, name: str, q: QuantTensor) -> tuple[str, ...]:
        return compressed_tensors.refusals(q)

    def write(self, name: str, q: QuantTensor) -> dict[str, Tensor]:
        args = args_for(q)
        self.layers.setdefault(args, []).append(name)
        return write_layer(q, args)

    def config(self, kept: list[str], tied: Mapping[str, str]) -> dict[str, Any]:
        return CompressedTensors(tuple(self.layers)).config(kept, self.layers)


@dataclass
class _TensorrtLlmTarget(Target):
    """Fuses q, k and v. All linear layers of the decoder must be quantized with one group size. `model` is Transformers'
    configuration.
    """

    model: Mapping[str, Any]
    dtype: torch.dtype
    group: int | None = None
    pending: dict[str, QuantTensor] = field(default_factory=dict)
    inputs: dict[str, InputTransform] = field(default_factory=dict)

    def __post_init__(self) -> None:
        reasons = tensorrt_llm.config_refusals(self.model)
        if reasons:
            raise CheckpointError("; ".join(reasons))

    def refusals(self, name: str, q: QuantTensor) -> tuple[str, ...]:
        reasons = tensorrt_llm.refusals(name, q)
        if reasons:
            return reasons
        group, (fused, _) = _group(q.scheme), tensorrt_llm.fused_name(name)
        self.group = group if self.group is None else self.group
        if group != self.group:
            return (f"TensorRT-LLM's checkpoints have groups of one size, here {group} and before {self.group}",)
        if self.inputs.setdefault(fused, q.input_transform).differences(q.input_transform):
            return ("q, k and v are one layer in TensorRT-LLM, and have different scales of the input's channels here",)
        return ()

    def tensors(self, name: str, q: QuantTensor) -> dict[str, Tensor]:
        fused, parts = tensorrt_llm.fused_name(name)
        self.pending[name] = q
        if not all(part in self.pending for part in parts):
            return {}
        tensors = tensorrt_llm.fused_layer([self.pending.pop(part) for part in parts], self.dtype)
        return {f"{fused}.{suffix}": tensor for suffix, tensor in tensors.items()}

    def plain(self, name: str) -> tuple[str, ...]:
        new = tensorrt_llm.plain_name(name)
        if new is None:
            raise CheckpointError(
                f"{name}: has no place in TensorRT-LLM's checkpoints of Llama models, whose decoder is quantized as a whole"
            )
        tied = name == "model.embed_tokens.weight" and self.model.get("tie_word_embeddings")
        return (new, "lm_head.weight") if tied else (new,)

    def config(self, kept: list[str], tied: Mapping[str, str]) -> dict[str, Any]:
        if self.group is None:
            raise CheckpointError("nothing is quantized; TensorRT-LLM's checkpoints are written of quantized models")
        return tensorrt_llm.config_of(self.model, self.group, __version__)


def target_of(name: str, *, gptq_v2: bool, model: Mapping[str, Any], dtype: torch.dtype) -> Target | None:
    """Returns the target called `name`, one of `TARGETS`; None for plain weights.

    gptq_v2: write GPTQ files of version 2. model: the model's configuration. dtype: that of plain weights. Raises
    CheckpointError for a model that the format cannot hold.
    """
    match name:
        case "lowbit":
            return LowbitTarget()
        case "gptq":
            return _GptqTarget(gptq_v2)
        case "awq":
            return _AwqTarget()
        case "compressed-tensors":
            return _CompressedTensorsTarget()
        case "tensorrt-llm":
            return _TensorrtLlmTarget(model, dtype)
    return None


def manifest_of(entries: dict[str, LayerEntry], kept: Iterable[str], tied: Mapping[str, str]) -> Manifest:
    """Returns the manifest of a lowbit checkpoint, with the most common scheme and the linear layers `kept` in 16 bits."""
    return Manifest(
        _most_common(e.scheme for e in entries.values()), entries, tuple(k for k in kept if k not in tied), dict(tied)
    )


def converted_record(tool: str) -> dict[str, Any]:
    """Returns the method that config.json records for weights that `tool` quantized."""
    return {"name": "converted", "from": tool}


def rounding_error(weight: Tensor, dtype: torch.dtype) -> float:
    """Returns the largest error of `weight` (float32) in `dtype`, relative to its largest magnitude; inf on overflow."""
    if not weight.numel():
        return 0.0
    largest = float(weight.abs().max())
    return float((weight - weight.to(dtype).float()).abs().max()) / largest if largest else 0.0


def rounding_errors(tensors: Iterable[Tensor]) -> dict[torch.dtype, float]:
    """Returns the largest `rounding_error` of all floating-point tensors, for bfloat16 and float16."""
    errors = {torch.bfloat16: 0.0, torch.float16: 0.0}
    for tensor in tensors:
        if tensor.is_floating_point():
            errors = {dtype: max(worst, rounding_error(tensor.float(), dtype)) for dtype, worst in errors.items()}
    return errors


def _group(scheme: Scheme) -> int:
    return scheme.granularity.size if isinstance(scheme.granularity, PerGroup) else -1


def _most_common(schemes: Iterable[Scheme]) -> Scheme:
    most_common = Counter(schemes).most_common(1)
    if not most_common:
        raise CheckpointError(NOTHING_QUANTIZED)
    return most_common[0][0]
