"""Every parameter of a model came from its files: vLLM asks this of models in 16 bits only, and what the files lack of another
would be whatever was in memory. Experts, which stay in 16 bits, are not asked one by one: vLLM holds all in one parameter."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lowbit.checkpoint import CheckpointError
from lowbit.checkpoint.schema import METHOD


@functools.cache
def watch_loader() -> None:
    """Has vLLM's loader of files ask it of the models that are loaded by this library's method, in this process.

    Packed weights are counted where they are collected (`loading.Loading`). Left are norms and the like, of which vLLM tells
    from names that one never came, and what it makes without numbers: weights in 16 bits, and biases. A draft model is not
    asked: it gets its embedding from the model that it drafts for, which also judges every token of it.
    """
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    load = DefaultModelLoader.load_weights

    @functools.wraps(load)
    def load_weights(self: Any, model: nn.Module, model_config: Any) -> None:
        is_asked = model_config.quantization == METHOD and model_config.runner_type != "draft"
        if is_asked:
            self.enable_weights_track = self.enable_weights_track is not False  # None unless --model-loader-extra-config says
            for _, parameter in _without_numbers(model):
                parameter.data.fill_(torch.nan)
        load(self, model, model_config)
        missing = [name for name, parameter in _without_numbers(model) if parameter.amax().isnan()] if is_asked else []
        if missing:
            raise CheckpointError(
                f"the checkpoint's files lack numbers of {', '.join(missing)}, or hold NaN there; copy the folder again, or "
                "quantize the model again"
            )

    DefaultModelLoader.load_weights = load_weights


def _without_numbers(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters of linear layers and embeddings, which vLLM allocates and leaves to the files."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for name, module in model.named_modules():
        if isinstance(module, (LinearBase, VocabParallelEmbedding)):
            for own, parameter in module.named_parameters(prefix=name, recurse=False):
                is_16_bits = parameter.dtype in (torch.float16, torch.bfloat16, torch.float32)
                if is_16_bits and parameter.numel() and not parameter.is_meta:
                    yield own, parameter
