"""Learned rounding: an offset per weight and a clip factor per end of a scale's range, trained by gradient descent.

A weight w becomes s Q(w / s + v). Q rounds to the nearest value of the format. s is the scale, computed from a range of weights
that the clip factors reduce. v is the offset, at most half the distance between neighbouring values of the format at w / s.
Rounding has a straight-through gradient, saturation has gradient zero. Source: W. Cheng et al., "Optimize Weight Rounding via
Signed Gradient Descent for the Quantization of LLMs", arXiv:2309.05516. `models.learn` has the training loop.

With 2 or 3 bits, a scale that covers the largest weight rounds most others to zero. With so few bits, training therefore starts
from the scales with the least squared error, weighted by the squares of the inputs, and factors may also exceed 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit.formats import IntFormat, NumberFormat, QuantTensor, Scheme, ZeroPoint, encode, scale_shape
from lowbit.quantize.rtn import check_weight, cover, scale_dtype, uncover

FACTORS = (0.1, 1.0)
"""Bounds of the clip factors. An upper bound of 1.2 is no better (docs/internals/quantization.md)."""

FITTED_FACTORS = (0.1, 2.0)
"""Bounds of the factors of scales that start at the least squared error."""

FEW_BITS = 3
"""Formats of at most this many bits start at the least squared error (docs/log/quantization.md, 2026-11-28)."""

RANGES = tuple(0.3 + 0.025 * i for i in range(41))
"""The search for the least squared error tries these multiples of the range."""

WEIGHTS_AT_ONCE = 1 << 22
"""Weights whose ranges are searched at a time."""

BETAS = (0.9, 0.98)
"""Betas of Adam. With the first three layers of SmolLM2-135M in w4a16_g64 and 100 iterations of 8 sequences, the mean
divergence on 4 windows of Opticks was 0.0131; with sign descent at a rate of 1, as in the paper, 0.0149, with signs of a
momentum of 0.9 0.0143 (a Xeon, 2026-11-23)."""

RATES = (2.0, 0.25)
"""Initial learning rates of Adam, times the iterations; each decays linearly to 0, so that an offset can move from 0 to 0.5 and
back. With 1 the divergence above was 0.0136; with clip factors at 2^-bits of the offsets' rate, 0.0206.

The second rate is for layers that the first leaves worse than rounding to nearest. Adam's first step has equal size for all
offsets of a row, which adds up for rotated inputs, where no channel is small. In 40 iterations the first layer of a rotated
SmolLM2-135M went from a relative error of 0.0092 to 5.8 in one step of the first rate and ended worse than it started; with the
second rate it ended at 0.0042 (2026-11-23)."""

FEW_ITERATIONS = 100
"""Iterations below which signs of gradients take the place of Adam. With the first two layers of SmolLM2-135M and 50 iterations
of 4 sequences of 256 tokens, signs left 0.66 to 0.74 of Adam's divergence on Opticks with 2, 3 and 4 bits. With the first
layer, 2 bits and 100 iterations of 8 sequences of 512 tokens, Adam left 0.95 of that of signs (2026-11-28,
docs/log/quantization.md)."""

RATE_OF_SIGNS = 0.5
"""Rate of sign descent relative to Adam's. With the first of RATES an offset can move by 0.5 in total, as in the paper."""


