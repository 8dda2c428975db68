"""Decoder layers in which an input is quantized once, in one pass with the norm or the gate that makes it.

A QuantLinear with 8-bit activations quantizes its input by itself: three times for q, k and v, and after a norm has written it
in 16 bits. Here a norm makes the codes for all layers that read it, and the gate of an MLP makes those of `down_proj`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowbit.kernels.reference.activations import rms_norm_reference
from lowbit.nn import QuantLinear
from lowbit.nn.fused import GatedMLP, QuantizingNorm, quantize_alike

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
"""Families of Transformers whose decoder layers do this with their inputs: norm, then q, k and v of self_attn; norm, then
down(act(gate) * up) of mlp. Classes that derive from theirs may do something else and are left alone."""

_NORM_ERROR = 2.0**-7
"""Largest relative difference between a norm and RMSNorm in float32; norms round to 16 bits, bf16 has 8."""


def prepare_on_gpu(model: nn.Module) -> None:
    """Brings the quantized linear layers of a model on a GPU into the order of its kernels and fuses what precedes them.

    A model that is not there yet, and quantizes activations, does so when it is first called there (not if that call is one
    that torch.compile traces: call the model once before).
    """
    layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
    there = [layer for layer in layers if layer.weight_packed.is_cuda]
    for layer in there:
        layer.prepare(getattr(model, "dtype", torch.bfloat16))
    if any(layer.is_prepared for layer in there):
        fuse_quantization(model)
    elif not there and any(layer.activation_format is not None for layer in layers):
        model.register_forward_pre_hook(_before_a_call)


def _before_a_call(model: nn.Module, args: object) -> None:
    """Waits for the model to be on a GPU. A function of this module, not a closure: models are copied and pickled."""
    if torch.compiler.is_compiling() or not next(model.parameters()).is_cuda:
        return
    _cancel(model)
    prepare_on_gpu(model)


def _cancel(model: nn.Module) -> None:
    hooks = model._forward_pre_hooks
    for number in [number for number, hook in hooks.items() if hook is _before_a_call]:
        del hooks[number]


@torch.no_grad()
def fuse_quantization(model: nn.Module) -> list[str]:
    """Puts modules that quantize an input once for all its readers into `model`; returns the names of those replaced.

    Weights stay where they are and keep their names, in memory and in files. Decoder layers of other families, norms that are
    no RMSNorm, gates other than SiLU, layers with 16-bit inputs, with an order or an input scale, and modules with hooks are
    left alone. What the fused modules compute differs from the separate ones by roundings that they leave out (`nn.fused`), or
    not at all where a scheme quantizes by another tool's rule: there the same modules as before compute an input, which is
    quantized once for all its readers.
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
    """Puts the modules that `fuse_quantization` replaced back in their places, and cancels a fusion at the first call."""
    _cancel(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, (GatedMLP, QuantizingNorm)):
            model.set_submodule(name, module.restored())


def _is_a(module: nn.Module, kind: str) -> bool:
    return type(module).__name__ in {f"{family}{kind}" for family in FAMILIES}


def _fuse_norm(layer: nn.Module, name: str, part: str, reader: nn.Module) -> list[str]:
    """Replaces a norm of a decoder layer if it is an RMSNorm; the name of what was replaced."""
    norm = layer.get_submodule(part)
    eps = getattr(norm, "variance_epsilon", None)
    if not _plain(norm) or not isinstance(eps, float) or not _is_rms_norm(norm, eps):
        return []
    setattr(layer, part, QuantizingNorm(norm, eps, reader).train(norm.training))  # type: ignore[arg-type]
    return [f"{name}.{part}"]


def _plain(*modules: nn.Module) -> bool:
    """Whether nobody else sees what goes into and out of the modules, and they are where they compute."""
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_hf_hook")
    watched = any(getattr(module, hook, None) for module in modules for hook in hooks)
    return not watched and not any(p.is_meta for module in modules for p in module.parameters(recurse=False))


def _is_rms_norm(norm: nn.Module, eps: float) -> bool:
    weight = norm.weight
    assert isinstance(weight, Tensor)
    x = torch.linspace(-3, 2, 4 * len(weight), device=weight.device).reshape(4, -1).to(weight.dtype)
    expected = rms_norm_reference(x, weight, eps)
    tolerance = _NORM_ERROR * (expected.abs() + expected.abs().amax() / 100)  # fp16 rounds what is near 0 by more
    return bool(((norm(x).float() - expected).abs() <= tolerance).all())


def _is_gated(mlp: nn.Module) -> bool:
    """Whether a module is an MLP of the families with SiLU as its gate."""
    x = torch.linspace(-8, 8, 65)
    return _is_a(mlp, "MLP") and torch.allclose(mlp.act_fn(x), nn.functional.silu(x), rtol=1e-4, atol=1e-6)  # type: ignore[operator]
