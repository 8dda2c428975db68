"""Fragment order: each thread's codes of its A fragments lie next to each other, ready to be loaded into registers.

The order is computed from a row of `hardware.mma`; no permutation is written by hand. A tile is 64 rows x 64 k, held by
128 threads (4 warps of 16 rows: one wgmma warpgroup, or 4 strips of mma.sync). Thread t of a tile owns 32 codes, so a
plane of p bits gives it p words:

    plane of 4 bits    int32 [N/64, K/64, 1, 128, 4]     4 words = one 128-bit load per thread
    plane of 8 bits    int32 [N/64, K/64, 2, 128, 4]     2 vectors of 4 words, each one 128-bit load of the whole warp
    plane of 2 bits    int32 [N/64, K/64, 1, 128, 2]     axes: row tile, k tile, vector, thread, word of the vector
    plane of 1 bit     int32 [N/64, K/64, 1, 128, 1]

A warp reads 32 x 16 neighbouring bytes per load: no bank conflict, no ldmatrix, no shuffle.

Inside a word codes lie as the conversions put out registers. A register of the instruction holds E elements (2 for f16:
k even in the low half, k odd in the high half), so a word holds R = 32 / (p E) registers, and

    element e of register r lies at bit  e * 32/E  +  r * p

One mask thus picks the field of all elements of one register: 0x000f000f for register 0 of a nibble plane, 0x00f000f0
for register 1, 0x00030003 and 0x00010001 in planes of 2 and 1 bits. For f16 A fragments and 4 bits a word is one k
step:

    bit      31..28  27..24  23..20  19..16 | 15..12  11..8   7..4    3..0
    element  odd     odd     odd     odd    | even    even    even    even
    register a3      a2      a1      a0     | a3      a2      a1      a0

    lane 4g + t: a0 is row g, k 2t and 2t + 1 of the step; a1 is 8 rows further down, a2 8 k further on, a3 both

Registers count through the k steps of the tile in order, so a word of 8 bits holds half a step, one of 2 bits two
steps.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from lowbit.hardware.mma import Digit, Fragment, Indices, MmaAtom, merged
from lowbit.pack.bits import WORD_BITS, join_planes, pack_plane, plane_widths, split_planes, unpack_plane
from lowbit.pack.layout import Layout, Shape

TILE = 64
TILE_THREADS = 128
_VECTOR_WORDS = 4  # a 128-bit load


def tiles(extent: int) -> int:
    """Number of tiles of 64 that cover `extent` rows or columns."""
    return -(-extent // TILE)


@dataclass(frozen=True)
class FragmentOrder(Layout):
    """Codes in the order of the A fragments of `atom`, planes int32 [N/64, K/64, vectors, 128, words], see the module.

    N and K are filled up to multiples of 64 with zero codes. `k_run` is the number of consecutive k that a thread owns
    across registers. 0 leaves k where the instruction has it (2 for f16). With k_run = 8 the k of each 32 are dealt
    anew, thread place t of each group of 4 taking k = 8t to 8t + 7, which lets a thread load the B fragments of two
    steps as 16 neighbouring bytes of a row of x; a product does not change when A and B renumber k alike.

    Layouts are equal when their bytes are: mma.sync and wgmma atoms of one operand width give equal layouts. Raises
    ValueError when the atom does not divide the tile or k_run does not suit it.
    """

    atom: MmaAtom = field(compare=False)
    k_run: int = field(default=0, compare=False)
    tile: Fragment = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if TILE % self.atom.m or TILE % self.atom.k:
            raise ValueError(f"{self.atom} does not divide a tile of {TILE} x {TILE}")
        packed = self.atom.a.elements
        runs = tuple(run for run in (packed << i for i in range(8)) if TILE % (4 * run) == 0)
        if self.k_run and self.k_run not in runs:
            raise ValueError(f"k_run of {self.atom} is 0 or one of {runs}, got {self.k_run}")
        object.__setattr__(self, "tile", _deal_k(self.atom.a.tiled(TILE, TILE), self.k_run or packed))

    def __str__(self) -> str:
        return f"FragmentOrder({self.atom}{f', k_run={self.k_run}' if self.k_run else ''})"

    @property
    def plane_dtype(self) -> torch.dtype:
        return torch.int32

    def refusals(self, bits: int, shape: Shape) -> tuple[str, ...]:
        if bits > self.atom.operand_bits:
            return (f"operands of {self.atom} have {self.atom.operand_bits} bits",)
        return ()

    def plane_shapes(self, bits: int, shape: Shape) -> tuple[tuple[int, ...], ...]:
        grid = (tiles(shape[0]), tiles(shape[1]))
        return tuple((*grid, *_vectors(width)) for width in plane_widths(bits))

    def _pack(self, codes: Tensor, bits: int) -> tuple[Tensor, ...]:
        n, k = codes.shape
        padded = torch.nn.functional.pad(codes, (0, -k % TILE, 0, -n % TILE))
        # (n_tile, row), (k_tile, k) -> n_tile, k_tile, (row, k)
        tiled = padded.reshape(tiles(n), TILE, tiles(k), TILE).transpose(1, 2).flatten(2)
        planes = []
        for width, plane in zip(plane_widths(bits), split_planes(tiled, bits), strict=True):
            place = torch.from_numpy(field_places(self, width)).to(codes.device)
            fields = plane[:, :, place]  # n_tile, k_tile, vector, thread, word, field
            planes.append(pack_plane(fields, width).squeeze(-1))
        return tuple(planes)

    def _unpack(self, planes: tuple[Tensor, ...], bits: int, shape: Shape) -> Tensor:
        tiled = []
        for width, plane in zip(plane_widths(bits), planes, strict=True):
            fields = unpack_plane(plane.unsqueeze(-1), width, WORD_BITS // width).flatten(2)
            inverse = np.argsort(field_places(self, width), axis=None)
            tiled.append(fields[..., torch.from_numpy(inverse).to(plane.device)])
        codes = join_planes(tuple(tiled), bits).view(tiles(shape[0]), tiles(shape[1]), TILE, TILE)
        # n_tile, k_tile, row, k -> (n_tile, row), (k_tile, k)
        whole = codes.transpose(1, 2).reshape(tiles(shape[0]) * TILE, tiles(shape[1]) * TILE)
        return whole[: shape[0], : shape[1]].contiguous()


def _vectors(width: int) -> tuple[int, int, int]:
    """(vectors, threads, words) of a tile's plane of `width` bits; a thread has `width` words."""
    words = min(width, _VECTOR_WORDS)
    return width // words, TILE_THREADS, words