class LearnedRounding:
    """The trainable rounding of `weight` [N, K] by `scheme`; it starts as rounding to nearest.

    offset: float32, -0.5 to 0.5 per weight, initially 0. factors: float32 [1, S], or [2, S] for both ends of the range with
    zero points, for each of the S scales; initially 1, bounded by FACTORS. importance: [K], nonnegative, the mean squares of
    the input channels. With it, formats of at most FEW_BITS bits start at the range with the least squared error, weighted by
    `importance`, and factors are bounded by FITTED_FACTORS. stored, scale_type: as for `rtn`. Raises ValueError for weights
    that are no matrix of finite numbers.

    Without zero points, the largest weight of a scale maps to the code of largest magnitude. For integers that is the lowest
    code, so scales are negative where that weight is positive, and all codes are used.
    """

    def __init__(
        self, weight: Tensor, scheme: Scheme, stored: torch.dtype | None = None, scale_type: torch.dtype | None = None,
        importance: Tensor | None = None,
    ) -> None:  # fmt: skip
        check_weight(weight, "learned")
        self.scheme, self.shape = scheme, (weight.shape[0], weight.shape[1])
        self._dtype = scale_type or scale_dtype(scheme, weight, stored)
        self._weight = cover(weight.detach().float(), scheme, self.shape).contiguous()
        low, high = self._weight.aminmax(dim=1)
        if scheme.zero is ZeroPoint.NONE:
            self._ends = _extreme(low, high, scheme)[None]
        else:
            both = (low.clamp(max=0), high.clamp(min=0)) if scheme.zero is ZeroPoint.INTEGER else (low, high)
            self._ends = torch.stack(both)
        fitted = importance is not None and scheme.weight.bits <= FEW_BITS
        self._bounds = FITTED_FACTORS if fitted else FACTORS
        if fitted:
            self._fit(importance)  # type: ignore[arg-type]
        self.offset = torch.zeros_like(self._weight).requires_grad_()
        self.factors = torch.ones_like(self._ends).requires_grad_()

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the rounded weight [N, K], differentiable."""
        scale, zero = self._grid()
        rounded: Tensor = _RoundWeight.apply(self._weight, self.offset, scale, zero, self.scheme, dtype)  # type: ignore[no-untyped-call]
        return uncover(rounded, self.scheme, self.shape)

    @property
    def parameters(self) -> list[Tensor]:
        """The trainable tensors, for an optimizer of torch."""
        return [self.offset, self.factors]

    @torch.no_grad()
    def reset(self) -> None:
        """Resets to rounding to nearest."""
        self.offset.zero_()
        self.factors.fill_(1.0)

    @torch.no_grad()
    def clamp(self) -> None:
        """Clamps offsets and factors to their bounds."""
        self.offset.clamp_(-0.5, 0.5)
        self.factors.clamp_(*self._bounds)

    @torch.no_grad()
    def quantized(self) -> QuantTensor:
        """Returns the codes, scales and zeros of `dense`."""
        scale, zero = self._grid()
        values, _ = _rounded_values(self._weight, self.offset, scale, zero, self.scheme)
        codes = uncover(encode(values, self.scheme.weight), self.scheme, self.shape)
        grid = scale_shape(self.scheme.granularity, self.shape)
        if zero is not None:
            zero = zero.to(torch.uint8 if self.scheme.zero is ZeroPoint.INTEGER else self._dtype).reshape(grid)
        return QuantTensor(codes, scale.to(self._dtype).reshape(grid), zero, self.scheme)

    @torch.no_grad()
    def _fit(self, importance: Tensor) -> None:
        """Sets the ends of the ranges to the multiples in RANGES with the least squared error of rounding to nearest.

        Without zero points, either end of the range may be the code of largest magnitude, so both signs are tried.
        """
        # 1e-6 keeps a channel whose inputs were all zero in the sum, because it may matter on another text.
        importance = importance.float() / importance.float().mean().clamp(min=1e-30) + 1e-6
        metric = cover(importance.expand(self.shape), self.scheme, self.shape)
        signs = (1.0, -1.0) if self.scheme.zero is ZeroPoint.NONE and isinstance(self.scheme.weight, IntFormat) else (1.0,)
        step = max(1, WEIGHTS_AT_ONCE // self._weight.shape[1])
        parts = zip(self._weight.split(step), metric.split(step), self._ends.split(step, dim=1), strict=True)
        for w, own, ends in parts:
            least = torch.full_like(ends[0], torch.inf)
            best = ends.clone()
            for factor in (sign * size for sign in signs for size in RANGES):
                scale, zero = self._grid(ends * factor)
                q, _ = _rounded_values(w, torch.zeros((), device=w.device), scale, zero, self.scheme)
                error = (_dequantized(q, scale, zero, self.scheme) - w).square_().mul_(own).sum(dim=1)
                best = torch.where(error < least, ends * factor, best)
                least = torch.minimum(error, least)
            ends.copy_(best)

    def _grid(self, ends: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns scale and zero [S], float32, rounded to their stored dtype. `ends` of ranges: None takes the clipped ones."""
        fmt, ends = self.scheme.weight, self._ends * self.factors if ends is None else ends
        if self.scheme.zero is ZeroPoint.NONE:
            return self._stored(ends[0] / _largest(fmt)), None
        low, high = ends
        scale = self._stored((high - low) / fmt.max)
        if self.scheme.zero is ZeroPoint.INTEGER:
            return scale, _straight_through(-low / scale, lambda z: z.round().clamp(0, fmt.max))
        return scale, _straight_through(low, lambda z: z.to(self._dtype).float())

    def _stored(self, scale: Tensor) -> Tensor:
        """Returns the scale rounded to its stored dtype, never zero."""
        smallest = torch.finfo(self._dtype).smallest_normal * torch.finfo(self._dtype).eps

        def stored(s: Tensor) -> Tensor:
            return torch.where(s == 0, 1.0, s.abs().clamp(min=smallest).copysign(s)).to(self._dtype).float()

        return _straight_through(scale, stored)


