"""Fragment order: the codes of a thread's A fragments are contiguous, so that it loads them straight into registers.

The order is computed from a row of `hardware.mma`; no permutation is written by hand. A row block is 16 rows (m16), the part of
operand A that one warp holds. An mma.sync reads one row block; a wgmma reads four, one for each warp of its warpgroup. A tile
is a row block x 64 columns of K, held by 32 lanes. Each lane holds 32 codes of a tile, which take as many words as a code has
bits. The words are stored in groups of at most 4 (6 = 4 + 2, 5 = 4 + 1, 3 = 2 + 1), so that every load is aligned and a warp
reads neighbouring bytes:

    int32 [N/16, K/64, 32 * bits]; the words of one tile, 6 bits:  lane 0: 4 words | lane 1: 4 words | ... | lane 31: 4 words
                                                                   lane 0: 2 words | lane 1: 2 words | ... | lane 31: 2 words

Loads need neither ldmatrix nor shuffles and have no bank conflicts. All of K of a row block is contiguous: a warp reads one
stream along K, and the stride between row blocks is constant.

Within a word, `hardware.fields` orders the codes: for 16-bit operands a register has one code in each half of a word, so that
one mask extracts both. For f16 A fragments and 4 bits a word is one k16 step:

    bit      31..28  27..24  23..20  19..16 | 15..12  11..8   7..4    3..0
    element  odd     odd     odd     odd    | even    even    even    even
    register a3      a2      a1      a0     | a3      a2      a1      a0

    lane 4g + t, t < 4: a0 is row g, columns 2t and 2t + 1 of the step; a1 is 8 rows further down, a2 8 columns further, a3 both

Registers are numbered through the k steps of the tile in order. Codes of 3, 5, 6 or 7 bits are spread over several words of a
tile.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowbit.formats import FloatFormat, NumberFormat
from lowbit.hardware.fields import WORD_BITS, WORD_GROUPS, FieldOrder, field_order
from lowbit.hardware.mma import Fragment, MmaAtom, a_fragment
from lowbit.pack.layout import Layout, Shape

ROW_BLOCK = 16
TILE_K = 64
LANES = 32

CODES_AT_ONCE = 1 << 22
"""Number of codes that are rearranged at a time. Temporary tensors take up to 9 bytes per code: 40 MB for a matrix of any
size."""

TIMES_ON_GPU = 4
"""On a GPU, this many times more codes are rearranged at a time (150 MB), since each chunk takes about 25 launches. 28672 x
8192 codes of 4 bits then take 5.0 ms instead of 19.9 (H200, 2026-11-23)."""


def row_blocks(n: int) -> int:
    """Returns the number of row blocks of 16 rows that cover `n` rows."""
    return -(-n // ROW_BLOCK)


def k_tiles(k: int) -> int:
    """Returns the number of 64-column tiles that cover `k` columns."""
    return -(-k // TILE_K)


@dataclass(frozen=True)
class FragmentOrder(Layout):
    """Codes in the order of the A fragments of `atom`: one plane int32 [N/16, K/64, 32 * bits], see the module docstring.

    `format`: a float format, since the bit order within words depends on it; None for any integer format. N is padded to a
    multiple of 16 and K to a multiple of 64, with zero codes. Layouts compare equal if their bytes are equal: mma.sync and
    wgmma atoms of the same operand width give equal layouts.
    """

    atom: MmaAtom = field(compare=False)
    format: NumberFormat | None = None
    tile: Fragment = field(init=False, repr=False)

    def __post_init__(self) -> None:
        warp = a_fragment(ROW_BLOCK, self.atom.k, self.atom.operand_bits)
        object.__setattr__(self, "tile", warp.tiled(ROW_BLOCK, TILE_K))
        if not isinstance(self.format, FloatFormat):
            object.__setattr__(self, "format", None)

    def __str__(self) -> str:
        return f"FragmentOrder({self.atom}{f', {self.format.name}' if self.format else ''})"

    @property
    def plane_dtype(self) -> torch.dtype:
        return torch.int32

    def fields(self, bits: int) -> FieldOrder:
        """Returns the order of the codes in the words of a lane."""
        return field_order(self.format or bits, self.atom.operand_bits)

    def refusals(self, bits: int, shape: Shape) -> tuple[str, ...]:
        if bits > self.atom.operand_bits:
            return (f"operands of {self.atom} have {self.atom.operand_bits} bits",)
        if self.format and bits != self.format.bits:
            return (f"codes of {self.format.name} have {self.format.bits} bits",)
        return ()

    def plane_shapes(self, bits: int, shape: Shape) -> tuple[tuple[int, ...], ...]:
        return ((row_blocks(shape[0]), k_tiles(shape[1]), LANES * bits),)

    def _pack(self, codes: Tensor, bits: int) -> tuple[Tensor, ...]:
        n, k = codes.shape
        (shape,) = self.plane_shapes(bits, (n, k))
        plane = torch.empty(shape, dtype=torch.int32, device=codes.device)
        step = row_blocks_at_once(k, codes.device)
        for part, target in zip(codes.split(step * ROW_BLOCK), plane.split(step), strict=True):
            self._pack_row_blocks(part, bits, target)
        return (plane,)

    def _pack_row_blocks(self, codes: Tensor, bits: int, plane: Tensor) -> None:
        """Writes the plane of some row blocks."""
        n, k = codes.shape
        whole = n % ROW_BLOCK == 0 and k % TILE_K == 0
        padded = codes if whole else torch.nn.functional.pad(codes, (0, -k % TILE_K, 0, -n % ROW_BLOCK))
        # (row block, row), (k_tile, k) -> row block, k_tile, (row, k)
        tiled = padded.reshape(row_blocks(n), ROW_BLOCK, k_tiles(k), TILE_K).transpose(1, 2).flatten(2).contiguous()
        source, moves = _moves(self, bits, codes.device)
        window, elements = self.fields(bits).window, self.tile.elements
        # The elements of a register are neighbours along k: they are moved together, then placed `window` bits apart.
        together = tiled.view(_OF_ELEMENTS[elements])[:, :, source]  # row block, k_tile, lane, run, register
        held = together.unsqueeze(-1).view(torch.uint8)
        registers = held[..., 0].to(torch.int32)
        for element in range(1, elements):
            registers.add_(held[..., element], alpha=1 << (element * window))
        words = torch.zeros(*registers.shape[:4], self.fields(bits).words, dtype=torch.int32, device=codes.device)
        for register, word, shift, mask in moves:
            part = registers[..., register]
            if mask != (1 << bits) - 1:
                part = part & _repeated(mask, elements, window)
            if shift >= 0:  # the bits are still 0, so they can be added: one launch, where a shift and an "or" would be two
                words[..., word].add_(part, alpha=1 << shift)
            else:
                words[..., word].bitwise_or_(part >> -shift)
        plane[..., word_places(bits, codes.device).flatten()] = words.flatten(2)

    def _unpack(self, planes: tuple[Tensor, ...], bits: int, shape: Shape) -> Tensor:
        codes = torch.empty(shape, dtype=torch.uint8, device=planes[0].device)
        step = row_blocks_at_once(shape[1], codes.device)
        for part, target in zip(planes[0].split(step), codes.split(step * ROW_BLOCK), strict=True):
            target.copy_(self._unpacked(part, bits, (target.shape[0], shape[1])))
        return codes

    def _unpacked(self, plane: Tensor, bits: int, shape: Shape) -> Tensor:
        """Returns the codes of some row blocks."""
        words = plane[..., word_places(bits, plane.device)]  # row block, k_tile, lane, word
        source, moves = _moves(self, bits, plane.device)
        words = words.unflatten(-1, (-1, self.fields(bits).words))  # row block, k_tile, lane, run, word
        window, elements = self.fields(bits).window, self.tile.elements
        held = torch.zeros(*words.shape[:2], *source.shape, elements, dtype=torch.uint8, device=words.device)
        for register, word, shift, mask in moves:
            for element in range(elements):
                part = _shifted(words[..., word], -shift - element * window)
                held[..., register, element] |= (part & mask).to(torch.uint8)
        codes = torch.empty(*words.shape[:2], ROW_BLOCK * TILE_K, dtype=torch.uint8, device=words.device)
        codes.view(_OF_ELEMENTS[elements])[:, :, source.flatten()] = held.flatten(2).view(_OF_ELEMENTS[elements])
        # row block, k_tile, row, k -> (row block, row), (k_tile, k)
        tiled = codes.view(row_blocks(shape[0]), k_tiles(shape[1]), ROW_BLOCK, TILE_K).transpose(1, 2)
        whole = tiled.reshape(row_blocks(shape[0]) * ROW_BLOCK, k_tiles(shape[1]) * TILE_K)
        return whole[: shape[0], : shape[1]]


def row_blocks_at_once(k: int, device: torch.device) -> int:
    """Returns the number of row blocks of `k` columns that are packed at a time."""
    return max(1, CODES_AT_ONCE * (TIMES_ON_GPU if device.type == "cuda" else 1) // (ROW_BLOCK * max(1, k)))


def _shifted(words: Tensor, left: int) -> Tensor:
    return words << left if left > 0 else words >> -left if left else words


@functools.cache
def word_places(bits: int, device: torch.device | None = None) -> Tensor:
    """Returns the index of each word of each lane among the 32 * bits words of a tile: int64 [32, bits]."""
    places, start = [], 0
    for words in WORD_GROUPS[bits]:
        lane, word = torch.arange(LANES, device="cpu"), torch.arange(words, device="cpu")  # for any default device
        places.append(start + words * lane[:, None] + word)
        start += LANES * words
    return torch.cat(places, dim=1).to(device=device)


_OF_ELEMENTS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Number of elements of a register -> the integer type that is as wide as their codes, at one byte per code."""


