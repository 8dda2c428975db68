"""Products of a decode program: modules that read the same x become one, where their weights allow it.

Weights of one format lie side by side in one tensor, of which the modules' own become parts: no byte is held twice, and the
model that the program was made from still computes. Rows of gate and up alternate where both are packed for a GPU
(pack/gated.py), and the model's MLP then computes with that weight too. Whatever cannot be joined runs as its module does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lowbit.kernels.reference.decode import Gate
from lowbit.nn import QuantLinear
from lowbit.nn.fused import AlternatingMLP, quantize_alike
from lowbit.ops import fragment_gemm
from lowbit.pack import FragmentWeight
from lowbit.pack.fragment import STRIP

Product = Callable[[Tensor], Tensor]
"""y [M, N] of x [M, K]."""


@dataclass(frozen=True, eq=False)
class Packed:
    """y [M, N] = x [M, K] . w^T + bias with a weight in the form of the tensor cores; `alternates`: rows of gate and up do."""

    weight: FragmentWeight
    bias: Tensor | None
    batch_invariant: bool
    alternates: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        return fragment_gemm(x, self.weight, self.bias, batch_invariant=self.batch_invariant)


def product(modules: Sequence[nn.Module], batch_invariant: bool) -> Product:
    """One function of x whose result has the outputs of all `modules` side by side; they keep computing as before."""
    layers = [module for module in modules if isinstance(module, QuantLinear)]
    if len(layers) == len(modules):
        if _in_one_form(layers):
            return Packed(_joined_fragments(layers), _bias(layers), batch_invariant)
        if len(layers) > 1 and quantize_alike(list(layers)):
            return lambda x: _one_input(x, layers)
    if not layers and all(type(module) is nn.Linear for module in modules):
        dense, bias = _joined_linear([module for module in modules if isinstance(module, nn.Linear)])
        return lambda x: linear(x, dense, bias)
    if len(modules) == 1:
        return modules[0]
    return lambda x: torch.cat([module(x) for module in modules], dim=-1)


def gated_product(
    modules: Sequence[nn.Module], block: nn.Module, down: nn.Module, activation: Gate, batch_invariant: bool
) -> Product:
    """The product of gate and up, whose rows alternate where they can: `block.mlp` then computes with that weight."""
    layers = [module for module in modules if isinstance(module, QuantLinear)]
    if len(layers) == 2 and _in_one_form(layers) and not AlternatingMLP.refusals(*layers):
        mlp = AlternatingMLP(layers[0], layers[1], down, activation)
        block.mlp = mlp
        return Packed(mlp.weight(), mlp.bias, batch_invariant, alternates=True)
    return product(modules, batch_invariant)


def _one_input(x: Tensor, layers: Sequence[QuantLinear]) -> Tensor:
    """Products of 8-bit activations, quantized once for all."""
    quantized = layers[0].quantize_input(x)
    return torch.cat([layer(quantized) for layer in layers], dim=-1)


def _in_one_form(layers: Sequence[QuantLinear]) -> bool:
    """Whether the weights of some layers are all in the same form for a GPU and made of whole strips."""
    first = layers[0]
    return not any(layer.out_features % STRIP for layer in layers[:-1]) and all(
        layer.kernel_codes is not None
        and layer.scheme.activation is None
        and not (layer.has_channels or layer.has_correction)
        and (layer.scheme_name, layer.in_features) == (first.scheme_name, first.in_features)
        and (layer.kernel_channel_scale is None) == (first.kernel_channel_scale is None)
        for layer in layers
    )


def _joined_fragments(layers: Sequence[QuantLinear]) -> FragmentWeight:
    """The weights of some layers in one form as one, of which their own become parts."""
    first = layers[0]
    if len(layers) == 1:
        return first.kernel_weight()
    shape = (sum(layer.out_features for layer in layers), first.in_features)
    codes = _join(layers, "kernel_codes")
    assert codes is not None
    return FragmentWeight(codes, _join(layers, "kernel_scale"), _join(layers, "kernel_channel_scale"), first.scheme, shape)


def _join(layers: Sequence[QuantLinear], name: str) -> Tensor | None:
    """One tensor of a buffer of all layers, whose own become parts of it."""
    buffers = [getattr(layer, name) for layer in layers]
    if buffers[0] is None:
        return None
    joined = torch.cat(buffers)
    for layer, part in zip(layers, joined.split([len(buffer) for buffer in buffers]), strict=True):
        setattr(layer, name, part)
    return joined


def _bias(layers: Sequence[QuantLinear | nn.Linear]) -> Tensor | None:
    """The biases of some layers side by side, zeros where one has none; None where none has."""
    if all(layer.bias is None for layer in layers):
        return None
    like = next(layer.bias for layer in layers if layer.bias is not None)
    return torch.cat([like.new_zeros(layer.out_features) if layer.bias is None else layer.bias.data for layer in layers])


def _joined_linear(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """The weights of layers that are not quantized as one, of which their own become parts."""
    if len(layers) == 1:
        return layers[0].weight.data, _bias(layers)
    joined = torch.cat([layer.weight.data for layer in layers])
    for layer, part in zip(layers, joined.split([layer.out_features for layer in layers]), strict=True):
        layer.weight.data = part
    return joined, _bias(layers)
