"""Calibrated quantization of the experts of one layer, each with the tokens that the router sends to it.

For a token x, the output of a layer is the sum of  p_e (down_e h_e + b'_e)  over the experts e that the router chose, with
h_e = gate(gate_up_e x + b_e), the router's weight p_e and biases b_e and b'_e. An error D of gate_up adds p_e^2 |D x|^2 per
token to the squared error, an error D of down p_e^2 |D h_e|^2. So the Hessian of an expert's input is the sum of p_e^2 x^T x
over its tokens. An expert may have too few tokens to determine it, so tokens of the whole layer are added with a small weight.

Experts are quantized one after another from x of all tokens. The memory beside x and the weights is that of one expert's rows
and of the Hessians of its two matrices, 4 K^2 + 4 I^2 bytes. All experts of a layer share the transform of their input: AWQ's
scale of the channels of x, and the rotation. If h_e is proportional to up_e x, each expert has its own scale of the channels of
h_e, which is folded into the rows of up_e at no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowbit.formats import QuantTensor, Scheme, rotate_blocks
from lowbit.methods import Awq, Gptq, Learned, Method, Rtn, SmoothQuant
from lowbit.quantize.awq import candidates, clipped, relative_magnitude, rounding_error, search_scale
from lowbit.quantize.gptq import gptq
from lowbit.quantize.learn_expert import learn_expert
from lowbit.quantize.rtn import rtn, scale_dtype
from lowbit.quantize.smoothquant import best_alpha, smoothing_scale
from lowbit.quantize.statistics import InputStatistics

LEAST_TOKENS = 32
"""Experts with fewer calibration tokens than this are rounded to nearest."""
PRIOR_TOKENS = 256
"""The added tokens of the whole layer together count as much as this many tokens of an expert. Without them, an expert with few
tokens is overfitted.

Measured with a quarter of an MLP of SmolLM2-135M in w4a16_g64 as one expert, whose tokens were one of 8 clusters of x (a Xeon,
2026-11-24). Error on the cluster's tokens of another text, relative to rounding to nearest, without and with 256 added tokens:

    tokens of the expert          layer 6          layer 20
    GPTQ, 128                     1.06 and 0.88    0.73 and 0.61
    GPTQ, 512                     0.97 and 0.85    0.59 and 0.55
    learned rounding, 32          1.46 and 0.86    1.33 and 0.76
    learned rounding, 512         0.91 and 0.79    0.69 and 0.64

For GPTQ, 64 to 1,024 added tokens give much the same errors."""
BACKGROUND_ROWS = 2048
"""Number of tokens of the whole layer that are added to those of each expert, evenly spaced."""
SAMPLE_ROWS = 256
"""Rows that the search of SmoothQuant's alpha computes with."""


@dataclass(frozen=True, eq=False)
class ExpertMatrices:
    """The experts of one layer before they are quantized.

    gate_up: [E, N, K] and down: [E, K', I], any float dtype. gate: maps rows gate_up x + bias [R, N] to h [R, I]. gate_up_bias
    [E, N] and down_bias [E, K'] or None. up_rows: int64 [I]; channel i of h is proportional to output up_rows[i] of gate_up.
    None if there are no such outputs. Raises ValueError for shapes that do not go together.
    """

    gate_up: Tensor
    down: Tensor
    gate: Callable[[Tensor], Tensor]
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    up_rows: Tensor | None = None

    def __post_init__(self) -> None:
        if not (self.gate_up.dim() == self.down.dim() == 3 and len(self.gate_up) == len(self.down)):
            shapes = f"{tuple(self.gate_up.shape)} and {tuple(self.down.shape)}"
            raise ValueError(f"experts are gate_up [E, N, K] and down [E, K, I], got {shapes}")
        for name, weight in (("gate_up_bias", self.gate_up), ("down_bias", self.down)):
            bias = getattr(self, name)
            if bias is not None and tuple(bias.shape) != tuple(weight.shape[:2]):
                raise ValueError(f"{name} is {list(weight.shape[:2])}, got {tuple(bias.shape)}")
        if self.up_rows is not None and len(self.up_rows) != self.down.shape[2]:
            raise ValueError(f"up_rows has a row for each of {self.down.shape[2]} channels, got {len(self.up_rows)}")

    @property
    def experts(self) -> int:
        """E."""
        return len(self.down)

    def hidden(self, e: int, x: Tensor, gate_up: Tensor | None = None) -> Tensor:
        """Returns h [R, I] float32 of x [R, K], with `gate_up` [N, K] in place of the expert's own."""
        weight = self.gate_up[e] if gate_up is None else gate_up
        y = x @ weight.float().T
        return self.gate(y if self.gate_up_bias is None else y + self.gate_up_bias[e].float())

    def output(self, e: int, hidden: Tensor, down: Tensor | None = None) -> Tensor:
        """Returns the output [R, K'] float32 of h [R, I], with `down` [K', I] in place of the expert's own."""
        weight = self.down[e] if down is None else down
        y = hidden @ weight.float().T
        return y if self.down_bias is None else y + self.down_bias[e].float()


