"""Blocks of channels times a Hadamard matrix: what a layer may do with its input before anything else, and with its weights.

x H is computed block by block of B channels; H is Sylvester's matrix of ones and minus ones divided by sqrt(B), symmetric and
its own inverse, so that x H (w H)^T = x w^T. B is a power of 4: the numbers of H, 1 / sqrt(B), are then exact in every type.
What lies in one channel of a block lies in all of them then, whatever the model: nothing has to be folded into other layers.
Source of rotating inputs at run time: S. Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs",
arXiv:2404.00456, which rotates all channels at once.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

BLOCKS = (16, 64, 256)
"""What B may be."""


def rotate_blocks(x: Tensor, block: int) -> Tensor:
    """x H, of x's type [.., K]: rounded once to it, from sums in float32 at least. Raises ValueError for a `block` that is not
    in `BLOCKS` or does not divide K."""
    check_block(block, x.shape[-1])
    return (x.unflatten(-1, (-1, block)) @ _matrix(block, x.dtype, x.device)).flatten(-2)


def check_block(block: int, k: int) -> None:
    """Raises ValueError unless K channels are whole blocks that have a matrix."""
    if block not in BLOCKS or k % block:
        raise ValueError(f"inputs are rotated in blocks of {', '.join(map(str, BLOCKS))} that divide K, got {block} for K {k}")


@functools.cache
def _matrix(block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """H."""
    with torch.inference_mode(False):  # it outlives the call that makes it
        h = torch.ones(1, 1)
        while len(h) < block:
            h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
        return (h / block**0.5).to(device, dtype)
