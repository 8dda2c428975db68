"""Random weights for a model of vLLM, in place: normal ones, rounded where they are quantized."""

from __future__ import annotations

import torch

from lowbit.checkpoint.gptq import Gptq
from lowbit.quantize import rtn
from lowbit.vllm.loading import torch_defaults


def random_weights(module: torch.nn.Module) -> None:
    """Fills the parameters and persistent buffers of a module, but not those of its submodules.

    vLLM's dummy weights will not do: codes are uninitialised, fp8 is zeros, and the others are uniform. Large products run at
    the power limit, where uniform data draws less power and so raises the clock. Layers of `lowbit.vllm` create their own
    random weights; vLLM's int4 gets weights that are rounded in the same way.
    """
    buffers = {name: t for name, t in module.named_buffers(recurse=False) if name not in module._non_persistent_buffers_set}
    tensors = dict(module.named_parameters(recurse=False)) | buffers
    for name, tensor in tensors.items():
        if name.endswith("qweight"):
            _random_int4(tensor, tensors[name.removesuffix("qweight") + "scales"])
        elif not name.endswith("scales"):
            random_tensor(tensor, name)


def random_tensor(tensor: torch.Tensor, name: str = "weight") -> None:
    """Fills a tensor of floating-point numbers. Recognises scales, biases and norms by `name` and shape. Does nothing with
    other dtypes and on the meta device."""
    if tensor.device.type == "meta" or not tensor.numel() or not tensor.is_floating_point():
        return
    data = tensor.data
    if "scale" in name:
        if data.dim():  # single numbers, the scales of keys and values, keep their values
            data.uniform_(1e-3, 3e-3)
    elif data.dim() < 2:
        data.fill_(0.0 if name.endswith("bias") else 1.0)
    else:
        wide = data.element_size() > 1
        made = torch.randn(data.shape, dtype=data.dtype if wide else torch.float16, device=data.device)
        data.copy_(made.mul_(data.shape[-1] ** -0.5 if wide else 8.0))


def _random_int4(words: torch.Tensor, scales: torch.Tensor) -> None:
    """Fills words [K/8, N] and scales [K/128, N] of GPTQ files with rounded normal weights."""
    k, n = 8 * words.shape[0], words.shape[1]
    with torch_defaults():
        weight = torch.randn((n, k), dtype=scales.dtype, device=words.device) / k**0.5
        made = Gptq(bits=4, group=k // scales.shape[0], symmetric=True).write(rtn(weight, f"w4a16_g{k // scales.shape[0]}"))
    words.data.copy_(made["qweight"])
    scales.data.copy_(made["scales"])


def kernels_of(model: torch.nn.Module) -> list[str]:
    """Returns the names of vLLM's classes that multiply in the layers of a model, and of the kernels that they chose."""
    found = set()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            chosen = getattr(method, "kernel", None) or getattr(method, "fp8_linear", None)
            found.add(type(method).__name__ + (f": {type(chosen).__name__}" if chosen is not None else ""))
    return sorted(found)