def _repeated(mask: int, elements: int, window: int) -> int:
    """Returns `mask` repeated for every element, as an int32."""
    value = sum(mask << (window * element) for element in range(elements))
    return value - (1 << WORD_BITS) if value >> (WORD_BITS - 1) else value


Move = tuple[int, int, int, int]
"""Bits of a code that are moved together: (register of the run, word of the run, left shift, mask of the bits)."""


@functools.cache
def _moves(layout: FragmentOrder, bits: int, device: torch.device) -> tuple[Tensor, tuple[Move, ...]]:
    """Returns the sources of codes and the moves of their bits.

    Sources: for each register its index in the tile, (row * 64 + k) / elements, int64 [32 lanes, runs, registers of a run]. A
    run is a set of registers that share words. Moves: equal for all lanes, runs and elements.
    """
    fields = layout.fields(bits)
    row, k = layout.tile.coordinates()  # [lane, register, element]
    source = torch.from_numpy((row * TILE_K + k)[..., 0] // layout.tile.elements).unflatten(1, (-1, fields.registers))
    moves: list[Move] = []
    for register, places in enumerate(fields.places):
        shifts: dict[tuple[int, int], int] = {}
        for bit, (word, at) in enumerate(places):
            shifts[word, at - bit] = shifts.get((word, at - bit), 0) | 1 << bit
        moves += [(register, word, shift, mask) for (word, shift), mask in shifts.items()]
    return source.to(device), tuple(moves)
