"""Trains the scales, norms and biases of a quantized model against the logits of the float model. Codes do not change.

Layer by layer, quantizing minimizes each layer's own error, however little or much of it reaches the logits. Here the
divergence of the logits decides, over all layers at once. There are few scales per weight, so that few texts determine them.
Source of the idea: M. Chen et al., "EfficientQAT: Efficient Quantization-Aware Training for Large Language Models",
arXiv:2407.11062, which trains scales on the next token of a text; the target here is the float model's distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from lowbit.formats import QuantTensor, Scheme, ZeroPoint, decode, scale_shape
from lowbit.formats.granularity import Granularity, spread
from lowbit.methods import Learned
from lowbit.models.decoder import LayerwiseDecoder
from lowbit.models.layer_methods import LayerResult
from lowbit.models.learn import product_dtype, repeatable, rounded_inputs, sequence_order

RATE = 5e-3
"""Learning rate of Adam, relative to the size of what is trained; it decays linearly to 0. In 25 steps of 512 tokens 0.003 and
0.01 left the same divergence on other texts, within its error (2026-11-28, docs/log/quantization.md)."""

BETAS = (0.9, 0.98)


class TrainableScales:
    """The weight of `q` with trainable scales, and zeros if they are floats; codes are fixed.

    scale_change, zero_change: float32 of the scales' shape, initially 0: relative to each scale.
    """

    def __init__(self, q: QuantTensor) -> None:
        self.q = q
        self.scale_change = torch.zeros_like(q.scale, dtype=torch.float32).requires_grad_()
        floating = q.scheme.zero is ZeroPoint.FLOAT
        self.zero_change = torch.zeros_like(self.scale_change).requires_grad_() if floating else None

    @property
    def parameters(self) -> list[Tensor]:
        """The trainable tensors."""
        return [self.scale_change] if self.zero_change is None else [self.scale_change, self.zero_change]

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight [N, K] that the decoder computes with, differentiable."""
        scale, zero = self._trained()
        weight: Tensor = _Dequantize.apply(self.q.codes, scale, zero, self.q.scheme, dtype)  # type: ignore[no-untyped-call]
        return weight if self.q.low_rank is None else weight + self.q.low_rank.dense(dtype)

    @torch.no_grad()
    def quantized(self) -> QuantTensor:
        """Returns the same codes with the trained scales and zeros."""
        scale, zero = self._trained()
        stored = None if zero is None else zero.to(torch.uint8 if self.zero_change is None else self.q.scale.dtype)
        return replace(self.q, scale=scale.to(self.q.scale.dtype), zero=stored)

    def _trained(self) -> tuple[Tensor, Tensor | None]:
        """Returns scales and zeros, float32, rounded to their stored dtype with a straight-through gradient."""
        first = self.q.scale.float()
        scale = _rounded(first * (1 + self.scale_change), self.q.scale.dtype)
        if self.q.zero is None or self.zero_change is None:
            return scale, None if self.q.zero is None else self.q.zero.float()
        return scale, _rounded(self.q.zero.float() + first * self.zero_change, self.q.scale.dtype)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x rounded to `dtype`, in float32, with the gradient of x."""
    return x + (x.detach().to(dtype).float() - x.detach())


class _Dequantize(torch.autograd.Function):
    """The weight of codes, scale and zero; keeps the codes alone for the gradients of scale and zero."""

    @staticmethod
    def forward(ctx: Any, codes: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(codes, zero)
        ctx.scheme = scheme
        shape = (codes.shape[0], codes.shape[1])
        values = _values(codes, zero, scheme).mul_(spread(scale, scheme.granularity, shape))
        if scheme.zero is ZeroPoint.FLOAT and zero is not None:
            values += spread(zero, scheme.granularity, shape)
        return values.to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        codes, zero = ctx.saved_tensors
        g = gradients[0].float()
        by_scale = _group_sums(g * _values(codes, zero, ctx.scheme), ctx.scheme.granularity)
        by_zero = _group_sums(g, ctx.scheme.granularity) if ctx.scheme.zero is ZeroPoint.FLOAT else None
        return None, by_scale, by_zero, None, None


def _values(codes: Tensor, zero: Tensor | None, scheme: Scheme) -> Tensor:
    """Returns the values of codes [N, K] that the scale multiplies, float32."""
    values = decode(codes, scheme.weight, torch.float32)
    if zero is None or scheme.zero is not ZeroPoint.INTEGER:
        return values
    return values - spread(zero, scheme.granularity, (codes.shape[0], codes.shape[1]))


def _group_sums(x: Tensor, granularity: Granularity) -> Tensor:
    """Returns the sums of x [N, K] over what shares a scale, in the scales' shape."""
    shape = (x.shape[0], x.shape[1])
    (n, k), (rows, columns) = granularity.block(shape), scale_shape(granularity, shape)
    return pad(x, (0, columns * k - shape[1], 0, rows * n - shape[0])).reshape(rows, n, columns, k).sum(dim=(1, 3))


