"""Products of a decode program. Modules that read the same x become one product if their weights permit it.

Weights of one format are concatenated into one tensor, and the modules' own weights become views of it. So nothing is stored
twice, and the model still works. If gate and up are packed for a GPU, their rows alternate in the joined weight
(pack/gated.py); the model's MLP then computes with that weight too. Modules that cannot be joined run separately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from lowbit.kernels.reference.elementwise import Gate
from lowbit.nn import QuantLinear
from lowbit.nn.fused import AlternatingMLP, quantize_alike
from lowbit.ops import Activations, gemm
from lowbit.ops.gated_gemm import gated_gemm
from lowbit.pack import DenseWeight, FragmentWeight, OperandWeight

BLOCK = 64
"""Number of rows of x in each product with 16-bit weights under `batch_invariant`."""

Product = Callable[[Tensor], Tensor]
"""Computes y [M, N] of x [M, K]; a `Scaled` product also takes quantized x."""


@dataclass(frozen=True, eq=False)
class Packed:
    """y [M, N] = x [M, K] . w^T + bias with a weight in fragment order. `alternates`: rows of gate and up alternate."""

    weight: FragmentWeight
    bias: Tensor | None
    batch_invariant: bool
    alternates: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        return gemm(x, self.weight, self.bias, batch_invariant=self.batch_invariant)

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """Returns activation(gate) * up [M, N / 2]. The rows of the weight must alternate."""
        return gated_gemm(x, self.weight, self.bias, activation, batch_invariant=self.batch_invariant)


@dataclass(frozen=True, eq=False)
class Dense:
    """y [M, N] = x [M, K] . w^T + bias with a 16-bit weight, computed by torch. A chain computes it by the small-M kernel
    (chain.py)."""

    weight: DenseWeight
    bias: Tensor | None
    batch_invariant: bool

    def __call__(self, x: Tensor) -> Tensor:
        product = _in_blocks if self.batch_invariant else linear
        return product(x, self.weight.values, self.bias)


@dataclass(frozen=True, eq=False)
class Scaled:
    """y [M, N] = x [M, K] . w^T + bias of layers that quantize x in the same way. x is quantized once for all layers, by this
    product or by the operator that computes x.

    `weight` is the joined weight of all layers, packed for a GPU's kernels; None if the layers run one by one.
    """

    layers: Sequence[QuantLinear]
    weight: OperandWeight | None
    bias: Tensor | None
    batch_invariant: bool

    @property
    def is_fused(self) -> bool:
        """True if the operator that computes x may quantize it from float32; False if another tool's rounding rule applies."""
        return not self.layers[0].quantizes_rounded_input

    def quantization(self) -> dict[str, Any]:
        """Arguments of `ops.quantize_activations` for x."""
        return self.layers[0].quantization()

    def __call__(self, x: Tensor | Activations) -> Tensor:
        if isinstance(x, Tensor):
            x = self.layers[0].quantize_input(x)
        if self.weight is None:
            outputs = [layer(x) for layer in self.layers]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        return gemm(x, self.weight, self.bias, batch_invariant=self.batch_invariant)


def product(modules: Sequence[nn.Module], batch_invariant: bool) -> Product:
    """Returns one product that computes the concatenated outputs of `modules`. The modules still work separately."""
    layers = [module for module in modules if isinstance(module, QuantLinear)]
    if len(layers) == len(modules):
        if _in_one_form(layers):
            return Packed(_joined(layers), _bias(layers), batch_invariant)
        if quantize_alike(list(layers)):
            return Scaled(layers, _joined(layers), _bias(layers), batch_invariant)
    if not layers and all(type(module) is nn.Linear for module in modules):
        dense, of_all = _joined_linear([module for module in modules if isinstance(module, nn.Linear)])
        return Dense(DenseWeight(dense), of_all, batch_invariant)
    if len(modules) == 1:
        return modules[0]
    return lambda x: torch.cat([module(x) for module in modules], dim=-1)


def gated_product(
    modules: Sequence[nn.Module], block: nn.Module, down: nn.Module, activation: Gate, batch_invariant: bool, name: str = "mlp"
) -> Product:  # fmt: skip
    """Returns the product of gate and up, two modules or one, with alternating rows if possible. The module `name` of `block`,
    which is the MLP, is then replaced by one that uses the same weight."""
    layers = [module for module in modules if isinstance(module, QuantLinear)]
    if layers and len(layers) == len(modules) and _in_one_form(layers) and not AlternatingMLP.refusals(layers):
        setattr(block, name, AlternatingMLP(layers, down, activation))
    mlp = block.get_submodule(name)
    if isinstance(mlp, AlternatingMLP):  # made above, or by an earlier engine
        return Packed(mlp.weight(), mlp.bias, batch_invariant, alternates=True)
    return product(modules, batch_invariant)


def _in_one_form(layers: Sequence[QuantLinear]) -> bool:
    """Returns True if the layers' weights are packed for a GPU in a form that can be concatenated, and the layers do nothing
    but multiply 16-bit x."""
    if any(layer.scheme.activation is not None or layer.input_transform.parts or layer.has_correction for layer in layers):
        return False
    return _weights_to_join(layers) is not None


def _weights_to_join(layers: Sequence[QuantLinear]) -> list[Any] | None:
    """Returns the layers' weights packed for a GPU if they can be concatenated, else None."""
    weights: list[Any] = [weight for layer in layers if (weight := layer.gpu_weight) is not None]
    return weights if len(weights) == len(layers) and not type(weights[0]).concat_refusals(weights) else None


def _joined(layers: Sequence[QuantLinear]) -> Any:
    """Returns the concatenated weight of the layers, and makes their own weights views of it; None if they cannot be
    concatenated.
    """
    weights = _weights_to_join(layers)
    if weights is None:
        return None
    joined = type(weights[0]).concat(weights)
    if len(layers) > 1:
        for layer, part in zip(layers, joined.split([layer.out_features for layer in layers]), strict=True):
            layer.set_gpu_weight(part)
    return joined


def _bias(layers: Sequence[QuantLinear | nn.Linear]) -> Tensor | None:
    """Returns the concatenated biases of the layers, with zeros for a layer without one; None if no layer has one."""
    if all(layer.bias is None for layer in layers):
        return None
    like = next(layer.bias for layer in layers if layer.bias is not None)
    return torch.cat([like.new_zeros(layer.out_features) if layer.bias is None else layer.bias.data for layer in layers])


def _in_blocks(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes `linear` in blocks of 64 rows, since cuBLAS chooses its kernel by the number of rows, and kernels round
    differently."""
    blocks = pad(x, (0, 0, 0, -len(x) % BLOCK)).split(BLOCK)
    return torch.cat([linear(block, weight, bias) for block in blocks])[: len(x)]


def _joined_linear(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Returns the concatenated weight and bias of unquantized layers, and makes their own weights views of it."""
    if len(layers) == 1:
        return layers[0].weight.data, _bias(layers)
    joined = DenseWeight.concat([DenseWeight(layer.weight.data) for layer in layers])
    for layer, part in zip(layers, joined.split([layer.out_features for layer in layers]), strict=True):
        layer.weight.data = part.values
    return joined.values, _bias(layers)
