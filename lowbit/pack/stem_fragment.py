"""Weights of a stem for the wgmma kernel with a fused max-pool, which keeps them as operand A in registers (sm90/stem_pool.py).

A thread's 16 bytes are its four registers of operand A of an int8 wgmma with 64 rows (hardware/mma.py). They are bytes 4 q to 4
q + 3 and 16 + 4 q to 16 + 4 q + 3 (q = lane % 4) of rows g and g + 8 (g = lane / 4) of its warp's 16 rows. These two rows are
assigned to the neighbouring channels 2 g and 2 g + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as functional
from torch import Tensor

from lowbit.pack.conv_layout import ConvLayout, Shape, filled_up
from lowbit.pack.nhwc64 import padded_channels
from lowbit.pack.stem import StemImages

STEP_BYTES = 32
"""Bytes of K of one int8 wgmma."""


@dataclass(frozen=True)
class StemFragments(ConvLayout):
    """int8 [tiles of 64 outputs, steps of 32 bytes, 128 threads, 16]; channels added as padding have weight 0."""

    images: StemImages

    def refusals(self, shape: Shape) -> tuple[str, ...]:
        return self.images.refusals()

    def arrange(self, weight: Tensor) -> Tensor:
        full = filled_up(self.images.arrange(weight))[..., 0]
        o64, size, rows = full.shape
        steps = size // STEP_BYTES
        full = full.reshape(o64 // 64, 4, 8, 2, steps, 2, 4, 4, rows)  # tile, warp, g, row of the two, step, half, q, byte, row
        full = full.permute(0, 8, 4, 1, 2, 6, 5, 3, 7)  # tile, row, step, warp, g, q, half, row of the two, byte
        return full.reshape(o64 // 64, rows * steps, 128, 16).contiguous()

    def constants(self, values: Tensor) -> Tensor:
        """Returns the constants in the order of the outputs."""
        return functional.pad(values, (0, padded_channels(values.shape[0]) - values.shape[0]))
