"""Reads the layers of a GGUF file under Transformers' names.

Transformers reads config and tokenizer (with the package gguf), `checkpoint.gguf` the blocks, unchanged. Only models of
`_ARCHITECTURES` are converted, whose names and row order are known. Llama's q and k have another order of rows in GGUF than in
Transformers (`GgufLayerReader._rows`). Experts are stacked: ffn_gate_exps and ffn_up_exps are [E, I, K], ffn_down_exps
[E, K, I].
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from lowbit.checkpoint import CheckpointError, GgufReader
from lowbit.checkpoint.experts import MAX_EXPERTS, ExpertEntry, ExpertTensors, joined, joined_entry
from lowbit.checkpoint.foreign import ForeignEntry
from lowbit.checkpoint.schema import MAX_DIMENSION
from lowbit.formats import QuantTensor
from lowbit.models.skeleton import damaged, tokenizer_of

_GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
}
_DENSE = _ATTENTION | {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_ROUTED = _DENSE | {"ffn_gate_inp": "mlp.gate"}
_SHARED = _ROUTED | {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


@dataclass(frozen=True)
class _Architecture:
    """An architecture of llama.cpp. blocks: llama.cpp's name of a module in a layer -> Transformers' name. permuted: modules
    whose rows are in another order. config: returns the fields that replace those that Transformers reads from the file."""

    blocks: Mapping[str, str] = dataclasses.field(default_factory=lambda: _DENSE)
    permuted: tuple[str, ...] = ()
    config: Callable[[GgufLayerReader], dict[str, Any]] = lambda reader: {}


def _expert_sizes(reader: GgufLayerReader) -> dict[str, Any]:
    """Returns the width of one expert, and of the shared one, which Transformers leaves at its default."""
    sizes = {"moe_intermediate_size": reader.expert_width()}
    shared = reader.width("ffn_gate_shexp")
    return sizes | ({} if shared is None else {"shared_expert_intermediate_size": shared})


def _mixtral(reader: GgufLayerReader) -> dict[str, Any]:
    """Returns the fields of a Mixtral that a Llama does not have."""
    return {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": reader.size("expert_count"),
        "num_experts_per_tok": reader.size("expert_used_count"), "intermediate_size": reader.expert_width(),
        "sliding_window": None,
    }  # fmt: skip


_ARCHITECTURES = {
    "llama": _Architecture(permuted=("attn_q", "attn_k")),
    "qwen2": _Architecture(),
    "qwen3": _Architecture(),
    "qwen2moe": _Architecture(_SHARED, config=_expert_sizes),
    "qwen3moe": _Architecture(_ROUTED, config=_expert_sizes),
}
_MIXTRAL = _Architecture(_ROUTED, permuted=("attn_q", "attn_k"), config=_mixtral)
"""llama.cpp calls Mixtral "llama", and its files have experts."""
_SIZES = {
    "block_count": True, "embedding_length": True, "feed_forward_length": True, "attention.head_count": True,
    "attention.head_count_kv": False, "attention.key_length": False, "attention.value_length": False,
    "context_length": False, "vocab_size": False, "rope.dimension_count": False, "expert_count": False,
    "expert_used_count": False,
}  # fmt: skip
"""Integer fields of the metadata -> True if every file has them."""
_BLOCK_NAME = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")


class GgufLayerReader:
    """Reads the layers and plain tensors of one GGUF file under Transformers' names.

    Raises CheckpointError for architectures other than those of `_ARCHITECTURES`, and for tensors without a counterpart.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.file = GgufReader(self.path)
        self.architecture = str(self.file.metadata.get("general.architecture"))
        if self.architecture not in _ARCHITECTURES:
            raise CheckpointError(
                f"{self.path}: models of the architecture {self.architecture!r} are not converted, {', '.join(_ARCHITECTURES)} "
                "are; load the file with Transformers (gguf_file=...), save_pretrained it in 16 bits, and quantize that"
            )
        stacked = [name for name in self.file.tensors if any(f".{each}." in name for each in _EXPERTS)]
        self._form = _MIXTRAL if stacked and self.architecture == "llama" else _ARCHITECTURES[self.architecture]
        if stacked and "ffn_gate_inp" not in self._form.blocks:
            raise CheckpointError(f"{self.path}: {stacked[0]}: models of the architecture {self.architecture} have no experts")
        self._names = {self._hugging_face_name(name): name for name in self.file.tensors if name not in stacked}
        self.experts: dict[str, ExpertEntry] = {}
        self._stacks: dict[str, tuple[str, ...]] = {}
        for name in stacked:
            self._add_experts(name)
        self.entries: dict[str, ForeignEntry] = {}
        self.plain: list[str] = []
        for new, old in self._names.items():
            entry = self.file.entry(old)
            if entry is None:
                self.plain.append(new)
            else:
                self.entries[new.removesuffix(".weight")] = entry

    def _add_experts(self, name: str) -> None:
        """Adds the expert layer to which a stacked tensor belongs, after checking that the three tensors of the layer fit."""
        match = _BLOCK_NAME.fullmatch(name)
        if match is None or match[3] != "weight":
            raise CheckpointError(f"{self.path}: {name}: experts of the architecture {self.architecture} have no such tensor")
        layer = f"model.layers.{int(match[1])}.mlp.experts"
        tensors = tuple(f"blk.{match[1]}.{each}.weight" for each in _EXPERTS)
        if missing := [each for each in tensors if each not in self.file.tensors]:
            raise CheckpointError(f"{self.path}: {missing[0]}: missing; experts of a layer have {', '.join(_EXPERTS)}")
        (count, gate), (ups, up), (downs, down) = (self.file.stacked_entry(each) for each in tensors)
        if not count == ups == downs <= MAX_EXPERTS or gate.shape != up.shape or down.shape != gate.shape[::-1]:
            raise CheckpointError(
                f"{self.path}: {name}: {count} experts of gate {gate.shape}, {ups} of up {up.shape} and {downs} of down "
                f"{down.shape} do not go together"
            )
        self._stacks[layer] = tensors
        self.experts[layer] = ExpertEntry(count, joined_entry([gate, up]), down)

    def config(self) -> PretrainedConfig:
        """Returns the model's configuration, which Transformers derives from the metadata.

        Raises CheckpointError, naming the field, for one that is missing, an array, or out of range.
        """
        for field, required in _SIZES.items():
            value = self._field(field, required)
            if value is not None and (type(value) is not int or not 0 < value < MAX_DIMENSION):
                raise CheckpointError(f"{self.path}: {self.architecture}.{field} is a whole number from 1, got {value!r}")
        for field, most in (("attention.layer_norm_rms_epsilon", 1.0), ("rope.freq_base", 1e30)):
            value = self._field(field, False)
            if value is not None and (type(value) not in (int, float) or not 0 < value <= most):
                raise CheckpointError(
                    f"{self.path}: {self.architecture}.{field} is a number above 0 and at most {most:g}, got {value!r}"
                )
        with damaged(self.path, "Transformers cannot read its metadata", self.file.metadata):
            try:
                config = AutoConfig.from_pretrained(self.path.parent, gguf_file=self.path.name, trust_remote_code=False)
                own = self._form.config(self)
                return AutoConfig.for_model(**{**config.to_dict(), **own}) if own else config
            except ImportError as error:
                raise CheckpointError(
                    f"{self.path}: Transformers needs the package gguf for GGUF files: pip install gguf"
                ) from error

    def size(self, name: str) -> int:
        """Returns an integer field of the architecture that the file has to have."""
        value = self._field(name, True)
        assert isinstance(value, int)  # `_SIZES` has the field
        return value

    def expert_width(self) -> int:
        """Returns I, the width of one expert, which is equal in all layers."""
        widths = {entry.down.shape[1] for entry in self.experts.values()}
        if len(widths) != 1:
            raise CheckpointError(f"{self.path}: experts of widths {sorted(widths)}; models with one width are read")
        return widths.pop()

    def width(self, name: str) -> int | None:
        """Returns the rows of the matrix `name` in the first layer that has it; None if no layer has one."""
        tensors = (t for n, t in self.file.tensors.items() if n.startswith("blk.") and n.endswith(f".{name}.weight"))
        return next((tensor.shape[0] for tensor in tensors), None)

    def _field(self, name: str, required: bool) -> Any:
        """Returns a field of the architecture; None for a missing one that is not required."""
        key = f"{self.architecture}.{name}"
        if key in self.file.arrays:
            raise CheckpointError(
                f"{self.path}: {key} is an array of {self.file.arrays[key]:,} values, one for each layer perhaps; models with "
                "one number for all layers are read"
            )
        if required and key not in self.file.metadata:
            raise CheckpointError(f"{self.path}: {key} is missing; make the file again")
        return self.file.metadata.get(key)

    def save_tokenizer(self, folder: Path) -> None:
        """Writes the tokenizer's files."""
        tokenizer_of(self.path).save_pretrained(folder)

    def layer(self, name: str, device: torch.device | str = "cpu") -> QuantTensor:
        """Returns one layer, computed on `device`, with rows in Transformers' order."""
        old = self._names[f"{name}.weight"]
        q = self.file.layer(old, device)
        rows = self._rows(old, q.shape[0])
        if rows is None:
            return q
        return QuantTensor(q.codes[rows], q.scale[rows], None if q.zero is None else q.zero[rows], q.scheme)

    def expert_layer(self, name: str, device: torch.device | str = "cpu") -> ExpertTensors:
        """Returns the experts of one layer, decoded on `device`. Raises CheckpointError if blocks of gate and up differ."""
        entry, (gate, up, down) = self.experts[name], self._stacks[name]
        if entry.refusals:
            raise CheckpointError(f"{self.path}: {name}: {'; '.join(entry.refusals)}")
        every = range(entry.experts)
        return ExpertTensors(
            tuple(joined([self.file.layer(each, device, e) for each in (gate, up)]) for e in every),
            tuple(self.file.layer(down, device, e) for e in every),
        )

    def dequantize(self, name: str, dtype: torch.dtype) -> Tensor:
        """Returns one layer's weights [N, K]."""
        return self.layer(name).dequantize(dtype)

    def get(self, name: str) -> Tensor:
        """Returns a plain tensor with rows in Transformers' order."""
        tensor = self.file.get(self._names[name])
        if ".ffn_gate_inp_shexp." in self._names[name] and tensor.dim() == 1:  # one output, whose dimension GGUF leaves out
            tensor = tensor[None]
        rows = self._rows(self._names[name], tensor.shape[0])
        return tensor if rows is None else tensor[rows]

    def _rows(self, name: str, n: int) -> Tensor | None:
        """Returns the GGUF row of each of Transformers' rows, int64 [n]; None if the order is the same.

        Rotary embeddings pair row i of the first half of a head with row i of the second half. GGUF stores the two rows of a
        pair next to each other.
        """
        parts = name.split(".")
        if len(parts) != 4 or parts[2] not in self._form.permuted:
            return None
        heads = self._field("attention.head_count", True)
        if parts[2] == "attn_k":
            heads = self._field("attention.head_count_kv", False) or heads
        if type(heads) is not int or heads < 1 or n % (2 * heads):
            raise CheckpointError(f"{self.path}: {name}: {n} rows are no pairs of halves of {heads!r} heads")
        return torch.arange(n).reshape(heads, n // heads // 2, 2).transpose(1, 2).flatten()

    def _hugging_face_name(self, name: str) -> str:
        head, _, kind = name.rpartition(".")
        if head in _GLOBAL and kind in ("weight", "bias"):
            return f"{_GLOBAL[head]}.{kind}"
        match = _BLOCK_NAME.fullmatch(name)
        if match is None or match[2] not in self._form.blocks:
            raise CheckpointError(
                f"{self.path}: {name}: has no counterpart in Transformers' {self.architecture} that is known here; load the "
                "file with Transformers (gguf_file=...), save_pretrained it in 16 bits, and quantize that"
            )
        return f"model.layers.{int(match[1])}.{self._form.blocks[match[2]]}.{match[3]}"
