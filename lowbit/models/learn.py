"""Trains the rounding of the weights of a decoder layer against the layer's output in the float model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lowbit.formats import PerBlock, Scheme
from lowbit.kernels.reference.activations import quantize_activations_reference
from lowbit.methods import Learned
from lowbit.models.decoder import LayerwiseDecoder
from lowbit.quantize.learned import RATES, Descent, LearnedRounding

ENOUGH_TOKENS = 4096
"""Calibration tokens below which learning may be worse than rounding to nearest: each weight has its own offset, and few inputs
do not determine them. SmolLM2-135M-Instruct in w4a16_g64, 50 iterations, sequences of 64 tokens, perplexity on 4 windows of
512 tokens of Opticks: 30.7 rounded to nearest, 35.1 learned from 256 tokens, 33.3 from 512, 29.9 from 1,024 (one core of a
Xeon, 2026-11-24). Four times that, since more iterations fit few tokens more closely; from 32,768 it is far better
(docs/internals/quantization.md)."""


def learn(
    decoder: LayerwiseDecoder,
    i: int,
    hidden: list[Tensor],
    expected: list[Tensor],
    roundings: Mapping[str, LearnedRounding],
    ranges: Mapping[str, Mapping[str, Tensor]],
    method: Learned,
) -> tuple[float, float]:
    """Learns the roundings of linear layers of decoder layer i, so that its outputs for `hidden` become those in `expected`.

    roundings: by the name of the linear layer in the decoder layer. hidden, expected: batches as `LayerwiseDecoder.embed`
    returns them. ranges: static activation scales; inputs of linear layers with 8-bit activations are rounded.

    Returns the squared error of the outputs on all batches before and after, relative to what the layer adds to its inputs. If
    the error would grow, the layer stays rounded to nearest. Offsets and factors are moved by `Descent`. Products are in
    `product_dtype`; the residual stream and the parameters are float32. `method.seed` and i decide the order of sequences. No
    step synchronizes with a GPU.
    """
    together = len(hidden[0])
    sequences = sum(len(x) for x in hidden)
    order = sequence_order(sequences, together, method.iterations, method.seed + i)
    layer = decoder.layers[i]
    with rounded_inputs(layer, {n: r.scheme for n, r in roundings.items()}, ranges), repeatable(decoder.device):
        before = _relative_error(decoder, i, hidden, expected, roundings)
        for rate in RATES:
            _descend(decoder, i, hidden, expected, roundings, order, rate)
            after = _relative_error(decoder, i, hidden, expected, roundings)
            if after <= before:
                return before, after
            for rounding in roundings.values():
                rounding.reset()
    return before, before


def _descend(
    decoder: LayerwiseDecoder,
    i: int,
    hidden: list[Tensor],
    expected: list[Tensor],
    roundings: Mapping[str, LearnedRounding],
    order: list[list[int]],
    rate: float,
) -> None:
    """Runs the iterations of `learn` on the sequences in `order`, at one of `RATES`."""
    together = len(hidden[0])
    step = _Step(decoder, i, roundings, hidden[0], len(order))
    with _own_stream(decoder.device):
        for number, batch in enumerate(order):
            for row, j in enumerate(batch):
                step.x[row].copy_(hidden[j // together][j % together])
                step.target[row].copy_(expected[j // together][j % together])
            step.run(rate * (1 - number / len(order)) / len(order))


class _Step:
    """One iteration on the sequences in `x` towards the outputs in `target`, [batch, T, hidden] like `example`.

    On a GPU the steps after the first `EAGER_STEPS` replay a CUDA graph, if the layer's forward pass does not synchronize: 6.8
    ms instead of 16.3 for a layer of SmolLM2-135M, with the same codes (one H200, 2026-11-29, 8 pieces of 512 tokens).
    """

    EAGER_STEPS = 3

    def __init__(
        self, decoder: LayerwiseDecoder, i: int, roundings: Mapping[str, LearnedRounding], example: Tensor, iterations: int
    ) -> None:
        self._decoder, self._i, self._roundings = decoder, i, roundings
        self.x, self.target = torch.empty_like(example), torch.empty_like(example)
        self._descent = Descent(list(roundings.values()), iterations)
        self._captures = decoder.device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._steps = 0

    def run(self, rate: float) -> None:
        """Changes the parameters by one step at this learning rate."""
        self._descent.set_rate(rate)
        if self._steps == self.EAGER_STEPS and self._captures and not self._synchronizes():
            self._graph = self._captured()
        self._steps += 1
        if self._graph is None:
            self._change()
        else:
            self._graph.replay()

    def _captured(self) -> torch.cuda.CUDAGraph | None:
        """Returns the graph of a step; None if it cannot be captured, which changes no parameter."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                self._change()
        except RuntimeError:  # an operator that a capture forbids, or too little memory for the graph's own
            self._descent.forget()
            return None
        return graph

    def _change(self) -> None:
        self._backward()
        self._descent.step()

    def _backward(self) -> None:
        with torch.enable_grad():
            error = _output(self._decoder, self._i, self.x, self._roundings) - self.target
            error.square().sum().backward(inputs=self._descent.parameters)

    def _synchronizes(self) -> bool:
        """Returns True if forward and backward pass synchronize with the GPU, as routing to experts does."""
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            self._backward()
        except RuntimeError:
            return True
        finally:
            torch.cuda.set_sync_debug_mode(before)
            self._descent.forget()
        return False


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """Runs on a stream of its own on a GPU, since the default stream cannot be captured."""
    if device.type != "cuda":
        yield
        return
    current, own = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    own.wait_stream(current)
    with torch.cuda.stream(own):
        yield
    current.wait_stream(own)


