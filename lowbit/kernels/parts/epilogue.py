"""The epilogue of a GEMM in a decode step as data: scales and bias, then norm, gate or residual.

The epilogue replaces separate kernels, so a decode step has fewer of them:

    norm      x is h * gamma * x_factor, not yet divided by its RMS. The kernel that wrote h also wrote partial sums of squares
              of its rows, `squares` [parts, M]. The epilogue adds them up and multiplies y by 1 / (rms * x_factor)
    gate      y = act(gate) * up, or gpt-oss's clamped SwiGLU, (up + 1) * gate * sigmoid(1.702 gate). Of each 16 rows of w the
              first 8 are gate rows, the others the up rows that they gate (pack/gated.py), so both sums are in the same lane
    residual  h += y in place; then x of the next norm, h * gamma * x_factor, and the sum of squares of this block's rows of h

gamma is applied where channels are known and 1 / rms where the whole row is known, so the main loop needs neither. All sums
have a fixed order: same input, same bits. The small-M kernel works thread by thread (small_m_epilogue.py), the large-M kernels
on whole tiles (large_m_epilogue.py). Formula of gelu's tanh: Hendrycks and Gimpel, arXiv 1606.08415.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lowbit.hardware.half import HalfType
from lowbit.kernels.parts.gluon import gl, gluon
from lowbit.kernels.parts.lora_epilogue import LoraTerms

Gate = Literal["none", "silu", "gelu_tanh", "clamped_swiglu"]

CLAMP = gl.constexpr(7.0)
"""Limit of gate and up in "clamped_swiglu" (gpt-oss: `limit` of its experts in Transformers, `alpha` is 1.702)."""


@dataclass(frozen=True)
class Epilogue:
    """What is applied to the sums of a GEMM: `channel_scale`, then the norm, then `bias`, then the gate or the residual.

    `norm_parts`: partial sums of squares per token, of which the norm computes its RMS; 0: no norm. `h_type`: type of the
    residual h that y is added to; None: no residual. The residual excludes norm and gate (ValueError). `bias_of_tokens`: the
    bias is [M, N], written by an earlier kernel, instead of [N]. `lora`: what adapters add after the bias; None: nothing.
    """

    channel_scale: bool
    bias: bool
    norm_parts: int = 0
    gate: Gate = "none"
    h_type: HalfType | None = None
    bias_of_tokens: bool = False
    lora: LoraTerms | None = None

    def __post_init__(self) -> None:
        if self.residual and (self.norm_parts or self.gate != "none"):
            raise ValueError("an epilogue with a residual has no norm and no gate")

    @property
    def residual(self) -> bool:
        """True if y is added to h."""
        return self.h_type is not None

    @property
    def plain(self) -> bool:
        """True if nothing but scales and a bias of channels is applied."""
        return not (self.residual or self.norm_parts or self.gate != "none" or self.bias_of_tokens or self.lora)


@gluon.jit
def activated(gate, C: gl.constexpr):
    """Returns act(gate). silu(g) = g / (1 + exp(-g)); gelu (tanh formula) = g / (1 + exp(-2 u)), u = sqrt(2 / pi) (g + 0.044715
    g^3).

    1 / a is computed as the square of rsqrt(a). rsqrt is one instruction, a division ten; the relative error is at most 2^-21.
    """
    if C.epilogue.gate == "silu":
        power = -gate
    else:
        power = -1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
    root = gl.rsqrt(1.0 + gl.exp(power))
    return gate * (root * root)


@gluon.jit
def gate_times_up(gate, up, C: gl.constexpr):
    """Returns act(gate) * up. For "clamped_swiglu" gate is clamped to at most 7 and up to [-7, 7], then 1 is added to up. NaN
    stays NaN."""
    if C.epilogue.gate == "clamped_swiglu":
        gate = gl.where(gate > CLAMP, CLAMP, gate)
        up = gl.where(up > CLAMP, CLAMP, gl.where(up < -CLAMP, -CLAMP, up))
        root = gl.rsqrt(1.0 + gl.exp(-1.702 * gate))
        return (up + 1.0) * (gate * (root * root))
    else:
        return activated(gate, C) * up
