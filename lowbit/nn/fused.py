"""Modules, such as a norm, that compute an input and quantize it once for all layers that read it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lowbit.formats import QuantTensor
from lowbit.formats.split import rows_of
from lowbit.kernels.reference.elementwise import Gate
from lowbit.nn.linear import QuantLinear
from lowbit.nn.packed import KERNEL_TENSORS
from lowbit.nn.parameters import keeping_types
from lowbit.ops import Activations, rms_norm_quantize, silu_mul_quantize
from lowbit.ops.gated_gemm import gated_gemm
from lowbit.pack import FragmentWeight
from lowbit.pack.gated import HALF, alternate, pack_gated


class QuantizingNorm(nn.Module):
    """RMSNorm that returns quantized `Activations`, computed in one pass over memory. All layers that read them quantize x in
    the same way; `reader` is one of these layers.

    `norm` is the replaced module, with `weight` [K]. The result is computed in float32 and not rounded to x's dtype before
    rotation and quantization. A separate norm rounds once or twice, so codes next to a tie may differ by one. If the scheme has
    another tool's rule, which rounds x before it is quantized, `norm` computes x, and x is quantized once for all layers.
    """

    def __init__(self, norm: nn.Module, eps: float, reader: QuantLinear) -> None:
        super().__init__()
        assert isinstance(norm.weight, nn.Parameter)
        self.weight, self.eps = norm.weight, eps
        self._reader, self._norm = (reader,), (norm,)  # tuples, so that their parameters are not registered here too

    def restored(self) -> nn.Module:
        """Returns the replaced norm with the current weight."""
        norm = self._norm[0]
        norm.weight = self.weight
        return norm.train(self.training)

    def forward(self, x: Tensor) -> Activations:
        reader = self._reader[0]
        if reader.quantizes_rounded_input:
            return reader.quantize_input(self._norm[0](x))
        return rms_norm_quantize(x, self.weight, self.eps, **reader.quantization())

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}, to {self._reader[0].activation_format}"


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) with x quantized once for gate and up. x is a tensor [.., K] or `Activations`.

    One pass in float32 computes silu, the product and the quantization for `down_proj`. If the scheme has another tool's rule,
    the product is rounded to x's dtype and then quantized. `restored` returns `replaced`, the module that this one replaces.
    """

    def __init__(
        self, gate_proj: QuantLinear, up_proj: QuantLinear, down_proj: QuantLinear, replaced: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj
        self._mlp = (replaced,)  # a tuple, so that its parameters are not registered here too

    def restored(self) -> nn.Module:
        """Returns the replaced module with the current layers."""
        mlp = self._mlp[0]
        assert mlp is not None
        for name, layer in self.named_children():
            setattr(mlp, name, layer)
        return mlp.train(self.training)

    def forward(self, x: Tensor | Activations) -> Tensor:
        if isinstance(x, Tensor):
            x = self.gate_proj.quantize_input(x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.down_proj.quantizes_rounded_input:
            return self._down(self.down_proj.quantize_input(nn.functional.silu(gate) * up))
        return self._down(silu_mul_quantize(gate, up, **self.down_proj.quantization()))

    def _down(self, x: Activations) -> Tensor:
        y: Tensor = self.down_proj(x)
        return y


class AlternatingMLP(nn.Module):
    """down(f(gate(x)) * up(x)) with gate and up as one packed weight whose rows alternate (pack/gated.py).

    f is "silu" or "gelu_tanh". `layers` are gate and up, or one layer with the rows of gate, then those of up (Phi-3); `joined`
    is then True. The module removes their packed weights, so a model with it can compute but not be saved. x is on a GPU, in
    fp16 or bf16.
    """

    def __init__(self, layers: Sequence[QuantLinear], down_proj: nn.Module, function: Gate) -> None:
        super().__init__()
        weight = pack_gated(*_gate_and_up(layers))
        for layer in layers:
            for name in KERNEL_TENSORS:
                setattr(layer, name, None)
        self.joined = len(layers) == 1
        self.scheme, self.shape, self.function, self.down_proj = weight.scheme, weight.shape, function, down_proj
        self.batch_invariant = layers[0].batch_invariant
        self.subnormal = weight.subnormal
        self.register_buffer("kernel_codes", weight.codes, persistent=False)
        self.register_buffer("kernel_scale", weight.scale, persistent=False)
        self.register_buffer("kernel_channel_scale", weight.channel_scale, persistent=False)
        biases = [half for layer in layers if layer.bias is not None for half in layer.bias.data.chunk(2 // len(layers))]
        self.bias: Tensor | None
        self.register_buffer("bias", alternate(*biases) if biases else None, persistent=False)
        self.register_state_dict_pre_hook(_cannot_be_saved)

    @staticmethod
    def refusals(layers: Sequence[QuantLinear]) -> tuple[str, ...]:
        """Returns the reasons why layers packed for a GPU's kernels cannot be one weight with alternating rows; empty if they
        can."""
        rows, reasons = [layer.out_features for layer in layers], []
        if len(set(rows)) > 1 or sum(rows) % (2 * HALF):
            reasons.append(f"rows of gate and up, {' and '.join(map(str, rows))}, alternate by {HALF}")
        if len({layer.bias is None for layer in layers}) > 1:
            reasons.append("one of gate and up has a bias")
        return tuple(reasons)

    def weight(self) -> FragmentWeight:
        """The joined weight of gate and up."""
        codes = self.kernel_codes
        assert isinstance(codes, Tensor)
        tensors = codes, self.kernel_scale, self.kernel_channel_scale
        return FragmentWeight(*tensors, self.scheme, self.shape, self.subnormal)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        rows, invariant = x.reshape(-1, x.shape[-1]), self.batch_invariant
        y: Tensor = self.down_proj(gated_gemm(rows, self.weight(), self.bias, self.function, batch_invariant=invariant))
        return y.view(*x.shape[:-1], -1)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        """Keeps the dtype of scales under `.half()`, as `PackedWeight` does."""
        return super()._apply(keeping_types(fn, (getattr(self, name, None) for name in KERNEL_TENSORS)), recurse)


def _gate_and_up(layers: Sequence[QuantLinear]) -> tuple[QuantTensor, QuantTensor]:
    """Returns gate and up of two layers, or of one layer with the rows of both."""
    if len(layers) == 2:
        return layers[0].quant_tensor(), layers[1].quant_tensor()
    (layer,) = layers
    q, n = layer.quant_tensor(), layer.out_features
    return rows_of(q, [(0, n // 2)]), rows_of(q, [(n // 2, n)])


def _cannot_be_saved(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    raise RuntimeError(
        f"{prefix.rstrip('.') or 'this module'}: an engine has packed the weights of its gate and up in a form of its own; "
        "load the model again to save it"
    )


def quantize_alike(linears: list[nn.Module]) -> bool:
    """Returns True if all layers can share one quantized input: 8-bit activations in the same format with the same scales and
    rotation, and no other transform of the 16-bit x.
    """
    layers = [layer for layer in linears if type(layer) is QuantLinear and layer.takes_quantized_input]
    if len(layers) < len(linears) or not layers:
        return False
    first = layers[0].quantization()
    return all(_equal(layer.quantization(), first) for layer in layers[1:])


def _equal(one: dict[str, object], other: dict[str, object]) -> bool:
    pairs = [(one[key], other[key]) for key in one]
    return all(torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b or a == b for a, b in pairs)
