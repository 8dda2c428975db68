"""Fuses the quantization of activations with the norm or gate that computes them.

A QuantLinear with 8-bit activations quantizes its own input. The input of q, k and v is therefore quantized three times, after
a norm has stored it in 16 bits. A fused norm returns codes for all layers that read it. The fused gate of an MLP returns the
codes for `down_proj`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowbit.kernels.reference.activations import rms_norm_reference
from lowbit.nn import PackedExperts, QuantLinear
from lowbit.nn.fused import GatedMLP, QuantizingNorm, quantize_alike

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
"""Transformers' model families whose decoder layers compute norm, then q, k and v of self_attn; norm, then down(act(gate) * up)
of mlp. Derived classes may differ and are not fused."""

_NORM_ERROR = 2.0**-7
"""Largest relative difference between a norm and RMSNorm in float32. Norms may round to bf16, whose precision is 8 bits."""


def prepare_on_gpu(model: nn.Module) -> None:
    """Packs the quantized linear layers and experts of a model on a GPU for its kernels, and fuses the quantization of
    activations.

    A model with quantized activations that is not on a GPU yet is prepared at its first call there, unless torch.compile traces
    that call: call the model once before.
    """
    for module in model.modules():
        if isinstance(module, PackedExperts) and module.weight_scale.is_cuda:
            module.forms_for(getattr(model, "dtype", torch.bfloat16))
    layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
    on_gpu = [layer for layer in layers if layer.weight_packed.is_cuda]
    for layer in on_gpu:
        layer.prepare(getattr(model, "dtype", torch.bfloat16))
    if any(layer.is_prepared for layer in on_gpu):
        fuse_quantization(model)
    elif not on_gpu and any(layer.activation_format is not None for layer in layers):
        model.register_forward_pre_hook(_prepare_before_call)


def _prepare_before_call(model: nn.Module, args: object) -> None:
    """Prepares a model that has moved to a GPU. A module-level function, since models are copied and pickled."""
    if torch.compiler.is_compiling() or not next(model.parameters()).is_cuda:
        return
    _cancel(model)
    prepare_on_gpu(model)


def _cancel(model: nn.Module) -> None:
    hooks = model._forward_pre_hooks
    for number in [number for number, hook in hooks.items() if hook is _prepare_before_call]:
        del hooks[number]


@torch.no_grad()
def fuse_quantization(model: nn.Module) -> list[str]:
    """Replaces norms and MLPs of `model` by modules that quantize an input once for all its readers; returns the replaced
    names.

    Weights keep their storage and names. Decoder layers of other families, norms that are no RMSNorm, gates other than SiLU,
    layers with 16-bit inputs, with an order or a pre_quant_scale, and modules with hooks are not replaced. The fused modules
    omit some roundings of the separate ones (`nn.fused`). Under another tool's activation rule the results are equal: the
    original modules compute the input, which is quantized once.
    """
    replaced = []
    for name, layer in list(model.named_modules()):
        if not _is_a(layer, "DecoderLayer"):
            continue
        attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
        readers = [attention.get_submodule(part) for part in ("q_proj", "k_proj", "v_proj")]
        inside = [mlp.get_submodule(part) for part in ("gate_proj", "up_proj", "down_proj")]
        if _is_a(attention, "Attention") and _plain(attention, *readers) and quantize_alike(readers):
            replaced += _fuse_norm(layer, name, "input_layernorm", readers[0])
        if _is_gated(mlp) and _plain(mlp, *inside) and quantize_alike(inside[:2]) and quantize_alike(inside[2:]):
            layer.mlp = GatedMLP(*inside, mlp).train(mlp.training)  # type: ignore[arg-type,call-arg]
            replaced += [f"{name}.mlp", *_fuse_norm(layer, name, "post_attention_layernorm", inside[0])]
    return replaced


def undo_fusion(model: nn.Module) -> None:
    """Restores the modules that `fuse_quantization` replaced, and cancels a pending fusion at the first call."""
    _cancel(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, (GatedMLP, QuantizingNorm)):
            model.set_submodule(name, module.restored())


def _is_a(module: nn.Module, kind: str) -> bool:
    return type(module).__name__ in {f"{family}{kind}" for family in FAMILIES}


def _fuse_norm(layer: nn.Module, name: str, part: str, reader: nn.Module) -> list[str]:
    """Replaces a norm of a decoder layer if it is an RMSNorm; returns its name in a list, or []."""
    norm = layer.get_submodule(part)
    eps = getattr(norm, "variance_epsilon", None)
    if not _plain(norm) or not isinstance(eps, float) or not _is_rms_norm(norm, eps):
        return []
    setattr(layer, part, QuantizingNorm(norm, eps, reader).train(norm.training))  # type: ignore[arg-type]
    return [f"{name}.{part}"]


def _plain(*modules: nn.Module) -> bool:
    """Returns True if the modules have no hooks and their parameters are on the device where they compute."""
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_hf_hook")
    hooked = any(getattr(module, hook, None) for module in modules for hook in hooks)
    return not hooked and not any(p.is_meta for module in modules for p in module.parameters(recurse=False))


def _is_rms_norm(norm: nn.Module, eps: float) -> bool:
    weight = norm.weight
    assert isinstance(weight, Tensor)
    x = torch.linspace(-3, 2, 4 * len(weight), device=weight.device).reshape(4, -1).to(weight.dtype)
    expected = rms_norm_reference(x, weight, eps)
    tolerance = _NORM_ERROR * (expected.abs() + expected.abs().amax() / 100)  # fp16 rounds what is near 0 by more
    return bool(((norm(x).float() - expected).abs() <= tolerance).all())


def _is_gated(mlp: nn.Module) -> bool:
    """Returns True for an MLP of the families with SiLU as its gate."""
    x = torch.linspace(-8, 8, 65)
    return _is_a(mlp, "MLP") and torch.allclose(mlp.act_fn(x), nn.functional.silu(x), rtol=1e-4, atol=1e-6)  # type: ignore[operator]
