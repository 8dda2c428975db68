"""The matrices that a `quantization_config` describes. They are those of a lowbit checkpoint, 16-bit matrices to quantize while
loading, or those of another tool's checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lowbit.checkpoint import CheckpointError, Manifest
from lowbit.checkpoint.detect import SCHEMAS
from lowbit.checkpoint.foreign import ForeignSchema
from lowbit.checkpoint.schema import FORMAT_VERSION, METHOD, READ_VERSIONS
from lowbit.formats import PerBlock, PerTensor, Scheme, parse_scheme
from lowbit.methods import Search
from lowbit.nn.convert import matches
from lowbit.vllm.experts import FIRST, SECOND, ExpertSource, ForeignExperts, RoundedExperts, StackedExperts
from lowbit.vllm.matrices import ForeignMatrix, Matrix, PackedMatrix, PlainMatrix, RoundedMatrix

WHERE = "config.json"
_ON_LOAD = {"quant_method", "format_version", "scheme", "modules_to_not_convert", "head", "search"}
_ROUTERS = ("gate", "router", "shared_expert_gate")
"""Last parts of the names of routers and of gates of shared experts. They stay in 16 bits, as with `lowbit quantize`."""
_REARRANGED = {
    **dict.fromkeys(("bloom", "falcon", "gpt_neox", "persimmon"), "query_key_value"),
    "llama4_text": "qkv_proj",
}
"""Model type -> layer whose rows vLLM reorders while loading (`load_weights`, 0.25.1 and 0.32.0). It reorders 16-bit weights
correctly, but packed weights only in part or not at all."""


@dataclass(frozen=True)
class VocabLayer:
    """The embedding of a model, or its LM head if `is_head`. name: "" if vLLM does not name the embedding. shape: (tokens, K).
    tied: True if embedding and LM head have the same weight."""

    name: str
    shape: tuple[int, int]
    is_head: bool
    tied: bool


Renaming = Callable[[Iterable[str]], Mapping[str, str]]

_USUAL = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Layers that serving engines stack, for models that do not state which ones they stack."""


class WeightSource(ABC):
    """The matrices of a model, by vLLM's names."""

    def matrices(self, name: str, members: Mapping[str, Sequence[str]], dtype: torch.dtype) -> list[Matrix]:
        """Returns the matrices of a linear layer. `members` maps the last part of a layer's name to the layers that it
        stacks."""
        parent, dot, last = name.rpartition(".")
        return [self.matrix(f"{parent}{dot}{member}", dtype) for member in members.get(last, (last,))]

    @abstractmethod
    def matrix(self, name: str, dtype: torch.dtype) -> Matrix:
        """Returns the matrix of a linear layer. `dtype`: its dtype if it is in 16 bits."""

    @abstractmethod
    def vocab_matrix(self, layer: VocabLayer, dtype: torch.dtype) -> Matrix | None:
        """Returns the matrix of the embedding or LM head; None if it stays in 16 bits."""

    @abstractmethod
    def experts(self, name: str) -> ExpertSource | None:
        """Returns the experts of a layer of vLLM; None if they are in 16 bits. Raises CheckpointError, naming the layer, for
        experts that are not supported."""

    def renamed(self, rename: Renaming) -> WeightSource:
        """Returns a copy with renamed matrices."""
        return self


