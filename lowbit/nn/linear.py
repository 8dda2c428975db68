"""A linear layer with quantized weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.formats import NO_PARTS, ActivationRule, InputParts, QuantTensor, Scheme
from lowbit.nn.experts import QuantExperts
from lowbit.nn.packed import PackedWeight
from lowbit.ops import Activations, gemm, quantize_activations
from lowbit.ops.table import UnsupportedProblem, choose


class QuantLinear(PackedWeight):
    """y [.., out_features] = x [.., in_features] . dequant(w)^T + bias, with w packed (see `PackedWeight`).

    x is fp16, bf16 or fp32, and y has the dtype of x. bias [out_features] is that of the original layer. Each call first
    applies the input transform to x, which is rounded to its dtype after the rotation and after the scaling. A scheme with
    8-bit activations then quantizes x: by the transform's static scale, or else per token (per block of K if the weights have
    blocks). If no other transform comes between, rotation and quantization are one pass. A low-rank correction costs two small
    products and two roundings to x's dtype: of x down^T, and of the quantized product before the correction is added. The first
    call packs the weights for the device's kernels (`prepare`), except while torch.compile traces: call the layer before
    compiling it.

    Gradients reach x and the bias, never the weights: backward dequantizes the weight of one layer at a time, as QLoRA does.
    The gradient of x ignores the rounding of x to 8 bits (straight-through).
    """

    bias: nn.Parameter | None

    # With this attribute Transformers' tensor parallelism passes plain local shards to the module.
    _hf_quantized_needs_local_tp = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scheme: str | Scheme,
        *,
        bias: nn.Parameter | None = None,
        device: torch.device | str | None = None,
        input_parts: InputParts = NO_PARTS,
        low_rank: int = 0,
    ) -> None:
        super().__init__((out_features, in_features), scheme, device, input_parts=input_parts, low_rank=low_rank)
        self.in_features, self.out_features = in_features, out_features
        self.register_parameter("bias", bias)

    @classmethod
    def from_quant_tensor(cls, q: QuantTensor, bias: nn.Parameter | None = None) -> QuantLinear:
        """Returns the layer with the weights `q`."""
        module = cls(q.shape[1], q.shape[0], q.scheme, bias=bias, device="meta")
        module.set_weight(q)
        return module

    def forward(self, x: Tensor | Activations) -> Tensor:
        return self.multiply(x, self.bias)

    def multiply(self, x: Tensor | Activations, bias: Tensor | None) -> Tensor:
        """Returns the layer's y with `bias` [out_features] (or without) instead of its own bias."""
        of_x = isinstance(x, Tensor) and x.requires_grad
        if not torch.is_grad_enabled() or not (of_x or (bias is not None and bias.requires_grad)):
            return self._multiply(x, bias)
        if torch.compiler.is_compiling() and x.dtype == torch.float32 and x.device.type == "cpu":
            return self._multiply(x, bias)  # torch's own operators: their gradients are compiled too
        return self._differentiable(x, bias)

    @torch.compiler.disable(reason="gradients are not compiled; call under torch.no_grad()")
    def _differentiable(self, x: Tensor | Activations, bias: Tensor | None) -> Tensor:
        y: Tensor = _Differentiable.apply(x, bias, self)
        return y

    def _multiply(self, x: Tensor | Activations, bias: Tensor | None) -> Tensor:
        """Applies the input transform, the product and the low-rank correction."""
        rotated = self.rotated(x) if isinstance(x, Tensor) else x
        given = self.after_rotation(rotated) if isinstance(rotated, Tensor) else rotated
        y = gemm(given, self.weight_for(x.dtype), bias, batch_invariant=self.batch_invariant)
        return self._corrected(y, rotated) if self.has_correction else y  # type: ignore[arg-type]

    def _corrected(self, y: Tensor, x: Tensor) -> Tensor:
        """Returns y + (x down^T) up^T in x's dtype; with 8-bit activations, x is the 16-bit input before quantization."""
        up, down = self.weight_up, self.weight_down
        assert up is not None and down is not None
        inner = torch.nn.functional.linear(x, down.to(x.dtype))
        return torch.addmm(y.reshape(-1, y.shape[-1]), inner.reshape(-1, len(down)), up.to(x.dtype).t()).view_as(y)

    @property
    def takes_quantized_input(self) -> bool:
        """True if the layer only rotates and quantizes x; a low-rank correction multiplies the 16-bit x."""
        return self.activation_format is not None and not self.has_channels and not self.has_correction

    @property
    def quantizes_rounded_input(self) -> bool:
        """True if another tool's rule rounds x to its dtype before quantization. The module that computes x then calls
        `quantize_input` instead of quantizing float32 values.
        """
        return self.scheme.rule is not ActivationRule.OWN

    def quantize_input(self, x: Tensor) -> Activations:
        """Returns the quantized x, for a layer that `takes_quantized_input`."""
        return quantize_activations(x, **self.quantization())

    def extra_repr(self) -> str:
        said = f"in_features={self.in_features}, out_features={self.out_features}, {self.scheme}, bias={self.bias is not None}"
        return said + self.rotation_repr


class _Differentiable(torch.autograd.Function):
    """Autograd function of a layer's product, with gradients of x and of the bias, since kernels have no gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor | Activations, bias: Tensor | None, layer: QuantLinear) -> Tensor:
        ctx.layer, ctx.bias_dtype = layer, None if bias is None else bias.dtype
        return layer._multiply(x, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        of_x = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = gradient @ ctx.layer.dequantized_weight(gradient.dtype)
        if ctx.needs_input_grad[1]:
            of_bias = gradient.flatten(0, -2).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return of_x, of_bias, None


def make_batch_invariant(model: nn.Module, dtype: torch.dtype) -> None:
    """Makes the quantized linear layers and experts of a model compute a row of y with the same bits in every batch, for x of
    `dtype`.

    Other parts of the model (attention, 16-bit layers) do not change. Small products take up to 3.8 times as long (docs/log).
    Raises UnsupportedProblem, naming the layer, if its device has no batch-invariant kernel.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    experts = {name: module for name, module in model.named_modules() if isinstance(module, QuantExperts)}
    for name, mixture in experts.items():
        if reasons := mixture.batch_invariant_refusals(dtype):
            raise UnsupportedProblem(f"{name}: {'; '.join(reasons)}")
    for name, layer in layers.items():
        if layer.has_correction:
            raise UnsupportedProblem(f"{name}: its low-rank correction is two products of torch, which are not batch-invariant")
        reasons = layer.placement_refusals()
        if reasons:
            raise UnsupportedProblem(f"{name}: a batch-invariant kernel {'; '.join(reasons)}")
        try:
            choose(replace(layer.problem(dtype), batch_invariant=True))
        except UnsupportedProblem as error:
            raise UnsupportedProblem(f"{name}: {error}") from error
    for mixture in experts.values():
        mixture.batch_invariant = True
    for layer in layers.values():
        layer.batch_invariant = True
        layer.clear_refusals()