class _Layer:
    """A loaded decoder layer with trainable scales, norms and biases."""

    def __init__(self, decoder: LayerwiseDecoder, i: int, result: LayerResult) -> None:
        self.decoder, self.i, self.result = decoder, i, result
        device = decoder.device
        self.scales = {name: TrainableScales(q.to(device)) for name, q in result.quantized.items()}
        vectors = {name: p.detach() for name, p in decoder.layers[i].named_parameters() if p.dim() == 1}
        # A bias of zeros has no size of its own; the weights of the layer are of the order of 1 / sqrt(K).
        self._sizes = {name: float(p.square().mean().sqrt()) or p.shape[0] ** -0.5 for name, p in vectors.items()}
        self._vectors = vectors
        self.changes = {name: torch.zeros_like(p, dtype=torch.float32).requires_grad_() for name, p in vectors.items()}

    @property
    def parameters(self) -> list[Tensor]:
        return [p for scales in self.scales.values() for p in scales.parameters] + list(self.changes.values())

    def run(self, x: Tensor) -> Tensor:
        """Returns the outputs of the layer for x [S, T, hidden], differentiable; products are in `product_dtype`."""
        dtype = product_dtype(self.decoder.device)
        with torch.autocast(self.decoder.device.type, torch.bfloat16, enabled=dtype is torch.bfloat16):
            weights = {f"{name}.weight": scales.dense(dtype) for name, scales in self.scales.items()}
            return self.decoder.call(self.i, x, weights | self._trained_vectors()).float()

    @torch.no_grad()
    def trained(self) -> LayerResult:
        """Returns the result of the layer with what was trained, on a CPU."""
        stored = {name: self.decoder.stored_dtype(self.i, name) for name in self.changes}
        changed = {name: p.to(stored[name]).cpu() for name, p in self._trained_vectors().items()}
        quantized = {name: scales.quantized().to("cpu") for name, scales in self.scales.items()}
        return replace(self.result, quantized=quantized, changed={**self.result.changed, **changed})

    def rounded_inputs(self) -> AbstractContextManager[None]:
        """Rounds the inputs of linear layers that quantize activations, inside the context."""
        schemes = {name: scales.q.scheme for name, scales in self.scales.items()}
        static = {name: scales.q.input_transform.tensors() for name, scales in self.scales.items()}
        keys = ("activation_scale", "activation_zero")
        ranges = {name: {key: t for key, t in tensors.items() if key in keys} for name, tensors in static.items()}
        return rounded_inputs(self.decoder.layers[self.i], schemes, ranges)

    def _trained_vectors(self) -> dict[str, Tensor]:
        return {name: p + self._sizes[name] * self.changes[name] for name, p in self._vectors.items()}


