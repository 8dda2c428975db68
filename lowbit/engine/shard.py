"""The part of a language model that one of several ranks holds (tensor parallelism), as data.

    q, k, v, gate, up   output channels (rows of w): whole heads, a range of the MLP
    o, down             the input channels (columns of w) that belong to these rows; outputs of all ranks are added
    LM head             a range of the vocabulary; all ranks gather the logits
    the rest            whole, on every rank: embedding, norms

A rank's model is of the same class of Transformers, with a configuration of fewer heads and a narrower MLP. So code that reads
a model (recognise.py, the program, packing) needs no special cases. If there are fewer KV heads than ranks, several ranks hold
the same head. formats/split.py cuts quantized weights. If a cut divides a group, both parts get the group's scale.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from lowbit.engine.decoder import DenseMLP
from lowbit.engine.family import FAMILIES
from lowbit.engine.family_model import FamilyModel
from lowbit.engine.recognise import family_of
from lowbit.formats import QuantTensor
from lowbit.formats.split import Range, by_channel, columns_of, columns_refusals, filled_up, part_range, rows_of
from lowbit.ops.ranks import Ranks


@dataclass(frozen=True)
class Cut:
    """How a module's matrix [N, K] is cut. "rows": the matrix is a concatenation of matrices, each of which is cut by rows;
    `parts` has (all rows, rows of one rank) of each. "columns": into equal ranges. "vocabulary": into ranges of ceil(N / ranks)
    rows, the last one filled up with rows of 0."""

    kind: Literal["rows", "columns", "vocabulary"]
    parts: tuple[tuple[int, int], ...] = ()

    def ranges(self, rank: int, ranks: int) -> list[Range]:
        """Returns the ranges of rows that `rank` holds."""
        found, begin = [], 0
        for total, part in self.parts:
            first, last = part_range(total, part, rank, ranks)
            found.append((begin + first, begin + last))
            begin += total
        return found


@dataclass(frozen=True)
class ShardPlan:
    """How the modules of a model are cut for `ranks` ranks. cuts: by names of modules; modules without a cut are whole on every
    rank. config: the configuration of one rank's model. tied: the LM head of the whole model uses the embedding's weight; each
    rank's head gets its own copy of the rank's rows."""

    ranks: int
    config: PreTrainedConfig
    head: str
    embedding: str
    tied: bool
    cuts: dict[str, Cut] = field(default_factory=dict)

    @classmethod
    def of(cls, model: PreTrainedModel, ranks: int) -> ShardPlan:
        """Returns the plan of a causal language model, which may be on the meta device.

        Raises ValueError, naming the reasons, for a model that cannot be cut for so many ranks.
        """
        family = family_of(model)
        if family is None:
            known = ", ".join(FAMILIES)
            raise ValueError(f"tensor parallelism takes models with a decode program ({known}), not a {type(model).__name__}")
        found = FamilyModel(model, family)
        reasons = _refusals(found, ranks)
        if reasons:
            raise ValueError(f"this {type(model).__name__} cannot be computed by {ranks} ranks: {'; '.join(reasons)}")
        names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
        heads, kv_heads, head_dim = _heads(found)
        own_kv = max(kv_heads // ranks, 1)
        q = (heads * head_dim, heads // ranks * head_dim)
        kv = (kv_heads * head_dim, own_kv * head_dim)
        width = int(found.config.intermediate_size)
        mlp = (width, width // ranks)
        cuts: dict[str, Cut] = {}
        for layer in found.layers:
            qkv, dense = found.qkv(layer), found.mlp(layer)
            assert isinstance(dense, DenseMLP)
            cuts |= _row_cuts(names, qkv, (q, kv, kv))
            cuts |= _row_cuts(names, dense.gate_up, (mlp, mlp))
            cuts |= {names[module]: Cut("columns") for module in (found.o(layer), dense.down)}
        head, embedding = names[found.head], names[found.embedding]
        cuts[head] = Cut("vocabulary")
        ties = getattr(model, "all_tied_weights_keys", None) or {}
        config = copy.deepcopy(found.config)
        config.num_attention_heads, config.num_key_value_heads = heads // ranks, own_kv
        config.head_dim, config.intermediate_size = head_dim, width // ranks
        config.tie_word_embeddings = False
        return cls(ranks, config, head, embedding, ties.get(f"{head}.weight") == f"{embedding}.weight", cuts)

    def weight(self, name: str, q: QuantTensor, rank: int) -> QuantTensor:
        """Returns the part of a module's quantized weight. Raises ValueError, naming the module, for columns that cannot be
        cut."""
        cut = self.cuts.get(name)
        if cut is None:
            return q
        if cut.kind == "rows":
            return rows_of(q, cut.ranges(rank, self.ranks))
        if cut.kind == "vocabulary":
            part, begin, end = self._vocabulary(q.shape[0], rank)
            return filled_up(rows_of(by_channel(q), [(begin, end)]), part)
        reasons = columns_refusals(q, self.ranks)
        if reasons:
            raise ValueError(f"{name} cannot be computed by {self.ranks} ranks: {'; '.join(reasons)}")
        own, index = columns_of(q, rank, self.ranks)
        if index is not None:
            raise ValueError(
                f"{name}: its input channels are in another order (act-order), so that each of {self.ranks} ranks would need "
                "columns of all groups; quantize without act-order, or load it without tensor_parallel"
            )
        return own

    def plain(self, name: str, leaf: str, tensor: Tensor, rank: int) -> Tensor | None:
        """Returns the part of a parameter `leaf` ("weight" or "bias") of a module that is not quantized. Outputs of modules
        that are cut by columns are summed over all ranks, so only rank 0 adds their bias; returns None for it on other
        ranks."""
        cut = self.cuts.get(name)
        if cut is None:
            return tensor
        if cut.kind == "columns":
            if leaf == "bias":
                return tensor if rank == 0 else None
            begin, end = part_range(tensor.shape[1], tensor.shape[1] // self.ranks, rank, self.ranks)
            return tensor[:, begin:end].contiguous()
        if cut.kind == "rows":
            return torch.cat([tensor[begin:end] for begin, end in cut.ranges(rank, self.ranks)])
        part, begin, end = self._vocabulary(tensor.shape[0], rank)
        own = tensor[begin:end]
        return torch.cat([own, own.new_zeros(part - len(own), *own.shape[1:])]) if len(own) < part else own.clone()

    def whole(self, cut: Cut, y: Tensor, ranks: Ranks, outputs: int) -> Tensor:
        """Returns the outputs [M, outputs] of a whole layer from the outputs `y` of this rank's part. All ranks must call it
        together, each with its own part."""
        if cut.kind == "columns":
            return ranks.total(y, 0)
        parts = ranks.gathered(y, y.shape[1] * self.ranks)
        if cut.kind == "vocabulary":
            return parts[:, :outputs]
        made = y.new_empty(len(y), outputs)
        for rank, part in enumerate(parts.split(y.shape[1], dim=1)):
            made[:, torch.cat([torch.arange(*each) for each in cut.ranges(rank, self.ranks)])] = part
        return made

    def _vocabulary(self, rows: int, rank: int) -> tuple[int, int, int]:
        """Returns (rows of each part, first row of `rank`, end of its rows). The last part may have fewer rows of its own."""
        part = -(-rows // self.ranks)
        return part, min(rank * part, rows), min((rank + 1) * part, rows)


def _row_cuts(names: dict[nn.Module, str], modules: Sequence[nn.Module], parts: tuple[tuple[int, int], ...]) -> dict[str, Cut]:
    """Returns the cuts of modules whose concatenated outputs consist of `parts`. A single module has all parts, otherwise each
    module has one."""
    if len(modules) == 1:
        return {names[modules[0]]: Cut("rows", parts)}
    return {names[module]: Cut("rows", (part,)) for module, part in zip(modules, parts, strict=True)}


def _heads(model: FamilyModel) -> tuple[int, int, int]:
    """Returns heads, KV heads and elements of a head."""
    attention = model.layers[0].self_attn
    heads = int(model.config.num_attention_heads)
    return heads, heads // int(attention.num_key_value_groups), int(attention.head_dim)


def _refusals(model: FamilyModel, ranks: int) -> tuple[str, ...]:
    """Returns why a model of a known family cannot be cut for `ranks` ranks."""
    family = model.family
    if family.paths.positions:
        return (f"attention of {family.name} takes the width of all heads from its configuration, not from their number",)
    if family.norms_whole_heads:
        return (f"norms of {family.name} are of all heads of q and k together",)
    if any(model.has_experts(layer) for layer in model.layers):
        return ("its experts are not cut",)
    heads, kv_heads, _ = _heads(model)
    width = int(model.config.intermediate_size)
    reasons = []
    if heads % ranks:
        reasons.append(f"its {heads} heads are no multiple of {ranks}")
    if kv_heads % ranks and ranks % kv_heads:
        reasons.append(f"its {kv_heads} KV heads are neither a multiple nor a divisor of {ranks}")
    if width % ranks:
        reasons.append(f"the width {width:,} of its MLP is no multiple of {ranks}")
    return tuple(reasons)