class Descent:
    """Moves trainable roundings against their gradients: by Adam, or by the signs of the gradients in few `iterations`."""

    def __init__(self, roundings: Sequence[LearnedRounding], iterations: int) -> None:
        self._roundings = roundings
        self.parameters = [p for rounding in roundings for p in rounding.parameters]
        device = self.parameters[0].device
        self._rate: Tensor | float = torch.zeros((), device=device) if device.type == "cuda" else 0.0
        self._adam = None
        if iterations >= FEW_ITERATIONS:
            self._adam = torch.optim.Adam(
                self.parameters, lr=self._rate, betas=BETAS, eps=1e-12, fused=True, capturable=device.type == "cuda"
            )

    def set_rate(self, rate: float) -> None:
        """Sets the learning rate, in units of Adam's. On a GPU it is a tensor, which a CUDA graph reads at each replay."""
        if isinstance(self._rate, Tensor):
            self._rate.fill_(rate)
            return
        self._rate = rate
        if self._adam is not None:
            self._adam.param_groups[0]["lr"] = rate

    @torch.no_grad()
    def step(self) -> None:
        """Changes the parameters by their gradients, which are then None, and clamps them to their bounds."""
        if self._adam is not None:
            self._adam.step()
        else:
            moves = torch._foreach_sign([p.grad for p in self.parameters])  # type: ignore[misc]
            torch._foreach_mul_(moves, self._rate * RATE_OF_SIGNS)
            torch._foreach_sub_(self.parameters, moves)
        self.forget()
        for rounding in self._roundings:
            rounding.clamp()

    def forget(self) -> None:
        """Drops the gradients."""
        for p in self.parameters:
            p.grad = None


def _extreme(low: Tensor, high: Tensor, scheme: Scheme) -> Tensor:
    """Returns the weight that maps to the code of largest magnitude, for weights between `low` and `high`."""
    if isinstance(scheme.weight, IntFormat):
        return torch.where(-low > high, low, high)
    return torch.maximum(-low, high)


def _largest(fmt: NumberFormat) -> float:
    return fmt.min if isinstance(fmt, IntFormat) else fmt.max


def _straight_through(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns function(x) with the gradient of x (straight-through)."""
    with torch.no_grad():
        value = function(x)
    return x + (value - x).detach()


def _rounded_values(w: Tensor, offset: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Returns values of the format, float32 [S, E], before scale and zero, and a mask of those that did not saturate."""
    fmt = scheme.weight
    s = scale[:, None]
    u = w / s if zero is None or scheme.zero is ZeroPoint.INTEGER else (w - zero[:, None]) / s
    if isinstance(fmt, IntFormat):
        rounded = u.add_(offset).round_()
        if scheme.zero is ZeroPoint.INTEGER:
            assert zero is not None
            rounded.add_(zero[:, None])
    else:
        moved = u + offset * _spacing(u, fmt)
        step = _spacing(moved, fmt)
        rounded = (moved / step).round_().mul_(step)
    values = rounded.clamp(fmt.min, fmt.max)
    return values, values == rounded


def _dequantized(q: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme) -> Tensor:
    """Returns the weights of values q [S, E] of the format; overwrites q."""
    if zero is None:
        return q.mul_(scale[:, None])
    if scheme.zero is ZeroPoint.INTEGER:
        return q.sub_(zero[:, None]).mul_(scale[:, None])
    return q.mul_(scale[:, None]).add_(zero[:, None])


def _spacing(u: Tensor, fmt: Any) -> Tensor:
    """Returns the distance between neighbouring values of a float format around u, a power of two."""
    exponent = ((u.abs().view(torch.int32) >> 23) - 127).clamp(1 - fmt.bias, (1 << fmt.exponent) - 1 - fmt.bias)
    return ((exponent - fmt.mantissa + 127) << 23).view(torch.float32)


class _RoundWeight(torch.autograd.Function):
    """Rounds w [S, E]; gradients of offset [S, E], scale [S] and zero [S].

    Let q be the value of the format, u = w / s, and c = 1 if q did not saturate, else 0. The weight s q has the derivative s c
    by the offset v (times the spacing of values), and q - c u by the scale s. With integer zeros z, the weight s (q - z) has
    the derivative s (c - 1) by z. With floating-point zeros, the weight s q + z has the derivative 1 - c by z.
    """

    @staticmethod
    def forward(
        ctx: Any, w: Tensor, offset: Tensor, scale: Tensor, zero: Tensor | None, scheme: Scheme, dtype: torch.dtype
    ) -> Tensor:
        q, inside = _rounded_values(w, offset, scale, zero, scheme)
        s = scale[:, None]
        z = None if zero is None else zero[:, None]
        floating = scheme.zero is ZeroPoint.FLOAT
        if z is not None and not floating:
            q = q.sub_(z)
        weight = torch.addcmul(z, q, s) if floating else q * s  # type: ignore[arg-type]
        u = ((w - z) if floating else w) / s  # type: ignore[operator]
        unit = None if isinstance(scheme.weight, IntFormat) else _spacing(u, scheme.weight)
        ctx.save_for_backward(q.addcmul_(u, inside, value=-1), inside, scale, unit)
        ctx.zero = scheme.zero
        return weight.to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        by_scale, inside, scale, unit = ctx.saved_tensors
        g = gradients[0].float()
        of_scale = (g * by_scale).sum(dim=1)
        of_offset = (g * inside).mul_(scale[:, None])
        of_zero = None
        if ctx.zero is ZeroPoint.INTEGER:
            of_zero = of_offset.sum(dim=1) - g.sum(dim=1) * scale
        elif ctx.zero is ZeroPoint.FLOAT:
            of_zero = g.sum(dim=1) - (g * inside).sum(dim=1)
        if unit is not None:
            of_offset.mul_(unit)
        return None, of_offset, of_scale, of_zero, None, None
