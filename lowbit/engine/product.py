"""Products of a decode program: modules that read the same x become one product where their weights permit it.

Weights of one format are concatenated into one tensor, and the modules' own weights become views of it: nothing is stored
twice, and the model still works. Rows of gate and up alternate if both are packed for a GPU (pack/gated.py); the model's MLP
then computes with that weight too. Modules that cannot be joined run as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from lowbit.formats import PerBlock, PerGroup
from lowbit.kernels.reference.elementwise import Gate
from lowbit.nn import QuantLinear
from lowbit.nn.fused import AlternatingMLP, quantize_alike
from lowbit.ops import Activations, gemm
from lowbit.ops.gated_gemm import gated_gemm
from lowbit.pack import DenseWeight, FragmentWeight, OperandWeight
from lowbit.pack.fragment import STRIP

BLOCK = 64
"""Rows of x in each product of 16-bit weights under `batch_invariant`."""

Product = Callable[[Tensor], Tensor]
"""Computes y [M, N] of x [M, K]; a `Scaled` product also takes quantized x."""


@dataclass(frozen=True, eq=False)
class Packed:
    """y [M, N] = x [M, K] . w^T + bias with a weight in the form of the tensor cores; `alternates`: rows of gate and up do."""

    weight: FragmentWeight
    bias: Tensor | None
    batch_invariant: bool
    alternates: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        return gemm(x, self.weight, self.bias, batch_invariant=self.batch_invariant)

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """f(gate) * up [M, N / 2], for alternating rows."""
        return gated_gemm(x, self.weight, self.bias, activation, batch_invariant=self.batch_invariant)


@dataclass(frozen=True, eq=False)
class Dense:
    """y [M, N] = x [M, K] . w^T + bias with a weight of 16 bits: torch's product; in a chain the ring kernel's (chain.py)."""

    weight: DenseWeight
    bias: Tensor | None
    batch_invariant: bool

    def __call__(self, x: Tensor) -> Tensor:
        product = _in_blocks if self.batch_invariant else linear
        return product(x, self.weight.values, self.bias)


@dataclass(frozen=True, eq=False)
class Scaled:
    """y [M, N] = x [M, K] . w^T + bias of layers that quantize x alike: once for all, or by what makes x.

    `weight` is all of them in the form of a GPU's kernels; None where they compute one after the other.
    """

    layers: Sequence[QuantLinear]
    weight: OperandWeight | None
    bias: Tensor | None
    batch_invariant: bool

    @property
    def is_fused(self) -> bool:
        """True if the operator before may quantize x in float32; False if another tool's rounding rule applies."""
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
    """One product with the concatenated outputs of `modules`, which still work on their own."""
    layers = [module for module in modules if isinstance(module, QuantLinear)]
    if len(layers) == len(modules):
        if _in_one_form(layers):
            return Packed(_joined_fragments(layers), _bias(layers), batch_invariant)
        if quantize_alike(list(layers)):
            return Scaled(layers, _joined_operands(layers), _bias(layers), batch_invariant)
    if not layers and all(type(module) is nn.Linear for module in modules):
        dense, of_all = _joined_linear([module for module in modules if isinstance(module, nn.Linear)])
        return Dense(DenseWeight(dense), of_all, batch_invariant)
    if len(modules) == 1:
        return modules[0]
    return lambda x: torch.cat([module(x) for module in modules], dim=-1)


def gated_product(
    modules: Sequence[nn.Module], block: nn.Module, down: nn.Module, activation: Gate, batch_invariant: bool
) -> Product:
    """The product of gate and up, with alternating rows if possible; `block.mlp` then computes with that weight."""
    layers = [module for module in modules if isinstance(module, QuantLinear)]
    if len(layers) == 2 and _in_one_form(layers) and not AlternatingMLP.refusals(*layers):
        block.mlp = AlternatingMLP(layers[0], layers[1], down, activation)
    if isinstance(block.mlp, AlternatingMLP):  # made above, or by an earlier engine
        return Packed(block.mlp.weight(), block.mlp.bias, batch_invariant, alternates=True)
    return product(modules, batch_invariant)