@dataclass(frozen=True)
class OwnCheckpoint(WeightSource):
    """A checkpoint written by `lowbit quantize`, `lowbit convert` or `save_pretrained`. in_files: name after `renamed` -> name
    in the files, for each layer."""

    manifest: Manifest
    in_files: Mapping[str, str] = field(default_factory=dict)

    def matrix(self, name: str, dtype: torch.dtype) -> Matrix:
        entry = self.manifest.layers.get(name)
        return PlainMatrix(name, dtype) if entry is None else PackedMatrix(name, entry)

    def matrices(self, name: str, members: Mapping[str, Sequence[str]], dtype: torch.dtype) -> list[Matrix]:
        """Returns one matrix if the files have the stacked layer itself (GLM-4's gate_up_proj), else the matrices that it
        stacks."""
        if name in self.manifest.layers:
            return [self.matrix(name, dtype)]
        return super().matrices(name, {**_USUAL, **members}, dtype)

    def vocab_matrix(self, layer: VocabLayer, dtype: torch.dtype) -> Matrix | None:
        name = layer.name or self._embedding(layer.shape)
        owner = self.manifest.tied.get(name, name)
        entry = self.manifest.layers.get(owner)
        if layer.is_head and layer.tied and owner == name and entry is not None:
            raise CheckpointError(
                f"{WHERE}: {name} has weights of its own, but tie_word_embeddings is true, and vLLM would not load them; set "
                "tie_word_embeddings to false"
            )
        return None if entry is None else PackedMatrix(owner, entry)

    def _embedding(self, shape: tuple[int, int]) -> str:
        """Returns the name of the layer with the embedding's shape that is not an LM head; "" if there is none."""
        layers = {name: entry for name, entry in self.manifest.layers.items() if not entry.experts}
        names = [name for name, entry in layers.items() if entry.shape == shape and not _is_head(name)]
        if len(names) > 1:
            raise CheckpointError(
                f"{WHERE}: vLLM does not name the embedding, and {', '.join(names)} all have its shape {list(shape)}; leave "
                "the embedding in 16 bits"
            )
        return names[0] if names else ""

    def experts(self, name: str) -> ExpertSource | None:
        """Returns the experts with the layer's name, or else those of the same decoder layer. The names can differ: the module
        around Mixtral's experts is called mlp in Transformers and block_sparse_moe in vLLM."""
        layers = self.manifest.layers
        if single := next((layer for layer in layers if layer.startswith(f"{name}.") and not layers[layer].experts), None):
            raise CheckpointError(f"{single}: single experts of a lowbit checkpoint are not supported; quantize it again")
        modules = {layer.rpartition(".")[0] for layer, entry in layers.items() if entry.experts}
        beside = {each for each in modules if _above(each) == _above(name) and each.rpartition(".")[2] == "experts"}
        base = name if name in modules else next(iter(beside), None) if len(beside) == 1 else None
        if base is None:
            return None
        gate_up, down = layers.get(f"{base}.{FIRST}"), layers.get(f"{base}.{SECOND}")
        if gate_up is None or down is None:
            stated = ", ".join(layer for layer in layers if layer.rpartition(".")[0] == base)
            raise CheckpointError(
                f"{name}: {FIRST} and {SECOND} of its experts are both quantized, or both in 16 bits; config.json "
                f"states {stated}"
            )
        in_files = self.in_files.get(f"{base}.{FIRST}", f"{base}.{FIRST}").rpartition(".")[0]
        return StackedExperts(name, in_files, gate_up, down)

    def renamed(self, rename: Renaming) -> WeightSource:
        new, tied = rename(self.manifest.layers), rename(self.manifest.tied)
        layers = {new[name]: entry for name, entry in self.manifest.layers.items() if name in new}
        ties = {tied[name]: new[owner] for name, owner in self.manifest.tied.items() if name in tied and owner in new}
        in_files = {new[name]: self.in_files.get(name, name) for name in self.manifest.layers if name in new}
        return OwnCheckpoint(replace(self.manifest, layers=layers, tied=ties), in_files)


@dataclass(frozen=True)
class SixteenBits(WeightSource):
    """16-bit weights that are rounded to `scheme` while loading. LM head and embedding are rounded to `head`, or stay in 16
    bits if it is None. kept: names or patterns of layers that stay in 16 bits."""

    scheme: Scheme
    kept: tuple[str, ...] = ()
    head: Scheme | None = None
    search: Search = "max"

    def matrix(self, name: str, dtype: torch.dtype) -> Matrix:
        if name.rpartition(".")[2] in _ROUTERS or any(matches(name, pattern) for pattern in self.kept):
            return PlainMatrix(name, dtype)
        return RoundedMatrix(name, dtype, self.scheme, self.search)

    def vocab_matrix(self, layer: VocabLayer, dtype: torch.dtype) -> Matrix | None:
        return None if self.head is None else RoundedMatrix(layer.name or "the embedding", dtype, self.head, self.search)

    def experts(self, name: str) -> ExpertSource | None:
        if any(matches(name, pattern) for pattern in self.kept):
            return None
        return RoundedExperts(name, self.scheme, self.search)

    def renamed(self, rename: Renaming) -> WeightSource:
        return replace(self, kept=tuple(dict.fromkeys((*self.kept, *rename(self.kept).values()))))


