"""Reads a checkpoint with the model's residual stream and attention heads rotated (`quantize.rotate`).

The model computes the same. Layers that write to the residual stream (embedding, output and down projection) are multiplied by
a matrix R, and layers that read it (query, key, value, gate, up, LM head) by its inverse: x R (W R)^T = x W^T. RMSNorm
preserves the norm of x, so it commutes with R once its weight is folded into the layers that read it. The channels of each head
are rotated by another matrix, from the value to the output projection. There is no cost at run time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from lowbit.checkpoint import CheckpointError, CheckpointReader
from lowbit.models.complete import require_complete, require_finite_tensor
from lowbit.models.decoder import LayerwiseDecoder
from lowbit.models.names import TensorNames
from lowbit.models.skeleton import skeleton
from lowbit.quantize.rotate import Rotation

TOLERANCE = 1e-4
"""Largest relative difference, in float32, between the outputs of the rotated model and the rotated outputs of the model."""

_EMBEDDING, _NORM, _HEAD = "embed_tokens.weight", "norm.weight", "lm_head.weight"
_COMPUTED = "rotary_emb.inv_freq"
"""A tensor of older files that is not used."""
_LAYER = re.compile(r"layers\.(\d+)\.(.*)")
_BEFORE = {"self_attn": "input_layernorm.weight", "mlp": "post_attention_layernorm.weight"}
"""The norm between the residual stream and a part of a layer."""
_READS = re.compile(r"self_attn\.((q|k|v)_proj\.weight|v_proj\.bias)|mlp\.(gate|up)_proj\.weight")
_WRITES = re.compile(r"(self_attn\.o|mlp\.down)_proj\.(weight|bias)")
_STAYS = re.compile(r"self_attn\.((q|k)_proj\.bias|(q|k)_norm\.weight)|mlp\.(gate|up)_proj\.bias")


class RotatedReader(CheckpointReader):
    """Reads a 16-bit Llama-like decoder and rotates its tensors by matrices determined by `seed`.

    Rotated matrices are float32; `info` describes the files. A tied LM head is untied, since only the head contains the weight
    of the last norm, and `config` states that. Raises CheckpointError for other models, with the reason; `check` compares
    outputs.
    """

    def __init__(self, folder: str | Path, seed: int) -> None:
        super().__init__(folder)
        model = skeleton(self.folder)
        names, prefix = TensorNames(model), f"{model.base_model_prefix}."
        require_complete(self.folder, model, {tensor: self.info(tensor).shape for tensor in self.names()}, names)
        own = {tensor: names.parameter(tensor) or tensor for tensor in self.names() if not tensor.endswith(_COMPUTED)}
        self._roles = {tensor: name.removeprefix(prefix) for tensor, name in own.items()}
        self._refuse(type(model).__name__)
        self.untied = _HEAD not in self._roles.values()
        if self.untied:
            embedding = next(tensor for tensor, role in self._roles.items() if role == _EMBEDDING)
            self._tensors[_HEAD], self._stored[_HEAD], self._roles[_HEAD] = self._tensors[embedding], embedding, _HEAD
        self._files = {role: tensor for tensor, role in self._roles.items()}
        self.config = {**self.config, "tie_word_embeddings": False}
        text: Any = model.config.get_text_config()
        self._head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
        try:
            self.residual = Rotation(text.hidden_size, seed)
            Rotation(self._head_dim, seed)
        except ValueError as error:
            raise CheckpointError(f"{self.folder}: {error}") from error
        self.rotation = seed

    def get(self, name: str) -> Tensor:
        """Returns one tensor, rotated."""
        raw, role = self._raw(name), self._roles.get(name)
        if role is None:
            return raw
        if role == _EMBEDDING:
            return self.residual.apply(raw.float())
        if role == _HEAD:
            return self._read_by(raw, _NORM)
        if role == _NORM:
            return torch.ones_like(raw)
        layer, part = _LAYER.fullmatch(role).groups()  # type: ignore[union-attr]
        if part in _BEFORE.values():
            return torch.ones_like(raw)
        if _STAYS.fullmatch(part):
            return raw
        if _WRITES.fullmatch(part):
            rotated = self._heads(raw, int(layer), -1) if part == "self_attn.o_proj.weight" else raw.float()
            return self.residual.apply(rotated, 0)
        rotated = self._heads(raw, int(layer), 0) if part.startswith("self_attn.v_proj") else raw
        return rotated if part.endswith("bias") else self._read_by(rotated, f"layers.{layer}.{_BEFORE[part.split('.')[0]]}")

    @torch.no_grad()
    def check(self) -> None:
        """Runs embedding, first layer and last norm with LM head in float32, rotated and not; raises CheckpointError if they
        differ, as for norms that add 1 to their weight or subtract a mean."""
        tokens = torch.arange(32)[None] % self._tensors[self._files[_EMBEDDING]].shape[0]
        added, outputs, logits = [], [], []
        for reader in (CheckpointReader(self.folder), self):
            decoder = LayerwiseDecoder(reader, "cpu", torch.float32)
            hidden = decoder.embed(tokens)
            decoder.load(0)
            after = next(decoder.run(0, hidden))
            norm = decoder.model.get_submodule(f"{decoder.name.rpartition('.')[0]}.norm")
            head = _HEAD if reader is self or not self.untied else _EMBEDDING
            last = functional_call(norm, {"weight": reader.get(self._files[_NORM]).float()}, (after,))
            added.append(after - hidden[0])
            outputs.append(after)
            logits.append(last @ reader.get(self._files[head]).float().T)
        pairs = [(self.residual.apply(added[0]), added[1]), (self.residual.apply(outputs[0]), outputs[1]), tuple(logits)]
        worst = max(float((a - b).norm() / a.norm()) for a, b in pairs)
        if not worst <= TOLERANCE:
            raise CheckpointError(
                f"{self.folder}: {type(decoder.model).__name__} computes something else when it is rotated (a relative "
                f"difference of {worst:.1e}): its norms or its residual stream are not Llama's; quantize it without --rotate"
            )

    def _read_by(self, weight: Tensor, norm: str) -> Tensor:
        """Returns the rotated weight [N, D] of a layer that reads the residual stream through `norm`."""
        return self.residual.apply(weight.float() * self._raw(self._files[norm]).float())

    def _raw(self, name: str) -> Tensor:
        """Returns one tensor of the files; raises CheckpointError if it is not finite, since a rotation would spread that."""
        return require_finite_tensor(self.info(name).file, name, super().get(name))

    def _heads(self, x: Tensor, layer: int, dim: int) -> Tensor:
        """Returns x with the channels of each head rotated, along `dim` 0 or -1."""
        parts = x.float().unflatten(dim, (-1, self._head_dim))
        rotation = Rotation(self._head_dim, self.rotation + 1 + layer)  # type: ignore[operator]
        return rotation.apply(parts, 1 if dim == 0 else -1).reshape(x.shape)

    def _refuse(self, model: str) -> None:
        """Raises CheckpointError for tensors without a known rotation."""
        reasons = rotation_refusals(self._roles.values())
        if reasons:
            raise CheckpointError(
                f"{self.folder}: {model} {reasons[0]}; rotated are decoders such as Llama, Mistral, Qwen 2 and Qwen 3, whose "
                "layers have an RMSNorm before attention and one before a gated MLP; quantize it without --rotate"
            )


def rotation_refusals(tensors: Iterable[str]) -> tuple[str, ...]:
    """Returns why a decoder with these tensor names, without the prefix of the base model, cannot be rotated; empty if it
    can."""
    roles = set(tensors)
    layers = {match[1] for match in map(_LAYER.fullmatch, roles) if match is not None}
    norms = [f"layers.{layer}.{norm}" for layer in sorted(layers, key=int) for norm in _BEFORE.values()]
    strange = [f"has {role}" for role in sorted(roles - {_EMBEDDING, _NORM, _HEAD}) if not _is_known(role)]
    return (*strange, *(f"has no {role}" for role in (_EMBEDDING, _NORM, *norms) if role not in roles))


def _is_known(role: str) -> bool:
    match = _LAYER.fullmatch(role)
    if match is None:
        return False
    part = match[2]
    return part in _BEFORE.values() or any(pattern.fullmatch(part) is not None for pattern in (_READS, _WRITES, _STAYS))
