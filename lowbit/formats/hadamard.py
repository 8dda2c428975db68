"""Rotation of blocks of channels by a Hadamard matrix H. A layer's input is rotated at run time, its weights before they are
quantized.

x H is computed block by block of B channels. H is Sylvester's matrix of ones and minus ones divided by sqrt(B); it is symmetric
and its own inverse, so x H (w H)^T = x w^T. B is a power of 4, so the elements of H, 1 / sqrt(B), are exact in every dtype. An
outlier in one channel is spread over all channels of its block. Other layers stay as they are. Source of rotating inputs at run
time: S. Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", arXiv:2404.00456, which rotates all channels
at once.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

BLOCKS = (16, 64, 256)
"""Allowed values of B."""


def rotate_blocks(x: Tensor, block: int) -> Tensor:
    """Returns x H in x's dtype [.., K], accumulated in float32 at least and rounded once.

    Raises ValueError for a `block` that is not in `BLOCKS` or does not divide K.
    """
    check_block(block, x.shape[-1])
    return (x.unflatten(-1, (-1, block)) @ _matrix(block, x.dtype, x.device)).flatten(-2)


def check_block(block: int, k: int) -> None:
    """Raises ValueError unless `block` is in `BLOCKS` and divides K."""
    if block not in BLOCKS or k % block:
        raise ValueError(f"inputs are rotated in blocks of {', '.join(map(str, BLOCKS))} that divide K, got {block} for K {k}")


@functools.cache
def _matrix(block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns H [block, block]."""
    with torch.inference_mode(False):  # cached beyond this call
        h = torch.ones(1, 1)
        while len(h) < block:
            h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
        return (h / block**0.5).to(device, dtype)
