"""The first convolution of a network, of images with 1 to 4 channels and stride 2, as a matrix product with little padding.

Two by two pixels of up to 4 channels are one packed pixel of 16 bytes (byte 8 dy + 4 dx + channel). A window with stride 2 over
pixels is a window with stride 1 over packed pixels, of at most 4 x 4 packed pixels. So 7 x 7 taps of 3 channels are 4 rows of
64 bytes: K is 256 instead of 49 * 64. Packed rows include padding, so that a window that crosses the left or right border reads
zeros. For rows above and below the image, the kernels' copies write zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from lowbit.formats.conv import ProductSpec

PIXEL_BYTES = 16
WINDOW_PIXELS = 4
MOST_CHANNELS = 4


@dataclass(frozen=True)
class StemImages:
    """Images [N, channels, height, width] of int8 codes for a window of `kernel` taps, stride 2 and `padding`."""

    channels: int
    height: int
    width: int
    kernel: tuple[int, int]
    padding: tuple[int, int]

    def refusals(self) -> tuple[str, ...]:
        """Returns the reasons why the images cannot be packed in this layout; empty if they can."""
        reasons = []
        if self.channels > MOST_CHANNELS:
            reasons.append(f"{self.channels} channels, at most {MOST_CHANNELS} fit")
        if max(self.window) > WINDOW_PIXELS:
            reasons.append(f"windows of {self.kernel} with padding {self.padding} reach over more than 4 packed pixels")
        if min(self.output) < 1:
            reasons.append(f"{self.height} x {self.width} pixels are smaller than the window")
        return tuple(reasons)

    @property
    def before(self) -> tuple[int, int]:
        """Number of packed pixels of padding above and to the left."""
        return (self.padding[0] + 1) // 2, (self.padding[1] + 1) // 2

    @property
    def shift(self) -> tuple[int, int]:
        """Number of pixels between the beginning of the packed window and tap 0."""
        return 2 * self.before[0] - self.padding[0], 2 * self.before[1] - self.padding[1]

    @property
    def window(self) -> tuple[int, int]:
        """Numbers of packed pixels of a window, down and across."""
        down, across = (((k - 1 + s) // 2 + 1) for k, s in zip(self.kernel, self.shift, strict=True))
        return down, across

    @property
    def output(self) -> tuple[int, int]:
        """Height and width of the convolution's output."""
        size = (self.height, self.width)
        down, across = ((size[i] + 2 * self.padding[i] - self.kernel[i]) // 2 + 1 for i in (0, 1))
        return down, across

    @property
    def rows(self) -> int:
        return -(-self.height // 2)

    @property
    def columns(self) -> int:
        """Number of packed pixels of a row, padding included."""
        return self.output[1] + WINDOW_PIXELS - 1

    def pack(self, codes: Tensor) -> Tensor:
        """Returns integer codes [N, channels, height, width] packed to uint8 [N, rows, columns, 16]."""
        if tuple(codes.shape[1:]) != (self.channels, self.height, self.width) or codes.is_floating_point():
            raise ValueError(
                f"images are integer codes [N, {self.channels}, {self.height}, {self.width}], "
                f"got {codes.dtype} {list(codes.shape)}"
            )
        n = codes.shape[0]
        even = functional.pad(codes.to(torch.int8), (0, self.width % 2, 0, self.height % 2, 0, MOST_CHANNELS - self.channels))
        pixels = even.reshape(n, MOST_CHANNELS, self.rows, 2, -1, 2).permute(0, 2, 4, 3, 5, 1)
        pixels = pixels.reshape(n, self.rows, -1, PIXEL_BYTES)
        after = self.columns - self.before[1] - pixels.shape[2]
        return functional.pad(pixels, (0, 0, self.before[1], after)).contiguous().view(torch.uint8)

    def unpack(self, packed: Tensor) -> Tensor:
        """Returns the codes int32 [N, channels, height, width] of uint8 [N, rows, columns, 16]; zeros for pixels that no window
        reads."""
        n, left = packed.shape[0], self.before[1]
        kept = packed.view(torch.int8)[:, :, left:].to(torch.int32)
        pixels = kept.reshape(n, self.rows, -1, 2, 2, MOST_CHANNELS).permute(0, 5, 1, 3, 2, 4)
        codes = pixels.reshape(n, MOST_CHANNELS, 2 * self.rows, -1)[:, : self.channels, : self.height, : self.width]
        return functional.pad(codes, (0, self.width - codes.shape[3]))

    def arrange(self, weight: Tensor) -> Tensor:
        """Returns weights [O, channels, R, S] of any type as [O, 64, rows of the window, 1], for rows of 4 packed pixels."""
        o = weight.shape[0]
        down, across = self.shift
        size = (2 * self.window[0], 2 * WINDOW_PIXELS)
        pads = (across, size[1] - across - self.kernel[1], down, size[0] - down - self.kernel[0])
        full = functional.pad(weight, (*pads, 0, MOST_CHANNELS - self.channels))
        full = full.reshape(o, MOST_CHANNELS, self.window[0], 2, WINDOW_PIXELS, 2)  # o, c, row, dy, column, dx
        return full.permute(0, 4, 3, 5, 1, 2).reshape(o, PIXEL_BYTES * WINDOW_PIXELS, self.window[0], 1).contiguous()

    def product(self, spec: ProductSpec) -> ProductSpec:
        """The convolution as the kernels compute it on packed pixels: stride 1, each row of 4 packed pixels is one tap, windows
        are one tap wide."""
        channels = PIXEL_BYTES * WINDOW_PIXELS
        return ProductSpec(spec.x, spec.w, channels, (self.window[0], 1), (1, 1), (self.before[0], 0))
