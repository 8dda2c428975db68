"""What follows a product in a decode step and is done at its end, by the kernel that makes it: norm, gate, residual.

A step of a decoder needs few kernels where each product does at its end what would be a kernel of its own:

    norm      x is h * gamma * x_factor, not yet divided by its rms. Who made it left sums of squares of h, some for each of its
              blocks, `squares` [parts, M]; the product adds them up, and y is multiplied by 1 / (rms * x_factor)
    gate      y = act(gate) * up: of each strip of 16 rows the first 8 are gates, the others what they gate (pack/gated.py), so
              that both sums of a pair are in one lane, whatever the tile
    residual  h += y in place, then x of the next norm, h * gamma * x_factor, and the sum of squares of this block's rows of h

gamma belongs to channels and goes to who knows its channels, 1 / rms to who knows the whole row: the main loop knows neither.
All sums in a fixed order: same input, same bits. The ring kernel does it thread by thread (ring_end.py), the wgmma kernel by
whole tiles (tile_end.py). Formula of gelu's tanh: Hendrycks and Gimpel, arXiv 1606.08415.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lowbit.kernels.parts.gluon import gl, gluon

Gate = Literal["none", "silu", "gelu_tanh"]


@dataclass(frozen=True)
class End:
    """What becomes of the sums of a product: times `channel_scale`, times 1 / rms, plus `bias`, then gated or added to h.

    `parts` sums of squares per token make its rms; 0: no norm. The residual excludes both norm and gate.
    """

    channel_scale: bool
    bias: bool
    parts: int = 0
    gate: Gate = "none"
    residual: bool = False

    def __post_init__(self) -> None:
        if self.residual and (self.parts or self.gate != "none"):
            raise ValueError("a product that adds to h has no norm and no gate")

    @property
    def plain(self) -> bool:
        """Whether nothing but scale and bias is applied."""
        return not (self.residual or self.parts or self.gate != "none")


@gluon.jit
def activated(gate, C: gl.constexpr):
    """act(gate): silu(g) = g / (1 + exp(-g)); gelu with tanh is g / (1 + exp(-2 u)), u = sqrt(2 / pi) (g + 0.044715 g^3)."""
    if C.end.gate == "silu":
        return gate / (1.0 + gl.exp(-gate))
    else:
        return gate / (1.0 + gl.exp(-1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)))
