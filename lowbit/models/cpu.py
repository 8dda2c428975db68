"""How a model runs on a CPU: the dtype of its activations, and which layers hold dequantized weights."""

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
    """Returns the default dtype of activations on a CPU: bfloat16 for quantized models on CPUs with torch's int4 and int8
    products, which take no other dtype, else float32."""
    fast = torch.backends.cpu.get_cpu_capability() in VECTOR_CPUS
    return torch.bfloat16 if quantized and fast else torch.float32


def quantizing_dtype(config: PretrainedConfig, compute_dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which to read weights that are quantized while loading, for a model that will compute in
    `compute_dtype`.

    It is the files' dtype, since a cast from fp16 to bf16 would round the weights before they are quantized.
    """
    own = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return compute_dtype if own == compute_dtype or compute_dtype == torch.float32 else own


def measuring_dtype(device: str | torch.device | None = None) -> torch.dtype | None:
    """Returns the dtype for comparing models: float32 on a CPU, else None, for each model's own."""
    return torch.float32 if torch_device(device).type == "cpu" else None


def plan_on_cpu(model: PreTrainedModel, again: bool = False, decode_program: bool = False) -> None:
    """Chooses how the layers of a loaded quantized model run on a CPU and logs it, slow ones as a warning.

    again: the model was planned before in another dtype; logs nothing. decode_program: the engine computes with the model, so
    that 16-bit layers stay `nn.Linear`.
    """
    for name, layer in [] if decode_program else list(model.named_modules()):
        if type(layer) is nn.Linear and layer.weight.device.type == "cpu" and layer.weight.dtype != torch.float32:
            new = RowLinear.of(layer)
            new._is_hf_initialized = True  # type: ignore[assignment]
            model.set_submodule(name, new)
    own = getattr(model.config, "dtype", None)
    for line in allow_decoding(model, own if isinstance(own, torch.dtype) else model.dtype):
        if not again:
            (logger.warning if line.endswith(SLOW) else logger.info)(line)
