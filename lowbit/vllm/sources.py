"""What a `quantization_config` says of the matrices of a model: ours, 16 bits to be quantized, another tool's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lowbit.checkpoint import CheckpointError, Manifest
from lowbit.checkpoint.detect import SCHEMAS
from lowbit.checkpoint.foreign import ForeignSchema
from lowbit.checkpoint.schema import FORMAT_VERSION, METHOD, READ_VERSIONS
from lowbit.formats import PerBlock, PerTensor, Scheme, parse_scheme
from lowbit.methods import Search
from lowbit.nn.convert import matches
from lowbit.vllm.matrices import ForeignMatrix, Matrix, PackedMatrix, PlainMatrix, RoundedMatrix

WHERE = "config.json"
_ON_LOAD = {"quant_method", "format_version", "scheme", "modules_to_not_convert", "head", "search"}
_EXPERTS = "experts are not computed with packed weights yet"
_REARRANGED = {
    **dict.fromkeys(("bloom", "falcon", "gpt_neox", "persimmon"), "query_key_value"),
    "llama4_text": "qkv_proj",
}
"""Layers whose rows vLLM brings into another order while it loads them, by the type of the model (its `load_weights`, 0.25.1
and 0.32.0): of a weight in 16 bits all, of a packed one not the zeros, the corrections, or nothing at all."""


@dataclass(frozen=True)
class End:
    """The embedding or, where `is_head`, the LM head of a model: its name ("" where vLLM's model gives an embedding none), its
    shape (tokens, K), and whether the model has one weight for both."""

    name: str
    shape: tuple[int, int]
    is_head: bool
    tied: bool


Renaming = Callable[[Iterable[str]], Mapping[str, str]]

_USUAL = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""What engines stack, for models that do not state it."""


class Source(ABC):
    """The matrices of a model by the names that vLLM's model has for them."""

    def matrices(self, name: str, members: Mapping[str, Sequence[str]], dtype: torch.dtype) -> list[Matrix]:
        """Those that a linear layer of the engine is made of; `members`: what its model stacks, by the last part of a name."""
        parent, dot, last = name.rpartition(".")
        return [self.matrix(f"{parent}{dot}{member}", dtype) for member in members.get(last, (last,))]

    @abstractmethod
    def matrix(self, name: str, dtype: torch.dtype) -> Matrix:
        """The matrix of a linear layer, in `dtype` where it is in 16 bits."""

    @abstractmethod
    def end(self, end: End, dtype: torch.dtype) -> Matrix | None:
        """That of the embedding or of the LM head; None where it stays in 16 bits."""

    @abstractmethod
    def expert_refusals(self, name: str) -> tuple[str, ...]:
        """Why the experts under a name cannot be computed with; empty if they stay in 16 bits as they are."""

    def renamed(self, rename: Renaming) -> Source:
        """The same with other names for matrices."""
        return self


@dataclass(frozen=True)
class OwnCheckpoint(Source):
    """One that `lowbit quantize`, `convert` or `save_pretrained` wrote."""

    manifest: Manifest

    def matrix(self, name: str, dtype: torch.dtype) -> Matrix:
        entry = self.manifest.layers.get(name)
        return PlainMatrix(name, dtype) if entry is None else PackedMatrix(name, entry)

    def matrices(self, name: str, members: Mapping[str, Sequence[str]], dtype: torch.dtype) -> list[Matrix]:
        """As the files have them: one where the layer's own name is there, whatever its model states (GLM-4's gate_up_proj)."""
        if name in self.manifest.layers:
            return [self.matrix(name, dtype)]
        return super().matrices(name, {**_USUAL, **members}, dtype)

    def end(self, end: End, dtype: torch.dtype) -> Matrix | None:
        name = end.name or self._embedding(end.shape)
        owner = self.manifest.tied.get(name, name)
        entry = self.manifest.layers.get(owner)
        if end.is_head and end.tied and owner == name and entry is not None:
            raise CheckpointError(
                f"{WHERE}: {name} has weights of its own, but tie_word_embeddings is true, and vLLM would not load them; set "
                "tie_word_embeddings to false"
            )
        return None if entry is None else PackedMatrix(owner, entry)

    def _embedding(self, shape: tuple[int, int]) -> str:
        """The embedding among the layers: it has the shape, and no LM head's name."""
        found = [name for name, entry in self.manifest.layers.items() if entry.shape == shape and not _is_head(name)]
        if len(found) > 1:
            raise CheckpointError(
                f"{WHERE}: which of {', '.join(found)} is the embedding {list(shape)} is not known; it has no name"
            )
        return found[0] if found else ""

    def expert_refusals(self, name: str) -> tuple[str, ...]:
        return (_EXPERTS,) if any(layer.startswith(f"{name}.") for layer in self.manifest.layers) else ()

    def renamed(self, rename: Renaming) -> Source:
        new, tied = rename(self.manifest.layers), rename(self.manifest.tied)
        layers = {new[name]: entry for name, entry in self.manifest.layers.items() if name in new}
        ties = {tied[name]: new[owner] for name, owner in self.manifest.tied.items() if name in tied and owner in new}
        return OwnCheckpoint(replace(self.manifest, layers=layers, tied=ties))


@dataclass(frozen=True)
class SixteenBits(Source):
    """16-bit weights that are rounded to `scheme` as they come; LM head and embedding to `head`, or not at all."""

    scheme: Scheme
    kept: tuple[str, ...] = ()
    head: Scheme | None = None
    search: Search = "max"

    def matrix(self, name: str, dtype: torch.dtype) -> Matrix:
        if any(matches(name, pattern) for pattern in self.kept):
            return PlainMatrix(name, dtype)
        return RoundedMatrix(name, dtype, self.scheme, self.search)

    def end(self, end: End, dtype: torch.dtype) -> Matrix | None:
        return None if self.head is None else RoundedMatrix(end.name or "the embedding", dtype, self.head, self.search)

    def expert_refusals(self, name: str) -> tuple[str, ...]:
        if any(matches(name, pattern) for pattern in self.kept):
            return ()
        return (f"{_EXPERTS}; leave them in 16 bits (modules_to_not_convert: *.experts)",)

    def renamed(self, rename: Renaming) -> Source:
        return replace(self, kept=tuple(dict.fromkeys((*self.kept, *rename(self.kept).values()))))


@dataclass(frozen=True)
class OtherTools(Source):
    """A checkpoint that another tool quantized; LM head and embedding as vLLM takes them, in 16 bits."""

    schema: ForeignSchema

    def matrix(self, name: str, dtype: torch.dtype) -> Matrix:
        return ForeignMatrix(name, self.schema, dtype)

    def end(self, end: End, dtype: torch.dtype) -> Matrix | None:
        return None

    def expert_refusals(self, name: str) -> tuple[str, ...]:
        return (f"{_EXPERTS}; serve this checkpoint without --quantization lowbit",)


def order_refusals(model_type: str, name: str, matrices: Sequence[Matrix]) -> tuple[str, ...]:
    """Why the rows of a layer that holds q, k and v would be in a wrong order; empty if they would not."""
    is_rearranged = _REARRANGED.get(model_type) == name.rpartition(".")[2]
    if not is_rearranged or all(isinstance(matrix, PlainMatrix) for matrix in matrices):
        return ()
    return (
        f"vLLM rearranges these rows of {model_type} while it loads them, which it does not do with packed weights: leave "
        "q, k and v in 16 bits, or have 16-bit weights quantized while they are loaded",
    )


def _is_head(name: str) -> bool:
    return name.rpartition(".")[2] in ("lm_head", "embed_out", "output", "output_layer")


def source_of(config: Mapping[str, Any]) -> Source:
    """What a `quantization_config` says; raises CheckpointError, naming the field, for one that says nothing or too much."""
    method = config.get("quant_method")
    if method == METHOD and "layers" in config:
        return OwnCheckpoint(Manifest.from_dict(config, WHERE))
    if method == METHOD:
        return _sixteen_bits(config)
    if method not in SCHEMAS:
        raise CheckpointError(f"{WHERE}: quant_method {method!r} is not read; read are {', '.join(SCHEMAS)} and {METHOD}")
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
        raise CheckpointError(f"{WHERE}: head: rows of an embedding need scales of their own, {of_head} shares them among rows")
    return SixteenBits(scheme, tuple(kept), of_head, search)
