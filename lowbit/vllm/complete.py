"""Every parameter of a model came from its files: vLLM asks this of models in 16 bits only, and what the files lack of another
would be whatever was in memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.checkpoint import CheckpointError
from lowbit.checkpoint.schema import METHOD

UNTRACKED = """--model-loader-extra-config '{"enable_weights_track": false}'"""
"""vLLM's option not to ask for weights by name."""

_16_BITS = (torch.float16, torch.bfloat16, torch.float32)


@functools.cache
def watch_loader() -> None:
    """Has vLLM's loader of files ask it of the models that are loaded by this library's method, in this process.

    Packed weights are counted where they are collected (`loading.Loading`). Left are norms and the like, of which vLLM tells
    from names that one never came, and what it makes without numbers: weights in 16 bits, biases and experts. A draft model is
    not asked: it gets its embedding from the model that it drafts for, which also judges every token of it.
    """
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    load = DefaultModelLoader.load_weights

    @functools.wraps(load)
    def load_weights(self: Any, model: nn.Module, model_config: Any) -> None:
        if model_config.quantization != METHOD or model_config.runner_type == "draft":
            load(self, model, model_config)
            return
        self.enable_weights_track = self.enable_weights_track is not False  # None unless --model-loader-extra-config says
        for _, numbers, _ in _without_numbers(model):
            numbers.fill_(torch.nan)
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


def is_experts(module: nn.Module) -> bool:
    """Whether a module of vLLM holds the weights of experts, whatever its version calls it."""
    return any(cls.__name__ in ("RoutedExperts", "FusedMoE") for cls in type(module).__mro__)


def _without_numbers(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Numbers that vLLM allocates and leaves to the files, with the name of their parameter, and whether it is of experts: of
    linear layers and embeddings all numbers, of experts the first of each tensor of the files [E, 2 or 1], since beside the
    tensors there may be padding."""
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
    """Names of parameters that no file filled; of experts, with their numbers on this rank."""
    for name, numbers, is_of_experts in _without_numbers(model):
        if is_of_experts:
            yield from (f"{name}[{expert}]" for expert in numbers.isnan().any(1).nonzero()[:, 0].tolist())
        elif numbers.amax().isnan():
            yield name
