"""Tiles of depthwise convolutions (kernels/sm80/depthwise.py), and reasons against the kernel; without Triton."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.formats.conv import ConvSpec, ProductSpec

MOST_TAPS = 256
"""Largest number of taps: sums of 256 products of 8-bit codes are below 2^22, and exact as float32 numbers above 2^23."""
MOST_PIXELS = 64
"""Largest number of pixels that a thread loads, each of two registers."""
MOST_WORDS = 48
"""Largest number of words of 4 pixels, of 4 channels, that a thread holds; with more, registers would limit the SM to fewer
than three blocks."""


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
    """True if each output channel reads the one input channel of its number."""
    return spec.groups == spec.channels == spec.outputs


def depthwise_tile(spec: ProductSpec) -> DepthwiseTile:
    """Returns the tile of a layer: as many columns as the loaded words of 4 pixels serve, and rows while words fit."""
    words = -(-spec.kernel[1] // 4)
    columns = max(1, (4 * words - spec.kernel[1]) // spec.stride[1] + 1)
    if spec.stride == (1, 1) and columns == 1 and spec.kernel[1] > 1:  # 4, 8: one more word serves 4 more pixels
        columns, words = 5, words + 1
    rows = max(r for r in (1, 2, 4) if r == 1 or 4 * words * ((r - 1) * spec.stride[0] + spec.kernel[0]) <= MOST_WORDS)
    return DepthwiseTile(rows, min(columns, 4))


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