def _deal_k(tile: Fragment, run: int) -> Fragment:
    """The A fragment `tile` with k renumbered so that each of the 4 places of a group owns `run` consecutive k.

    The instruction deals k to the places `elements` at a time and goes round them again for the next registers; here
    the first turns of a place continue its own k, and only after `run` of them comes the next place.
    """
    packed = tile.elements
    renumbered = {
        Digit(4, "col", packed): (Digit(4, "col", run),),
        Digit(TILE // (4 * packed), "col", 4 * packed): (
            Digit(run // packed, "col", packed),
            Digit(TILE // (4 * run), "col", 4 * run),
        ),
    }

    def renumber(digits: tuple[Digit, ...]) -> tuple[Digit, ...]:
        return merged(tuple(new for digit in digits for new in renumbered.get(digit, (digit,))))

    return replace(tile, thread=renumber(tile.thread), register=renumber(tile.register))


@functools.cache
def field_places(layout: FragmentOrder, width: int) -> Indices:
    """Where each field of a plane comes from: [vectors, 128, words, 32 / width] of row * 64 + k within the tile."""
    row, k = layout.tile.coordinates()  # [thread, register, element]
    vectors, threads, words = _vectors(width)
    elements = layout.tile.elements
    registers_per_word = WORD_BITS // (width * elements)
    place = (row * TILE + k).reshape(threads, vectors, words, registers_per_word, elements)
    # thread, vector, word, register, element -> vector, thread, word, element, register: fields of one register then lie
    # 32 / elements bits apart.
    ordered: Indices = place.transpose(1, 0, 2, 4, 3)
    return ordered.reshape(vectors, threads, words, WORD_BITS // width)