def _in_one_form(layers: Sequence[QuantLinear]) -> bool:
    """True if the weights of all layers have the same GPU layout, in whole m16 row blocks."""
    first = layers[0]
    return not any(layer.out_features % STRIP for layer in layers[:-1]) and all(
        layer.kernel_codes is not None
        and layer.scheme.activation is None
        and not (layer.input_transform.parts or layer.has_correction)
        and (layer.scheme_name, layer.in_features) == (first.scheme_name, first.in_features)
        and _scale_types(layer) == _scale_types(first)
        for layer in layers
    )


def _scale_types(layer: QuantLinear) -> tuple[torch.dtype | None, ...]:
    """Dtypes of group and channel scales; concatenating two dtypes would give float32, which kernels do not support."""
    return tuple(None if t is None else t.dtype for t in (layer.kernel_scale, layer.kernel_channel_scale))


def _joined_fragments(layers: Sequence[QuantLinear]) -> FragmentWeight:
    """The weights of some layers in one form as one, of which their own become parts."""
    first = layers[0]
    if len(layers) == 1:
        return first.kernel_weight()
    shape = (sum(layer.out_features for layer in layers), first.in_features)
    codes = _join(layers, "kernel_codes")
    assert codes is not None
    return FragmentWeight(codes, _join(layers, "kernel_scale"), _join(layers, "kernel_channel_scale"), first.scheme, shape)


def _joined_operands(layers: Sequence[QuantLinear]) -> OperandWeight | None:
    """The weights of some layers with 8-bit activations as one, of which their own become parts; None where they have no such
    form, or are not made of whole strips or blocks."""
    first = layers[0]
    if any(layer.kernel_codes is None or layer.scheme_name != first.scheme_name for layer in layers):
        return None
    if len(layers) == 1:
        return first.scaled_weight()
    granularity = first.scheme.granularity
    whole = granularity.n if isinstance(granularity, PerBlock) else STRIP
    if any(layer.out_features % whole for layer in layers[:-1]):
        return None
    shape = (sum(layer.out_features for layer in layers), first.in_features)
    codes, sums = _join(layers, "kernel_codes"), _join(layers, "kernel_sums")
    assert codes is not None and sums is not None
    # Scales of groups lie [K / 128, N]: the layers keep their own, which are small.
    along = 1 if isinstance(granularity, PerGroup) else 0
    scale = None if first.kernel_scale is None else torch.cat(_buffers(layers, "kernel_scale"), dim=along)
    return OperandWeight(codes, scale, _join(layers, "kernel_channel_scale"), sums, first.scheme, shape)


def _buffers(layers: Sequence[QuantLinear], name: str) -> list[Tensor]:
    return [buffer for buffer in (getattr(layer, name) for layer in layers) if buffer is not None]


def _join(layers: Sequence[QuantLinear], name: str) -> Tensor | None:
    """One tensor of a buffer of all layers, whose own become parts of it."""
    buffers = _buffers(layers, name)
    if not buffers:
        return None
    joined = torch.cat(buffers)
    for layer, part in zip(layers, joined.split([len(buffer) for buffer in buffers]), strict=True):
        setattr(layer, name, part)
    return joined


def _bias(layers: Sequence[QuantLinear | nn.Linear]) -> Tensor | None:
    """The concatenated biases of some layers, zeros for a layer without one; None if no layer has one."""
    if all(layer.bias is None for layer in layers):
        return None
    like = next(layer.bias for layer in layers if layer.bias is not None)
    return torch.cat([like.new_zeros(layer.out_features) if layer.bias is None else layer.bias.data for layer in layers])


def _in_blocks(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` in blocks of 64 rows: cuBLAS chooses its kernel, and thereby its rounding, by the number of rows."""
    blocks = pad(x, (0, 0, 0, -len(x) % BLOCK)).split(BLOCK)
    return torch.cat([linear(block, weight, bias) for block in blocks])[: len(x)]


def _joined_linear(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """The weights of layers that are not quantized as one, of which their own become parts."""
    if len(layers) == 1:
        return layers[0].weight.data, _bias(layers)
    joined = torch.cat([layer.weight.data for layer in layers])
    for layer, part in zip(layers, joined.split([layer.out_features for layer in layers]), strict=True):
        layer.weight.data = part
    return joined, _bias(layers)