@dataclass(frozen=True)
class OtherTools(WeightSource):
    """A checkpoint that another tool quantized; LM head and embedding stay in 16 bits."""

    schema: ForeignSchema

    def matrix(self, name: str, dtype: torch.dtype) -> Matrix:
        return ForeignMatrix(name, self.schema, dtype)

    def vocab_matrix(self, layer: VocabLayer, dtype: torch.dtype) -> Matrix | None:
        return None

    def experts(self, name: str) -> ExpertSource | None:
        return ForeignExperts(name, self.schema)


def order_refusals(model_type: str, name: str, matrices: Sequence[Matrix]) -> tuple[str, ...]:
    """Returns the reasons why vLLM would load the rows of a layer with q, k and v in a wrong order; empty if it would not."""
    is_rearranged = _REARRANGED.get(model_type) == name.rpartition(".")[2]
    if not is_rearranged or all(isinstance(matrix, PlainMatrix) for matrix in matrices):
        return ()
    return (
        f"vLLM reorders these rows of {model_type} while loading, which does not work with packed weights: leave "
        "q, k and v in 16 bits, or quantize 16-bit weights while loading",
    )


def _above(name: str) -> str:
    """Returns the name of the decoder layer to which a layer of experts belongs."""
    return name.rpartition(".")[0].rpartition(".")[0]


def _is_head(name: str) -> bool:
    return name.rpartition(".")[2] in ("lm_head", "embed_out", "output", "output_layer")


def source_of(config: Mapping[str, Any]) -> WeightSource:
    """Returns the source of the matrices of a `quantization_config`. Raises CheckpointError for an invalid field."""
    method = config.get("quant_method")
    if method == METHOD and "layers" in config:
        return OwnCheckpoint(Manifest.from_dict(config, WHERE))
    if method == METHOD:
        return _sixteen_bits(config)
    if method not in SCHEMAS:
        raise CheckpointError(
            f"{WHERE}: quant_method {method!r} is not supported; supported are {', '.join(SCHEMAS)} and {METHOD}"
        )
    return OtherTools(SCHEMAS[method](config, WHERE))


def _sixteen_bits(config: Mapping[str, Any]) -> SixteenBits:
    unknown = sorted(set(map(str, config)) - _ON_LOAD)
    if unknown:
        raise CheckpointError(f"{WHERE}: quantization_config has unknown keys {unknown}; known are {sorted(_ON_LOAD)}")
    if config.get("format_version", FORMAT_VERSION) not in READ_VERSIONS or "scheme" not in config:
        raise CheckpointError(f"{WHERE}: quantization_config states no layers and no scheme, such as w4a16_g128")
    kept, search, head = config.get("modules_to_not_convert") or [], config.get("search", "max"), config.get("head")
    if not isinstance(kept, list) or not all(isinstance(each, str) for each in kept) or search not in ("max", "mse"):
        raise CheckpointError(f"{WHERE}: modules_to_not_convert is a list of names, search max or mse, got {kept!r} {search!r}")
    try:
        scheme, of_head = parse_scheme(config["scheme"]), None if head is None else parse_scheme(head)
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{WHERE}: quantization_config: {error}") from error
    if of_head is not None and isinstance(of_head.granularity, (PerTensor, PerBlock)):
        raise CheckpointError(f"{WHERE}: head: {of_head} shares scales among rows, which an embedding does not support")
    return SixteenBits(scheme, tuple(kept), of_head, search)
