"""How a model runs on a CPU: the type of its activations, and which layers hold decoded weights."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from lowbit.hardware.machine import torch_device
from lowbit.nn.decoding import SLOW, allow_decoding
from lowbit.nn.row_linear import RowLinear
from lowbit.pack.cpu import VECTOR_CPUS

logger = logging.get_logger(__name__)


def cpu_dtype(quantized: bool) -> torch.dtype:
    """The type of activations on a CPU when nobody says which: bfloat16 for quantized models, since torch's products of int4
    and int8 weights take no other, and float32 for others and where torch has no such products."""
    fast = torch.backends.cpu.get_cpu_capability() in VECTOR_CPUS
    return torch.bfloat16 if quantized and fast else torch.float32


def quantizing_dtype(config: PretrainedConfig, wanted: torch.dtype) -> torch.dtype:
    """The type in which to read the weights of a checkpoint that are quantized while loading, of a model that shall then run in
    `wanted`: their own, since bf16 would round those in fp16 before they are quantized, and scales would be of others."""
    own = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return wanted if own == wanted or wanted == torch.float32 else own


def measuring_dtype(device: str | torch.device | None = None) -> torch.dtype | None:
    """The type in which models are compared with each other: on a CPU float32 for all, else (None) each model's own."""
    return torch.float32 if torch_device(device).type == "cpu" else None


def plan_on_cpu(model: PreTrainedModel, again: bool = False) -> None:
    """Decides how the layers of a loaded quantized model run if it stays on a CPU, and logs that, slow ones as a
    warning; nothing if it did so before, in another type."""
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and layer.weight.device.type == "cpu" and layer.weight.dtype != torch.float32:
            new = RowLinear.of(layer)
            new._is_hf_initialized = True  # type: ignore[assignment]
            model.set_submodule(name, new)
    own = getattr(model.config, "dtype", None)
    for line in allow_decoding(model, own if isinstance(own, torch.dtype) else model.dtype):
        if not again:
            (logger.warning if line.endswith(SLOW) else logger.info)(line)