def product_dtype(device: torch.device) -> torch.dtype:
    """Returns bfloat16 if the device has instructions for its products, else float32. On one core of a Xeon with AMX, an
    iteration of SmolLM2-135M took 0.35 s in bfloat16 and 0.78 s in float32 (2026-11-23)."""
    fast = device.type != "cpu" or torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def sequence_order(sequences: int, together: int, iterations: int, seed: int) -> list[list[int]]:
    """Returns the sequences of each iteration: whole batches of one random permutation of all after the other."""
    generator = torch.Generator().manual_seed(seed)
    batches: list[list[int]] = []
    while len(batches) < iterations:
        shuffled = torch.randperm(sequences, generator=generator).tolist()
        batches += [shuffled[j : j + together] for j in range(0, sequences - together + 1, together)]
    return batches[:iterations]


def _output(decoder: LayerwiseDecoder, i: int, x: Tensor, roundings: Mapping[str, LearnedRounding]) -> Tensor:
    dtype = product_dtype(decoder.device)
    with torch.autocast(decoder.device.type, torch.bfloat16, enabled=dtype is torch.bfloat16):
        weights = {f"{name}.weight": r.dense(dtype) for name, r in roundings.items()}
        return decoder.call(i, x, weights).float()


@torch.no_grad()
def _relative_error(
    decoder: LayerwiseDecoder, i: int, hidden: list[Tensor], expected: list[Tensor], roundings: Mapping[str, LearnedRounding]
) -> float:
    """Returns the squared error of the outputs over the squared norm of what the layer adds to its inputs."""
    error, size = torch.zeros(2, dtype=torch.float64, device=decoder.device).unbind()
    for x, target in zip(hidden, expected, strict=True):
        error += (_output(decoder, i, x, roundings) - target).double().square().sum()
        size += (target - x).double().square().sum()
    return float(error / size)


@contextmanager
def rounded_inputs(
    layer: nn.Module, schemes: Mapping[str, Scheme], ranges: Mapping[str, Mapping[str, Tensor]]
) -> Iterator[None]:
    """Rounds the inputs of the linear layers of `schemes` that quantize activations."""
    hooks = [
        layer.get_submodule(name).register_forward_pre_hook(_rounding(scheme, ranges.get(name, {})))
        for name, scheme in schemes.items()
        if scheme.activation is not None
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _rounding(scheme: Scheme, given: Mapping[str, Tensor]) -> Callable[..., tuple[Tensor]]:
    return lambda module, args: (rounded_activations(args[0], scheme, **given),)


def rounded_activations(
    x: Tensor, scheme: Scheme, activation_scale: Tensor | None = None, activation_zero: Tensor | None = None
) -> Tensor:
    """Returns x [.., K] quantized and dequantized as by a layer of `scheme`, in x's dtype, with a straight-through gradient."""
    assert scheme.activation is not None
    group = scheme.granularity.k if isinstance(scheme.granularity, PerBlock) and activation_scale is None else 0
    with torch.no_grad():
        codes, scale, zero = quantize_activations_reference(
            x, scheme.activation, group, activation_scale, not scheme.activation_zero, activation_zero, scheme.rule
        )
        values = codes.float()
        size = group or x.shape[-1]
        values = pad(values, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))
        values = (values if zero is None else values - zero[..., None]) * scale[..., None]
        values = values.flatten(-2)[..., : x.shape[-1]].to(x.dtype)
    return x + (values - x).detach()


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Makes a GPU's attention sum its gradients in a fixed order, where that is implemented."""
    if device.type == "cpu":
        yield
        return
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about GEMMs, whose order is fixed on a single stream
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