def distill(
    decoder: LayerwiseDecoder,
    first: list[Tensor],
    expected: list[Tensor],
    results: Sequence[LayerResult],
    dense: Sequence[Mapping[str, Tensor]],
    method: Learned,
) -> tuple[list[LayerResult], tuple[float, float]]:
    """Trains the scales, norms and biases in `results` for `method.distill` steps of `method.batch` sequences.

    first: the inputs of the first decoder layer, batches [batch, T, hidden] as `LayerwiseDecoder.embed` returns them. expected:
    the outputs of the last layer of the float model for them. dense: parameters of each layer that replace those of the files.

    Returns the results and the mean divergence of the logits on all sequences, in nats per token, before and after. If it grew,
    the results are those given. Memory: the codes of all layers at a byte per weight, their float32 scales four times, the
    inputs of all layers for one batch, one layer in 16 bits, and LM head and logits of one sequence.
    """
    layers = [_loaded(decoder, i, result, dense[i]) for i, result in enumerate(results)]
    parameters = [p for layer in layers for p in layer.parameters]
    optimizer = torch.optim.Adam(parameters, betas=BETAS, eps=1e-12, fused=True)
    together = len(first[0])
    order = sequence_order(sum(len(x) for x in first), together, method.distill, method.seed)
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(layer.rounded_inputs())
        stack.enter_context(decoder.head())
        stack.enter_context(repeatable(decoder.device))
        before = _divergence(decoder, layers, first, expected)
        for step, batch in enumerate(order):
            x = torch.stack([first[j // together][j % together] for j in batch])
            target = torch.stack([expected[j // together][j % together] for j in batch])
            optimizer.param_groups[0]["lr"] = RATE * (1 - step / len(order))
            _backward(decoder, layers, x, target)
            optimizer.step()
            optimizer.zero_grad()
        after = _divergence(decoder, layers, first, expected)
    trained = [layer.trained() for layer in layers] if after < before else list(results)
    for i in range(len(layers)):
        decoder.free(i)
    return trained, (before, min(before, after))


def _loaded(decoder: LayerwiseDecoder, i: int, result: LayerResult, dense: Mapping[str, Tensor]) -> _Layer:
    """Loads layer i without the weights that are quantized."""
    decoder.load(i, dense)
    layer = _Layer(decoder, i, result)
    decoder.drop(i, [f"{name}.weight" for name in result.quantized])
    return layer


def _backward(decoder: LayerwiseDecoder, layers: Sequence[_Layer], x: Tensor, target: Tensor) -> None:
    """Accumulates the gradients of the mean divergence on one batch; a layer's activations are computed again for them."""
    with torch.enable_grad():
        hidden = x
        for layer in layers:
            hidden = checkpoint(layer.run, hidden, use_reentrant=False, preserve_rng_state=False)
        gradient, _ = _logit_gradient(decoder, hidden.detach(), target)
        hidden.backward(gradient)


@torch.no_grad()
def _divergence(
    decoder: LayerwiseDecoder, layers: Sequence[_Layer], first: Sequence[Tensor], expected: Sequence[Tensor]
) -> float:
    """Returns the mean divergence of the logits of the float model from those of the quantized one, in nats per token."""
    total, tokens = torch.zeros((), dtype=torch.float64, device=decoder.device), 0
    for x, target in zip(first, expected, strict=True):
        for layer in layers:
            x = layer.run(x)
        total += _logit_gradient(decoder, x, target)[1].double()
        tokens += x.shape[0] * x.shape[1]
    return float(total / tokens)


def _logit_gradient(decoder: LayerwiseDecoder, last: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradient of the mean divergence at `last` [S, T, hidden], the outputs of the last layer where the float model
    has `target`, and the sum of the divergence over all tokens. The logits of one sequence are in memory at a time."""
    gradient, total = torch.empty_like(last), torch.zeros((), device=last.device)
    tokens = last.shape[0] * last.shape[1]
    training = torch.is_grad_enabled()
    for own, x, y in zip(gradient.split(1), last.split(1), target.split(1), strict=True):
        wanted = _logits(decoder, y).detach().float().log_softmax(dim=-1)
        leaf = x.detach().requires_grad_(training)
        logits = _logits(decoder, leaf)
        given = logits.detach().float().log_softmax(dim=-1)
        total += (wanted.exp() * (wanted - given)).sum()
        if training:
            logits.backward((given.exp_() - wanted.exp_()).div_(tokens).to(logits.dtype))
            assert leaf.grad is not None
            own.copy_(leaf.grad)
    return gradient, total


def _logits(decoder: LayerwiseDecoder, last: Tensor) -> Tensor:
    dtype = product_dtype(decoder.device)
    with torch.autocast(decoder.device.type, torch.bfloat16, enabled=dtype is torch.bfloat16):
        return decoder.after_layers(last)
