"""Implements vLLM's interface of a layer's experts: create parameters, load, process after loading, apply."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from lowbit.ops.register import register
from lowbit.vllm.experts import (
    ACTIVATIONS,
    ExpertSource,
    ExpertSpec,
    LocalExperts,
    loaded_experts,
    register_expert_parameters,
)
from lowbit.vllm.loading import torch_defaults
from lowbit.vllm.methods import is_dummy, refuse_offload, token_counts_of
from lowbit.vllm.warm_up import compile_expert_kernels

_CPU_ROUTER = "vllm.model_executor.layers.fused_moe.router.cpu_router"


class LowbitExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """The experts that `source` describes."""

    def __init__(self, layer: Any, source: ExpertSource) -> None:
        super().__init__(layer.moe_config)
        self.source = source
        reasons = _refusals(layer)
        if reasons:
            raise ValueError(f"{source.name}: {'; '.join(reasons)}; leave the experts in 16 bits (*.experts)")

    def create_weights(
        self, layer: Any, num_experts: int, hidden_size: int, intermediate_size_per_partition: int, params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:  # fmt: skip
        """Registers the parameters to load, without allocating weights."""
        refuse_offload(self.source.name)
        moe = layer.moe_config
        numbers = layer.expert_map
        local = range(moe.num_experts) if numbers is None else (numbers >= 0).nonzero()[:, 0].tolist()
        if numbers is not None:
            local = sorted(local, key=numbers.tolist().__getitem__)
        spec = ExpertSpec(moe.num_experts, hidden_size, moe.intermediate_size, tuple(local), moe.tp_rank, moe.tp_size)
        loading = self.source.loader(spec, params_dtype, torch.empty(0).device)
        register_expert_parameters(layer, loading, is_dummy())
        self.dtype, self.hidden, self.counts = params_dtype, hidden_size, token_counts_of()

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Returns None: vLLM's own kernels are not used."""

    def maybe_make_prepare_finalize(self, routing_tables: Any = None) -> None:
        """Returns None, as vLLM 0.25 requires: tokens are sent to other ranks and back outside of `apply`."""

    @torch_defaults()
    def process_weights_after_loading(self, layer: Any) -> None:
        """Packs the weights for the device's kernels, and compiles these kernels."""
        experts = LocalExperts(loaded_experts(layer), _activation(layer), layer.expert_map)
        experts.prepare(self.source.name, self.dtype, batch_invariant=bool(envs.VLLM_BATCH_INVARIANT))
        compile_expert_kernels(experts, self.hidden, layer.moe_config.experts_per_token, self.dtype, self.counts)
        layer.add_module("product", experts)

    def apply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *shared: Any, **more: Any) -> Tensor:
        """Returns y [T, H] of x [T, H], computed by this rank's experts and channels only. vLLM adds shared experts itself."""
        if x.device.type == "cpu":  # on a GPU vLLM calls experts through an operator of its own, on a CPU it does not
            y: Tensor = torch.ops.lowbit.vllm_experts(x, topk_ids, topk_weights, layer.layer_name)
        else:
            y = layer.product(x, topk_ids, topk_weights)
        return y


def _experts_on_cpu(x: Tensor, experts: Tensor, weights: Tensor, layer: str) -> Tensor:
    from vllm.forward_context import get_forward_context

    y: Tensor = get_forward_context().no_compile_layers[layer].routed_experts.product(x, experts, weights)
    return y


register(
    "vllm_experts(Tensor x, Tensor experts, Tensor weights, str layer) -> Tensor",
    cpu=_experts_on_cpu,
    fake=lambda x, experts, weights, layer: torch.empty_like(x),
)


def _activation(layer: Any) -> str:
    """Returns vLLM's name of the activation function, which is applied to gate and up."""
    return str(getattr(layer.activation, "value", layer.activation))


def _refusals(layer: Any) -> tuple[str, ...]:
    """Returns the reasons why lowbit cannot compute the experts of a layer of vLLM; empty if it can."""
    moe, config, reasons = layer.moe_config, get_current_vllm_config(), []
    if _activation(layer) not in ACTIVATIONS:
        reasons.append(f"experts with {_activation(layer)} are not supported, {' and '.join(ACTIVATIONS)} are")
    if any(getattr(layer, name, None) is not None for name in ("swiglu_limit", "swiglu_alpha", "swiglu_beta")):
        reasons.append("experts whose gate is clamped are not supported")
    if moe.has_bias:
        reasons.append("experts with biases are not supported")
    if getattr(layer, "apply_router_weight_on_input", False):
        reasons.append("experts whose input is multiplied by the router's weight are not supported")
    if config.lora_config is not None:
        reasons.append("vLLM's LoRA (--enable-lora) needs vLLM's own kernels of experts")
    if config.parallel_config.enable_eplb:
        reasons.append("experts cannot be moved between ranks while serving (--enable-eplb)")
    if config.device_config.device_type == "cpu" and importlib.util.find_spec(_CPU_ROUTER) is None:
        reasons.append("on a CPU this vLLM has no router for experts that are not its own, vLLM 0.32 has one")
    return tuple(reasons)
