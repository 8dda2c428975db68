"""Tiles of depthwise convolutions (kernels/sm80/depthwise.py and depthwise_quads.py), and reasons against the kernels; without
Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lowbit.formats.conv import ConvSpec, ProductSpec

MOST_TAPS = 256
"""Largest number of taps. Sums of 256 products of 8-bit codes are at most 2^22, as the kernel's conversion to float32 needs."""
MOST_PIXELS = 64
"""Largest number of pixels that a thread loads. A pixel takes two registers: 8 channels of 8 bits."""
MOST_WORDS = 48
"""Largest number of 32-bit words of inputs that a thread holds. A word has 4 pixels of one channel, and a thread holds the
words of 4 channels at a time. With more words, registers would limit the SM to fewer than three blocks."""

DEPTHWISE_FORM: Literal["vectors", "quads"] = "vectors"
"""The kernel of depthwise layers that both forms support: "vectors", 8 channels a thread (depthwise.py), or "quads", 4 channels
of more pixels (depthwise_quads.py). "quads" has not run on a GPU yet; docs/log/cnn.md has its count."""


@dataclass(frozen=True)
class DepthwiseTile:
    """Rows and columns of the output pixels that a thread computes, for 8 channels, or for 4 in depthwise_quads.py."""

    rows: int
    columns: int
    channels: int = 8

    def pixels(self, spec: ProductSpec) -> int:
        """Number of input pixels under the windows of a thread."""
        outputs = (self.rows, self.columns)
        down, across = ((outputs[i] - 1) * spec.stride[i] + spec.kernel[i] for i in (0, 1))
        return down * across

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns} pixels of {self.channels} channels per thread"


QUAD_TILES = {
    (3, 1): {DepthwiseTile(14, 2, 4): 1488, DepthwiseTile(7, 2, 4): 856},
    (3, 2): {DepthwiseTile(4, 2, 4): 688, DepthwiseTile(7, 2, 4): 1072},
    (5, 1): {DepthwiseTile(4, 4, 4): 1504, DepthwiseTile(7, 2, 4): 1360},
    (5, 2): {DepthwiseTile(4, 2, 4): 1120},
}
"""Tiles of a thread of depthwise_quads.py, by window and stride, and its instructions for each (sm_90, Triton 3.6, with ReLU
and 4 vectors of padding; counted 2026-11-29). 7 rows divide images of 7, 14, 28, 56 and 112 rows."""


def is_depthwise(spec: ConvSpec) -> bool:
    """True if each output channel reads one input channel, the one with its own index."""
    return spec.groups == spec.channels == spec.outputs


def depthwise_tile(spec: ProductSpec) -> DepthwiseTile:
    """Returns the tile of a layer: up to 4 columns, as many as the loaded words (4 pixels each) cover, and up to 4 rows, as
    many as MOST_WORDS allows."""
    words = -(-spec.kernel[1] // 4)
    columns = max(1, (4 * words - spec.kernel[1]) // spec.stride[1] + 1)
    if spec.stride == (1, 1) and columns == 1 and spec.kernel[1] > 1:  # widths 4 and 8: one more word covers 4 more columns
        columns, words = 5, words + 1
    rows = max(r for r in (1, 2, 4) if r == 1 or 4 * words * ((r - 1) * spec.stride[0] + spec.kernel[0]) <= MOST_WORDS)
    return DepthwiseTile(rows, min(columns, 4))


def vectors_of_block(vectors: int, real: int) -> int:
    """Returns how many vectors of 8 channels of a pixel a block computes: 4 if the last 4 of all `vectors`, a multiple of 8,
    are padding, else 8. `real` vectors have channels. Blocks of 4 only store zeros in the last 4."""
    return 4 if vectors - real >= 4 else 8


def depthwise_refusals(spec: ConvSpec) -> tuple[str, ...]:
    """Returns the reasons why the kernel cannot run a layer; empty if it can."""
    reasons = []
    if not is_depthwise(spec):
        reasons.append(f"{spec.channels} channels in {spec.groups} groups make {spec.outputs} outputs, not one of one each")
    if spec.taps > MOST_TAPS:
        reasons.append(f"a window of {spec.taps} taps, at most {MOST_TAPS} are summed exactly")
    pixels = depthwise_tile(spec).pixels(spec)
    if pixels > MOST_PIXELS:
        reasons.append(f"a window of {spec.kernel} covers {pixels} pixels of a thread, which has registers for {MOST_PIXELS}")
    return tuple(reasons)


def window_without_zeros(weight: Tensor) -> tuple[int, tuple[int, int]]:
    """Returns the side of a square window [C, 1, R, S] for depthwise_quads.py, and its first row and column. A window of 4 x 4
    or 6 x 6 with a row and a column of zeros at its border, as padding on one side leaves it, is one of 3 x 3 or 5 x 5."""
    rows, columns = weight.shape[2:]
    if rows != columns or rows not in (4, 6):
        return rows, (0, 0)
    starts = []
    for dim in (2, 3):
        first, last = (bool((weight.select(dim, at) == 0).all()) for at in (0, rows - 1))
        if not (first or last):
            return rows, (0, 0)
        starts.append(1 if first else 0)
    return rows - 1, (starts[0], starts[1])


def quad_refusals(spec: ConvSpec, weight: Tensor) -> tuple[str, ...]:
    """Returns the reasons why depthwise_quads.py cannot run a layer that depthwise.py can; empty if it can."""
    window, _ = window_without_zeros(weight)
    reasons = []
    if spec.x != "s8" or spec.y != "s8":
        reasons.append(f"codes {spec.x} to {spec.y}, it takes s8 to s8")
    if spec.kernel[0] != spec.kernel[1] or spec.stride[0] != spec.stride[1] or (window, spec.stride[0]) not in QUAD_TILES:
        supported = ", ".join(f"{k} x {k} / {s}" for k, s in QUAD_TILES)
        reasons.append(f"a window of {spec.kernel} with stride {spec.stride}; without borders of zeros it takes {supported}")
    return tuple(reasons)


def quad_tile(spec: ProductSpec, window: int, size: tuple[int, int]) -> DepthwiseTile:
    """Returns the tile with the fewest instructions for an output of `size` rows and columns, of a layer whose window without
    zeros has `window` rows and columns."""

    def instructions(tile: DepthwiseTile) -> int:
        return tiles[tile] * -(-size[0] // tile.rows) * -(-size[1] // tile.columns)

    tiles = QUAD_TILES[window, spec.stride[0]]
    return min(tiles, key=instructions)
