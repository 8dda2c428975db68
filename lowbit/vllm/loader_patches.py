"""Patches vLLM's loader, so that it checks for missing weights, renames the tensors of stacked experts, and compiles the
kernels of all layers together."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.checkpoint import CheckpointError
from lowbit.checkpoint.schema import METHOD
from lowbit.vllm.experts import StreamNames
from lowbit.vllm.warm_up import hash_early, together

UNTRACKED = """--model-loader-extra-config '{"enable_weights_track": false}'"""
"""vLLM's option that turns off tracking of weights by name."""

_16_BITS = (torch.float16, torch.bfloat16, torch.float32)


@functools.cache
def patch_loader() -> None:
    """Patches vLLM's loader in this process; further calls do nothing. Models that use lowbit are then checked for missing
    weights, the tensors of their stacked experts get the names that vLLM's models load, and the kernels of all their layers are
    compiled together."""
    _check_missing_weights()
    _rename_stacked_experts()
    _compile_layers_together()


def _check_missing_weights() -> None:
    """Patches `DefaultModelLoader.load_weights` to raise CheckpointError for parameters that no file filled.

    vLLM itself checks this for 16-bit models only; in other models a missing parameter would keep uninitialized memory. Packed
    weights are checked in `loading.LayerLoader`. For norms and similar parameters vLLM's own tracking by name is enabled. vLLM
    allocates 16-bit weights, biases and experts uninitialized, so they are filled with NaN before loading and checked after it.
    Draft models are not checked: they share the embedding of their target model, and that model verifies every token.
    """
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    load = DefaultModelLoader.load_weights

    @functools.wraps(load)
    def load_weights(self: Any, model: nn.Module, model_config: Any) -> None:
        if model_config.quantization != METHOD or model_config.runner_type == "draft":
            load(self, model, model_config)
            return
        self.enable_weights_track = self.enable_weights_track is not False  # None unless --model-loader-extra-config sets it
        for _, values, _ in _uninitialized(model):
            values.fill_(torch.nan)
        try:
            load(self, model, model_config)
        except ValueError as error:
            if self.enable_weights_track and "weights were not initialized" in str(error):
                raise CheckpointError(
                    f"{error}; copy the folder again, or quantize the model again; {UNTRACKED} loads it all the same"
                ) from error
            raise
        if missing := list(_missing(model)):
            raise CheckpointError(
                f"the checkpoint's files lack numbers of {', '.join(missing)}, or hold NaN there; copy the folder again, or "
                "quantize the model again"
            )

    DefaultModelLoader.load_weights = load_weights


def _rename_stacked_experts() -> None:
    """Patches `DefaultModelLoader.get_all_weights` to rename the tensors of lowbit's experts (`experts.StreamNames`)."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    from lowbit.vllm.expert_method import LowbitExpertsMethod

    read = DefaultModelLoader.get_all_weights

    @functools.wraps(read)
    def get_all_weights(self: Any, model_config: Any, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        names = StreamNames(
            (layer.quant_method.source, (layer.ckpt_gate_proj_name, layer.ckpt_down_proj_name))  # type: ignore[union-attr, misc]
            for layer in model.modules()
            if isinstance(getattr(layer, "quant_method", None), LowbitExpertsMethod)
        )
        tensors = read(self, model_config, model)
        yield from (names.renamed(*each) for each in tensors) if names else tensors

    DefaultModelLoader.get_all_weights = get_all_weights


def _compile_layers_together() -> None:
    """Patches `process_weights_after_loading` of vLLM's base loader to compile the kernels of all layers at once.

    If a loader or a version of vLLM does not call this function, the kernels of each layer are compiled separately.
    """
    from vllm.model_executor.model_loader import base_loader

    if torch.cuda.is_available():
        hash_early()
    process = getattr(base_loader, "process_weights_after_loading", None)
    if process is None:
        return

    @functools.wraps(process)
    def process_weights_after_loading(*arguments: Any, **options: Any) -> None:
        with together():
            process(*arguments, **options)

    base_loader.process_weights_after_loading = process_weights_after_loading


def is_experts(module: nn.Module) -> bool:
    """Returns True if a module of any supported version of vLLM holds the weights of experts."""
    return any(cls.__name__ in ("RoutedExperts", "FusedMoE") for cls in type(module).__mro__)


def _uninitialized(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Yields (parameter name, values, True for experts) for parameters that vLLM allocates without initializing them.

    For linear layers and embeddings, values are the whole parameter. For experts, values are the first element of each tensor
    that is loaded into the parameter, since the rest may be padding: [E, 2] for gate and up, [E, 1] for down.
    """
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(name, recurse=False):
            kind = own.rpartition(".")[2]
            if parameter.dtype not in _16_BITS or not parameter.numel() or parameter.is_meta:
                continue
            if isinstance(module, (LinearBase, VocabParallelEmbedding)):
                yield own, parameter.data, False
            elif is_experts(module) and kind.startswith(("w13_", "w2_")):
                rows = parameter.shape[1]
                first = parameter.data[:, :: -(-rows // 2) if kind.startswith("w13_") else rows]  # of gate and up, or of down
                yield own, first if first.dim() == 2 else first[..., 0], True


def _missing(model: nn.Module) -> Iterator[str]:
    """Yields the names of parameters that no file filled; for experts with their index on this rank."""
    for name, values, is_expert in _uninitialized(model):
        if is_expert:
            yield from (f"{name}[{expert}]" for expert in values.isnan().any(1).nonzero()[:, 0].tolist())
        elif values.amax().isnan():
            yield name
