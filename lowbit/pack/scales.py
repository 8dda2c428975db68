"""Scales and zero points in the order in which the lanes of a fragment need them.

In an accumulator or A fragment, lane group g (lanes 4g to 4g + 3) holds rows g and g + 8 of each row block of 16. Stored row by
row, the scales of these rows would be 8 apart; here they are neighbours, so that fp16 or bf16 scales are one 32-bit load:

    packed [N/16, G, 16], the 16 of one row block and one group of K:   rows 0 8 | 1 9 | 2 10 | ... | 7 15
                                                          lane group   g0    g1    g2   ...     g7

The groups along K of a row block are contiguous, like its codes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lowbit.hardware.mma import MMA_M16N8K16_F16, Indices
from lowbit.pack.fragment import ROW_BLOCK, row_blocks


def scale_rows() -> Indices:
    """Returns the row, within its row block, at each of the 16 positions: for lanes 0, 4, 8, ... in order, the rows of A that
    the lane holds."""
    row, _ = MMA_M16N8K16_F16.a.coordinates()
    leaders = row[::4].reshape(8, -1)
    order: Indices = np.concatenate([np.unique(held) for held in leaders])
    return order


def pack_scales(scales: Tensor) -> Tensor:
    """Converts scales or zero points [N, G] of any type to [ceil(N / 16), G, 16], padding N with zeros."""
    n, groups = scales.shape
    padded = torch.nn.functional.pad(scales, (0, 0, 0, -n % ROW_BLOCK))
    by_row_block = padded.view(row_blocks(n), ROW_BLOCK, groups)[:, torch.from_numpy(scale_rows()).to(scales.device)]
    return by_row_block.transpose(1, 2).contiguous()  # row block, group of K, place


def unpack_scales(packed: Tensor, n: int) -> Tensor:
    """Converts [ceil(n / 16), G, 16] to [n, G]; the inverse of `pack_scales`. Raises ValueError if n does not fit."""
    if packed.dim() != 3 or packed.shape[0] != row_blocks(n) or packed.shape[2] != ROW_BLOCK:
        raise ValueError(f"scales of {n} rows are [{row_blocks(n)}, G, {ROW_BLOCK}], got {list(packed.shape)}")
    place = torch.from_numpy(np.argsort(scale_rows())).to(packed.device)
    return packed[..., place].transpose(1, 2).flatten(0, 1)[:n].contiguous()
