"""The modules of a model, found by the paths of its family."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.engine.decoder import DenseMLP, ExpertsMLP
from lowbit.engine.experts import activation_of
from lowbit.engine.family import Family
from lowbit.kernels.reference.elementwise import GATES, Gate, gate_reference
from lowbit.nn.fused import AlternatingMLP, GatedMLP

NO_ROPE = "none"
"""Rotary type of a layer without rotary embedding (SmolLM3): all angles are 0, with cosines 1 and sines 0."""


class FamilyModel:
    """A causal language model of Transformers with the names of its family; `layers`: its decoder layers."""

    def __init__(self, model: Any, family: Family) -> None:
        self.model, self.family, self.config = model, family, model.config
        self.embedding: Any = model.get_input_embeddings()
        self.head: Any = model.lm_head

    @functools.cached_property
    def layers(self) -> list[Any]:
        """The decoder layers."""
        return list(self._in_decoder("layers")[: self.config.num_hidden_layers])

    @property
    def final_norm(self) -> Any:
        """The norm before the head."""
        return self._in_decoder(self.family.paths.final_norm)

    @property
    def position_embedding(self) -> Any:
        """The embedding of positions, of a family that has one."""
        return self._in_decoder(self.family.paths.positions)

    def _in_decoder(self, path: str) -> Any:
        return self.model.get_submodule(f"{self.family.paths.decoder}.{path}")

    def qkv(self, layer: Any) -> tuple[nn.Module, ...]:
        """The modules that compute q, k and v."""
        attention = layer.self_attn
        if hasattr(attention, "qkv_proj"):
            return (attention.qkv_proj,)
        return attention.q_proj, attention.k_proj, attention.v_proj

    def o(self, layer: Any) -> nn.Module:
        """The output product of attention."""
        module: nn.Module = layer.get_submodule(self.family.paths.o)
        return module

    def mlp_module(self, layer: Any) -> Any:
        """The module that has the products of the MLP: the layer itself in some families."""
        return layer.get_submodule(self.family.paths.mlp.module)

    def has_experts(self, layer: Any) -> bool:
        """True if the MLP of a layer is the family's block of experts."""
        name = f"{self.family.name}{self.family.experts}"
        return bool(self.family.experts) and type(self.mlp_module(layer)).__name__ == name

    def mlp(self, layer: Any) -> DenseMLP | ExpertsMLP:
        """The products of the MLP, or its experts."""
        paths, mlp = self.family.paths.mlp, self.mlp_module(layer)
        if self.has_experts(layer):
            return ExpertsMLP(mlp, mlp.get_submodule(self.family.router))
        gate_up: tuple[nn.Module, ...]
        if isinstance(mlp, AlternatingMLP):
            gate_up = ()
        elif not paths.gated:
            gate_up = (mlp.get_submodule(paths.up),)
        else:
            gate_up = (mlp.gate_up_proj,) if hasattr(mlp, "gate_up_proj") else (mlp.gate_proj, mlp.up_proj)
        return DenseMLP(gate_up, mlp.get_submodule(paths.down))

    def norms(self, layer: Any) -> list[Any]:
        """All norms of a layer."""
        names = [*self.family.paths.norms]
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if self.family.normalises_deltas else []
        of_heads = [getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm")]
        return [*(getattr(layer, name) for name in names), *(norm for norm in of_heads if norm is not None)]

    def attention_type(self, i: int) -> str:
        """The attention type of layer i: full_attention unless the config has layer_types."""
        types = getattr(self.config, "layer_types", None)
        return "full_attention" if types is None else str(types[i])

    def rope_type(self, i: int) -> str:
        """The type of rotary angles of layer i: NO_ROPE, its attention type in some families, "default" in others."""
        if self.family.paths.positions or not getattr(self.layers[i].self_attn, "use_rope", True):
            return NO_ROPE
        return self.attention_type(i) if self.family.ropes_by_type else "default"

    def activation(self) -> Gate | None:
        """The activation of the MLPs, identified by its values; None if it is unknown. All MLPs share the config's."""
        modules = (self.mlp_module(layer) for layer in self.layers)
        mlp = next((module for module in modules if not isinstance(module, GatedMLP)), None)
        if mlp is None:
            return "silu"
        if isinstance(mlp, AlternatingMLP):
            return mlp.function
        if hasattr(mlp, "experts"):
            function = activation_of(mlp)
            if function is None:
                return "silu"  # unused: these experts have a gate of their own, and no layer has a dense MLP
        else:
            function = mlp.activation_fn if hasattr(mlp, "activation_fn") else mlp.act_fn
        x = torch.linspace(-8, 8, 65)
        return next((name for name in GATES if torch.allclose(function(x), gate_reference(x, None, name), 1e-4, 1e-6)), None)


def norm_eps(norm: Any) -> float:
    """The epsilon of a norm."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def norm_bias(norm: Any) -> Tensor | None:
    """The bias of a LayerNorm; None for an RMSNorm."""
    return norm.bias.detach() if isinstance(norm, nn.LayerNorm) else None
