"""Tiles of depthwise convolutions (kernels/sm80/depthwise.py), and reasons against the kernel; without Triton."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.formats.conv import ConvSpec, ProductSpec

MOST_TAPS = 256
"""Largest number of taps. Sums of 256 products of 8-bit codes are at most 2^22, as the kernel's conversion to float32 needs."""
MOST_PIXELS = 64
"""Largest number of pixels that a thread loads. A pixel takes two registers: 8 channels of 8 bits."""
MOST_WORDS = 48
"""Largest number of 32-bit words of inputs that a thread holds. A word has 4 pixels of one channel, and a thread holds the
words of 4 channels at a time. With more words, registers would limit the SM to fewer than three blocks."""


@dataclass(frozen=True)
class DepthwiseTile:
    """Rows and columns of the output pixels that a thread computes, for 8 channels."""

    rows: int
    columns: int

    def pixels(self, spec: ProductSpec) -> int:
        """Number of input pixels under the windows of a thread."""
        outputs = (self.rows, self.columns)
        down, across = ((outputs[i] - 1) * spec.stride[i] + spec.kernel[i] for i in (0, 1))
        return down * across

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns} pixels of 8 channels per thread"


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
