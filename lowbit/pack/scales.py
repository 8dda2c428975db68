"""Scales and zero points in the order in which the threads of a fragment need them.

In an accumulator or A fragment, thread group g (lanes 4g to 4g + 3) owns rows g and g + 8 of each strip of 16. Stored
row by row, its two scales would be 8 apart; here they are neighbours, so that a thread reads them with one load:

    strips = 1: a warp works on 16 rows    g0: rows 0 8 | g1: rows 1 9 | ... | g7: rows 7 15   then the next strip
    strips = 4: a warp works on 64 rows    g0: rows 0 8 16 24 32 40 48 56 | g1: rows 1 9 17 25 ... | ... | g7

For one group of K and one tile of 64 rows these are 64 neighbouring values, 128 bytes in fp16.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lowbit.hardware.mma import Indices, MmaAtom
from lowbit.pack.fragment import TILE, tiles


@dataclass(frozen=True)
class ScaleOrder:
    """Order of scales [N, G] for the rows of `atom`'s A fragment: packed [N/64, G, 64], N filled up with zeros.

    `strips` is how many A fragments one thread holds along the rows of a tile: 1, 2 or 4 for mma.sync, 1 for wgmma,
    whose four warps share the tile. Raises ValueError for other numbers.
    """

    atom: MmaAtom
    strips: int = 1

    def __post_init__(self) -> None:
        if self.strips not in (1, 2, 4) or self.strips * self.atom.m > TILE:
            raise ValueError(f"{self.strips} fragments of {self.atom} do not divide the {TILE} rows of a tile")

    @property
    def per_thread(self) -> int:
        """Neighbouring values that one thread reads for the rows of its fragments: 2 per strip."""
        return 2 * self.strips

    def rows(self) -> Indices:
        """Row of the tile at each of the 64 places."""
        pairs = _rows_of_thread(self.atom)  # [group of the atom, its rows]
        strip_pairs = (pairs[None] + self.atom.m * np.arange(TILE // self.atom.m)[:, None, None]).reshape(-1, 8, 2)
        # warp, strip of the warp, group, row of the group -> warp, group, strip, row
        by_warp: Indices = strip_pairs.reshape(-1, self.strips, 8, 2).transpose(0, 2, 1, 3)
        return by_warp.reshape(TILE)

    def pack(self, scales: Tensor) -> Tensor:
        """Scales or zero points [N, G] of any type -> [ceil(N / 64), G, 64]."""
        n, groups = scales.shape
        padded = torch.nn.functional.pad(scales, (0, 0, 0, -n % TILE))
        tiled = padded.view(tiles(n), TILE, groups)[:, torch.from_numpy(self.rows()).to(scales.device)]
        return tiled.transpose(1, 2).contiguous()  # row tile, group of K, place

    def unpack(self, packed: Tensor, n: int) -> Tensor:
        """[ceil(n / 64), G, 64] -> [n, G]; the inverse of `pack`. Raises ValueError when n does not fit."""
        if packed.dim() != 3 or packed.shape[0] != tiles(n) or packed.shape[2] != TILE:
            raise ValueError(f"scales of {n} rows are [{tiles(n)}, G, {TILE}], got {list(packed.shape)}")
        place = torch.from_numpy(np.argsort(self.rows())).to(packed.device)
        return packed[..., place].transpose(1, 2).flatten(0, 1)[:n].contiguous()


def _rows_of_thread(atom: MmaAtom) -> Indices:
    """Rows [thread groups, rows] that the lanes 0, 4, 8, ... of the atom hold of A, ascending."""
    row, _ = atom.a.coordinates()
    leaders = row[::4].reshape(atom.threads // 4, -1)
    return np.stack([np.unique(held) for held in leaders])