class RoutedInputs:
    """The inputs of the experts of one layer: x [T, K] of all tokens, any float dtype, and the router's experts and weights.

    experts: int [T, top_k], indices of experts; indices of `count` and more are ignored. weights: float [T, top_k], the
    router's weights. tokens: the number of tokens of each expert. Raises ValueError for shapes that do not go together and for
    negative indices.
    """

    def __init__(self, x: Tensor, experts: Tensor, weights: Tensor, count: int) -> None:
        if x.dim() != 2 or experts.dim() != 2 or len(x) != len(experts) or experts.shape != weights.shape:
            shapes = ", ".join(str(tuple(t.shape)) for t in (x, experts, weights))
            raise ValueError(f"inputs of experts are x [T, K], experts [T, top_k] and weights [T, top_k], got {shapes}")
        if experts.numel() and int(experts.min()) < 0:
            raise ValueError(f"numbers of experts are 0 to {count - 1}, got {int(experts.min())}")
        self.x = x
        slots = experts.flatten().long()
        self._slots = slots.argsort(stable=True)
        self.tokens: list[int] = torch.bincount(slots.clamp(max=count), minlength=count + 1)[:count].tolist()
        self._starts = [0, *torch.tensor(self.tokens).cumsum(0).tolist()]
        self._top_k, self._weights = experts.shape[1], weights.flatten()

    @classmethod
    def of_batches(cls, batches: Iterable[tuple[Tensor, Tensor, Tensor]], count: int) -> RoutedInputs:
        """Returns the inputs of several calls of the experts, each (x [.., K], experts [.., top_k], weights [.., top_k])."""
        parts = [[t.detach().reshape(-1, t.shape[-1]) for t in batch] for batch in batches]
        x, experts, weights = (torch.cat([part[i] for part in parts]) for i in range(3))
        return cls(x, experts, weights, count)

    def of(self, e: int) -> tuple[Tensor, Tensor]:
        """Returns x [R, K] of the tokens of expert e and the router's weights [R, 1], float32."""
        slots = self._slots[self._starts[e] : self._starts[e + 1]]
        return self.x[slots // self._top_k].float(), self._weights[slots].float()[:, None]

    def with_prior(self, e: int, prior: int) -> tuple[Tensor, Tensor]:
        """Returns `of(e)` followed by up to `BACKGROUND_ROWS` tokens of the whole layer, which together have the weight of
        `prior` tokens of the expert."""
        x, weights = self.of(e)
        if not prior or not len(x):
            return x, weights
        rows = torch.linspace(0, len(self.x) - 1, min(BACKGROUND_ROWS, len(self.x)), device=x.device).round().long()
        small = (weights.square().mean() * prior / len(rows)).sqrt().expand(len(rows), 1)
        return torch.cat([x, self.x[rows].float()]), torch.cat([weights, small])


@dataclass
class CalibratedExperts:
    """The quantized experts of one layer.

    gate_up, down: a matrix per expert, all of one scheme, type of scales and input transform. tokens: the number of calibration
    tokens of each expert. starved: experts that were rounded to nearest, since too few tokens reached them. error: the squared
    error of the experts' outputs, times the router's weights, on all calibration tokens, relative to the squared outputs.
    """

    gate_up: list[QuantTensor]
    down: list[QuantTensor]
    tokens: list[int]
    starved: list[int] = field(default_factory=list)
    error: float = 0.0

    def notes(self, name: str, least: int = LEAST_TOKENS) -> list[str]:
        """Returns the lines of the report on the expert layer `name`."""
        if not self.starved:
            return []
        counts = ", ".join(f"{e} ({self.tokens[e]})" for e in self.starved)
        return [
            f"{name}: {len(self.starved)} of {len(self.tokens)} experts rounded to nearest, since fewer than {least} "
            f"calibration tokens reached them: expert (tokens) {counts}"
        ]


def calibrate_experts(
    matrices: ExpertMatrices,
    inputs: RoutedInputs,
    schemes: tuple[Scheme, Scheme],
    method: Method,
    *,
    least: int = LEAST_TOKENS,
    prior: int = PRIOR_TOKENS,
    rotations: tuple[int, int] = (0, 0),
    stored: torch.dtype | None = None,
) -> CalibratedExperts:
    """Quantizes the experts of one layer for the inputs that reach each of them.

    schemes: of gate_up and of down. method: `Rtn`, `Gptq`, `Awq`, `SmoothQuant` or `Learned`; GPTQ's act-order keeps the groups
    (static_groups), since all experts read one x. least: experts that fewer tokens reach are rounded to nearest. prior: the
    weight of the tokens of the whole layer beside those of an expert, in tokens of the expert. rotations: block sizes of the
    rotations of the inputs of gate_up and of down, 0 for none. stored: as for `rtn`.

    Raises ValueError for another method, for schemes with static activations, which would need a scale per expert, and for
    weights that are not finite.
    """
    if not isinstance(method, (Rtn, Gptq, Awq, SmoothQuant, Learned)):
        raise ValueError(f"{type(method).__name__} does not look at inputs")
    for scheme in schemes:
        if scheme.static_activations:
            raise ValueError(
                f"{scheme} has one calibrated scale of x per matrix, which experts do not have; take one per token"
            )
    return _ExpertLayer(matrices, inputs, schemes, method, least, prior, rotations, stored).quantize()


class _ExpertLayer:
    """One run of `calibrate_experts`."""

    def __init__(
        self, matrices: ExpertMatrices, inputs: RoutedInputs, schemes: tuple[Scheme, Scheme], method: Method, least: int,
        prior: int, rotations: tuple[int, int], stored: torch.dtype | None,
    ) -> None:  # fmt: skip
        self.matrices, self.inputs, self.schemes, self.method = matrices, inputs, schemes, method
        self.prior, self.rotations, self.stored = prior, rotations, stored
        self.starved = [e for e, tokens in enumerate(inputs.tokens) if tokens < least]
        self._reached = [e for e in range(matrices.experts) if e not in self.starved]
        # Channels of h scale with rows of up, unless they are mixed by a rotation or shifted by a bias.
        folds = matrices.up_rows is not None and not rotations[1] and matrices.gate_up_bias is None
        self._up_rows = matrices.up_rows if folds else None
        self._scale: Tensor | None = None  # of the channels of x
        self._hidden_scale: Tensor | None = None  # of the channels of h, if they do not fold
        self._folded: dict[int, Tensor] = {}  # of the channels of h, by expert

    @torch.no_grad()
    def quantize(self) -> CalibratedExperts:
        self._find_scales()
        types = (self._scale_type(0), self._scale_type(1))
        first, second = [], []
        error, size = 0.0, 0.0
        for e in range(self.matrices.experts):
            q, r = self._rounded(e, types) if e in self.starved else self._quantized(e, types)
            first.append(self._with_input(q, self._scale, self.rotations[0]))
            second.append(self._with_input(r, self._hidden_scale, self.rotations[1]))
            own = self._error(e, first[-1], second[-1])
            error, size = error + own[0], size + own[1]
        return CalibratedExperts(first, second, self.inputs.tokens, self.starved, error / size if size else 0.0)

    def _weights(self, e: int) -> tuple[Tensor, Tensor]:
        """Returns gate_up and down of an expert, float32, rotated and scaled."""
        first, second = self._rotated(e, 0), self._rotated(e, 1)
        if self._scale is not None:
            first *= self._scale
        if self._hidden_scale is not None:
            second *= self._hidden_scale
        if e in self._folded:
            assert self._up_rows is not None
            first[self._up_rows] /= self._folded[e][:, None]
            second *= self._folded[e]
        return first, second

    def _rotated(self, e: int, which: int) -> Tensor:
        weight = (self.matrices.gate_up, self.matrices.down)[which][e].detach()
        block = self.rotations[which]
        return rotate_blocks(weight.float(), block) if block else weight.to(torch.float32, copy=True)

    def _scale_type(self, which: int) -> torch.dtype:
        """Returns the dtype that can hold the scales of all experts."""
        types = {scale_dtype(self.schemes[which], self._weights(e)[which], self.stored) for e in range(self.matrices.experts)}
        return types.pop() if len(types) == 1 else torch.bfloat16

    def _x(self, e: int) -> tuple[Tensor, Tensor]:
        """Returns the inputs of the scaled and rotated gate_up of an expert, [R, K], and their weights [R, 1]."""
        x, weights = self.inputs.with_prior(e, self.prior)
        x = rotate_blocks(x, self.rotations[0]) if self.rotations[0] else x
        return (x if self._scale is None else x / self._scale), weights

    def _h(self, hidden: Tensor) -> Tensor:
        """Returns the inputs of the rotated and scaled down: h, in which folded scales are included already, rotated and
        divided by the other scale."""
        hidden = rotate_blocks(hidden, self.rotations[1]) if self.rotations[1] else hidden
        return hidden if self._hidden_scale is None else hidden / self._hidden_scale

    def _statistics(self, rows: Tensor, weights: Tensor, *, hessian: bool = True, keep: int = 0) -> InputStatistics:
        statistics = InputStatistics(rows.shape[1], hessian=hessian, keep=keep, device=rows.device)
        statistics.add(rows * weights)
        return statistics

    def _rounded(self, e: int, types: tuple[torch.dtype, torch.dtype]) -> tuple[QuantTensor, QuantTensor]:
        search = self.method.search if isinstance(self.method, Rtn) else "max"
        first, second = (
            rtn(weight, scheme, search=search, scale_type=dtype)
            for weight, scheme, dtype in zip(self._weights(e), self.schemes, types, strict=True)
        )
        return first, second

    def _quantized(self, e: int, types: tuple[torch.dtype, torch.dtype]) -> tuple[QuantTensor, QuantTensor]:
        match self.method:
            case Gptq():
                return self._gptq(e, types, self.method)
            case Learned():
                return self._learned(e, types, self.method)
            case Awq(search="loss"):
                x, weights = self._x(e)
                hidden = self._h(self._own_hidden(e, x))
                inputs = (self._statistics(rows, weights).hessian for rows in (x, hidden))
                parts = zip(self._weights(e), self.schemes, inputs, types, strict=True)
                first, second = (clipped(w, scheme, h, scale_type=dtype) for w, scheme, h, dtype in parts)
                return first, second
        return self._rounded(e, types)

    def _own_hidden(self, e: int, x: Tensor, gate_up: Tensor | None = None) -> Tensor:
        """Returns h of the transformed x, by the transformed gate_up of the expert or another one."""
        return self.matrices.hidden(e, x, self._weights(e)[0] if gate_up is None else gate_up)

    def _gptq(self, e: int, types: tuple[torch.dtype, torch.dtype], method: Gptq) -> tuple[QuantTensor, QuantTensor]:
        def quantized(which: int, weight: Tensor, rows: Tensor, weights: Tensor) -> QuantTensor:
            return gptq(
                weight, self._statistics(rows, weights).hessian, self.schemes[which], act_order=method.act_order,
                static_groups=method.static_groups or method.act_order, search=method.search, damping=method.damping,
                scale_type=types[which],
            )  # fmt: skip

        x, weights = self._x(e)
        gate_up, down = self._weights(e)
        first = quantized(0, gate_up, x, weights)
        return first, quantized(1, down, self._h(self._own_hidden(e, x, first.dequantize())), weights)

    def _learned(self, e: int, types: tuple[torch.dtype, torch.dtype], method: Learned) -> tuple[QuantTensor, QuantTensor]:
        x, weights = self._x(e)
        original, _ = self.inputs.with_prior(e, self.prior)
        target = self.matrices.output(e, self.matrices.hidden(e, original))

        def output(gate_up: Tensor, down: Tensor, rows: Tensor) -> Tensor:
            return self.matrices.output(e, self._h(self._own_hidden(e, x[rows], gate_up)), down)

        hidden = self._h(self._own_hidden(e, x))
        squares = ((x * weights).square().mean(dim=0), (hidden * weights).square().mean(dim=0))
        return learn_expert(
            output, self._weights(e), self.schemes, target, weights, method, seed=e, scale_types=types, squares=squares
        )

    def _error(self, e: int, gate_up: QuantTensor, down: QuantTensor) -> tuple[float, float]:
        """Returns the squared error of an expert's outputs and their squares, times the router's weights."""
        x, weights = self.inputs.of(e)
        expected = self.matrices.output(e, self.matrices.hidden(e, x)) * weights
        actual = self.matrices.output(e, self.matrices.hidden(e, x, gate_up.dequantize()), down.dequantize()) * weights
        return float((actual - expected).double().square().sum()), float(expected.double().square().sum())

    @staticmethod
    def _with_input(q: QuantTensor, scale: Tensor | None, rotation: int) -> QuantTensor:
        return q.with_input(pre_quant_scale=None if scale is None else 1 / scale, hadamard=rotation)

    def _find_scales(self) -> None:
        """Finds the scales of the channels of x and h."""
        smooth = self.method if isinstance(self.method, SmoothQuant) else getattr(self.method, "smooth", None)
        if isinstance(self.method, Awq):
            # Both searches use the unscaled experts, because the scale of one input does not change the other input.
            scale = self._shared_scale(0)
            if self._up_rows is not None:
                for e in self._reached:
                    rows, weights = self._input(e, 1)
                    own = search_scale([self._rotated(e, 1)], [self.schemes[1]], self._statistics(rows, weights))
                    self._folded |= {} if own is None else {e: own}
            else:
                self._hidden_scale = self._shared_scale(1)
            self._scale = scale
        elif smooth is not None and self._up_rows is not None and self.schemes[1].activation is not None:
            for e in self._reached:
                self._folded |= self._smoothing(e, smooth)

    def _input(self, e: int, which: int) -> tuple[Tensor, Tensor]:
        """Returns the rotated inputs of gate_up or down of an expert without scales, and their weights."""
        x, weights = self.inputs.with_prior(e, self.prior)
        rows = self.matrices.hidden(e, x) if which else x
        return rotate_blocks(rows, self.rotations[which]) if self.rotations[which] else rows, weights

    def _shared_scale(self, which: int) -> Tensor | None:
        """Returns AWQ's scale of the channels of the input of gate_up or down with the least error, summed over all experts."""
        if not self._reached:
            return None
        total = relative = torch.zeros(())
        for e in self._reached:
            rows, weights = self._input(e, which)
            total = total.to(rows.device) + (rows * weights).abs().sum(dim=0, dtype=torch.float64)
            relative = relative.to(rows.device) + relative_magnitude([self._rotated(e, which)])
        mean = (total / sum(self.inputs.tokens[e] for e in self._reached)).float()
        scales = [None, *candidates(mean, relative / len(self._reached))]
        errors = [0.0] * len(scales)
        for e in self._reached:
            hessian, weight = self._statistics(*self._input(e, which)).hessian, self._rotated(e, which)
            for i, scale in enumerate(scales):
                errors[i] += rounding_error(weight, self.schemes[which], hessian, scale)
        return scales[errors.index(min(errors))]

    def _smoothing(self, e: int, smooth: SmoothQuant) -> dict[int, Tensor]:
        """Returns {e: SmoothQuant's scale of the channels of h} of expert e; empty if no scale is better."""
        rows, _ = self._input(e, 1)
        statistics = self._statistics(rows, torch.ones_like(rows[:, :1]), hessian=False, keep=SAMPLE_ROWS)
        weights = [self._rotated(e, 1)]
        alpha = best_alpha(weights, self.schemes[1], statistics) if smooth.alpha is None else smooth.alpha
        return {} if alpha is None else {e: smoothing_scale(weights, statistics.abs_max, alpha)}
