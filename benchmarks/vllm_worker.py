"""The part of `python -m benchmarks vllm` that runs in vLLM's workers, the processes with one GPU each. It fills in random
weights, and reports the kernels that vLLM chose.

vLLM imports this module in every worker before it creates the model, as the option `worker_extension_cls` asks.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.model_loader import dummy_loader
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from benchmarks.vllm_weights import kernels_of, random_tensor, random_weights


def _load_weights(self: Any, model: torch.nn.Module, model_config: object) -> None:
    """`DummyModelLoader.load_weights` with our weights."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():  # vLLM quantizes the layer while it is loaded
            self._process_online_quant_layer(layer, info)
        else:
            random_weights(layer)


dummy_loader.DummyModelLoader.load_weights = _load_weights
dummy_loader.initialize_single_dummy_weight = random_tensor


class RandomModel:
    """Methods that vLLM adds to its worker."""

    def kernels_of_layers(self) -> list[str]:
        """Returns the names of vLLM's classes that multiply, and of the kernels that they chose."""
        return kernels_of(self.get_model())  # type: ignore[attr-defined]
