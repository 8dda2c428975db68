"""Reads the layers of a GGUF file under Transformers' names.

Transformers reads config and tokenizer (with the package gguf), `checkpoint.gguf` the blocks, unchanged. Only llama, qwen2 and
qwen3 models are converted, whose names and row order are known. Llama's q and k rows are interleaved in GGUF and in halves in
Transformers; they are permuted.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from lowbit.checkpoint import CheckpointError, GgufReader
from lowbit.checkpoint.foreign import ForeignEntry
from lowbit.checkpoint.schema import MAX_DIMENSION
from lowbit.formats import QuantTensor
from lowbit.models.skeleton import damaged, tokenizer_of

_GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PERMUTED = {"llama": ("attn_q", "attn_k"), "qwen2": (), "qwen3": ()}
"""Architecture -> tensors whose rows GGUF stores in another order."""
_SIZES = {
    "block_count": True, "embedding_length": True, "feed_forward_length": True, "attention.head_count": True,
    "attention.head_count_kv": False, "attention.key_length": False, "attention.value_length": False,
    "context_length": False, "vocab_size": False, "rope.dimension_count": False,
}  # fmt: skip
"""Integer fields of the metadata -> True if every file has them."""
_BLOCK_NAME = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")


class GgufLayerReader:
    """Reads the layers and plain tensors of one GGUF file under Transformers' names.

    Raises CheckpointError for architectures other than llama, qwen2 and qwen3, and for tensors without a counterpart.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.file = GgufReader(self.path)
        self.architecture = str(self.file.metadata.get("general.architecture"))
        if self.architecture not in _PERMUTED:
            raise CheckpointError(
                f"{self.path}: models of the architecture {self.architecture!r} are not converted, {', '.join(_PERMUTED)} "
                "are; load the file with Transformers (gguf_file=...), save_pretrained it in 16 bits, and quantize that"
            )
        self._names = {self._hugging_face_name(name): name for name in self.file.tensors}
        self.entries: dict[str, ForeignEntry] = {}
        self.plain: list[str] = []
        for new, old in self._names.items():
            entry = self.file.entry(old)
            if entry is None:
                self.plain.append(new)
            else:
                self.entries[new.removesuffix(".weight")] = entry

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
                return AutoConfig.from_pretrained(self.path.parent, gguf_file=self.path.name, trust_remote_code=False)
            except ImportError as error:
                raise CheckpointError(
                    f"{self.path}: Transformers needs the package gguf for GGUF files: pip install gguf"
                ) from error

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

    def dequantize(self, name: str, dtype: torch.dtype) -> Tensor:
        """Returns one layer's weights [N, K]."""
        return self.layer(name).dequantize(dtype)

    def get(self, name: str) -> Tensor:
        """Returns a plain tensor with rows in Transformers' order."""
        tensor = self.file.get(self._names[name])
        rows = self._rows(self._names[name], tensor.shape[0])
        return tensor if rows is None else tensor[rows]

    def _rows(self, name: str, n: int) -> Tensor | None:
        """Returns the GGUF row of each of Transformers' rows, int64 [n]; None if the order is the same.

        GGUF interleaves the two halves that rotary embeddings pair.
        """
        parts = name.split(".")
        if len(parts) != 4 or parts[2] not in _PERMUTED[self.architecture]:
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
        if match is None or match[2] not in _BLOCK:
            raise CheckpointError(
                f"{self.path}: {name}: has no counterpart in Transformers' {self.architecture} that is known here; load the "
                "file with Transformers (gguf_file=...), save_pretrained it in 16 bits, and quantize that"
            )
        return f"model.layers.{int(match[1])}.{_BLOCK[match[2]]}.{match[3]}"
