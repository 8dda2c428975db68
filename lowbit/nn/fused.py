"""Modules that quantize an input once for all layers that read it, together with what makes it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowbit.formats import ActivationRule
from lowbit.nn.linear import QuantizedInput, QuantLinear
from lowbit.ops import rms_norm_quantize, silu_mul_quantize


class QuantizingNorm(nn.Module):
    """RMSNorm whose result is a `QuantizedInput` for layers that quantize like `reader`, one of them: one pass over memory.

    `norm` is the module that it replaces, with `weight` [K]. Computed in float32 and not rounded to x's type before it is
    quantized, where a norm by itself rounds once or twice: codes next to a tie may differ by one. Where layers quantize by
    another tool's rule, which takes x as it was rounded, `norm` computes it, and it is quantized once for all.
    """

    def __init__(self, norm: nn.Module, eps: float, reader: QuantLinear) -> None:
        super().__init__()
        assert isinstance(norm.weight, nn.Parameter)
        self.weight, self.eps = norm.weight, eps
        self._reader, self._norm = (reader,), (norm,)  # tuples, so that their parameters are not this module's too

    def forward(self, x: Tensor) -> QuantizedInput:
        reader = self._reader[0]
        if reader.scheme.rule is not ActivationRule.OWN:
            return reader.quantize_input(self._norm[0](x))
        made = rms_norm_quantize(x, self.weight, self.eps, **reader.quantization())
        return QuantizedInput(made.codes, made.scale, made.zero, x.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}, to {self._reader[0].activation_format}"


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), x quantized once for gate and up, and silu, product and quantization for `down_proj` in one
    pass: in float32, as in `QuantizingNorm`; rounded to x's type in between where layers quantize by another tool's rule. x is
    a tensor [.., K] or a `QuantizedInput`."""

    def __init__(self, gate_proj: QuantLinear, up_proj: QuantLinear, down_proj: QuantLinear) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj

    def forward(self, x: Tensor | QuantizedInput) -> Tensor:
        if isinstance(x, Tensor):
            x = self.gate_proj.quantize_input(x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.down_proj.scheme.rule is not ActivationRule.OWN:
            return self._down(self.down_proj.quantize_input(nn.functional.silu(gate) * up))
        made = silu_mul_quantize(gate, up, **self.down_proj.quantization())
        return self._down(QuantizedInput(made.codes, made.scale, made.zero, gate.dtype))

    def _down(self, x: QuantizedInput) -> Tensor:
        y: Tensor = self.down_proj(x)
        return y


def quantize_alike(linears: list[nn.Module]) -> bool:
    """Whether all are layers that may share one quantized input: 8-bit activations, in the same format by the same scales, and
    nothing that is done to x in 16 bits."""
    layers = [layer for layer in linears if type(layer) is QuantLinear and layer.takes_quantized_input]
    if len(layers) < len(linears) or not layers:
        return False
    first = layers[0].quantization()
    return all(_equal(layer.quantization(), first) for layer in layers[1:])


def _equal(one: dict[str, object], other: dict[str, object]) -> bool:
    pairs = [(one[key], other[key]) for key in one]
    return all(torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b or a == b for a, b in pairs)
