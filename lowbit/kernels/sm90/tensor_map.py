"""TMA descriptors in im2col mode, encoded by the driver, since Triton's Python interface does not support that mode.

One copy with this type of descriptor loads rows of the implicit GEMM. For consecutive output pixels, in order of width, height
and images, it loads some bytes of one tap of the window; they are zeros where the tap is outside the image. Source: CUDA driver
API, cuTensorMapEncodeIm2col; PTX ISA, "Im2col mode".
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.conv import ProductSpec
from lowbit.pack.stem import PIXEL_BYTES, WINDOW_PIXELS, StemImages

MAP_BYTES = 128
MOST_BOX = 256
"""Largest number of elements on each side of a box."""

_UINT8 = 0
_UINT64 = 4
_SWIZZLE = {32: 1, 64: 2, 128: 3}
_PROMOTE_L2_128 = 2


@dataclass(frozen=True)
class PixelWindows:
    """Parameters of a descriptor, apart from the address: images [N, H, W, bytes], and the windows to copy.

    Strides are in bytes from pixel to pixel, row to row and image to image, and multiples of 16. A copy loads `step_bytes`
    bytes (32, 64 or 128) of one tap of each of `pixels` windows. Windows are `stride` pixels apart. Tap (0, 0) of the first
    window is at `first`; tap (0, 0) of the last window is at `last` relative to the last row and column. Both are (down,
    across) and often negative.
    """

    size: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    stride: tuple[int, int]
    first: tuple[int, int]
    last: tuple[int, int]
    pixels: int
    step_bytes: int

    def refusals(self) -> tuple[str, ...]:
        """Reasons why the hardware does not support the descriptor; empty if it does."""
        reasons = []
        if min(*self.first, *self.last) < -128 or max(*self.first, *self.last) > 127:
            reasons.append(f"windows begin 128 pixels beyond the image at most, got {self.first} to {self.last}")
        if max(self.stride) > 8:
            reasons.append(f"strides are 8 at most, got {self.stride}")
        return tuple(reasons)


def windows_of(
    size: tuple[int, ...], kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int], pixels: int,
    step_bytes: int,
) -> PixelWindows:  # fmt: skip
    """The windows of a convolution of packed images [N, H, W, bytes]."""
    n, h, w, pixel = size
    last = (padding[0] - (kernel[0] - 1), padding[1] - (kernel[1] - 1))
    return PixelWindows(
        (n, h, w, pixel), (pixel, w * pixel, h * w * pixel), stride, (-padding[0], -padding[1]), last, pixels, step_bytes
    )  # fmt: skip


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def encode(windows: PixelWindows, address: int) -> bytes:
    """Returns the 128 bytes of the descriptor of the images at `address`. Raises ValueError if the hardware does not support
    it."""
    reasons = windows.refusals()
    if reasons:
        raise ValueError(f"no copy of {windows}: {'; '.join(reasons)}")
    n, h, w, row_bytes = windows.size
    return _encoded(
        f"a copy of {windows}", "cuTensorMapEncodeIm2col", ctypes.c_int(_UINT8), ctypes.c_uint32(4), ctypes.c_void_p(address),
        (ctypes.c_uint64 * 4)(row_bytes, w, h, n), (ctypes.c_uint64 * 3)(*windows.strides),
        (ctypes.c_int * 2)(*windows.first[::-1]), (ctypes.c_int * 2)(*windows.last[::-1]),
        ctypes.c_uint32(windows.step_bytes), ctypes.c_uint32(windows.pixels),
        (ctypes.c_uint32 * 4)(1, windows.stride[1], windows.stride[0], 1),
        ctypes.c_int(0), ctypes.c_int(_SWIZZLE[windows.step_bytes]), ctypes.c_int(_PROMOTE_L2_128), ctypes.c_int(0),
    )  # fmt: skip


def _encoded(what: str, function: str, *arguments: Any) -> bytes:
    """Returns the descriptor that a function of the driver encodes; raises ValueError with the name `what` if it fails."""
    buffer = (ctypes.c_uint8 * (2 * MAP_BYTES))()
    start = -ctypes.addressof(buffer) % MAP_BYTES
    status = getattr(_driver(), function)(ctypes.c_void_p(ctypes.addressof(buffer) + start), *arguments)
    if status != 0:
        raise ValueError(f"the driver refuses {what} at address {arguments[2].value:#x}: error {status}")
    return bytes(buffer[start : start + MAP_BYTES])


def tensor_map(windows: PixelWindows, address: int, device: torch.device) -> Tensor:
    """Returns the descriptor in the memory of `device`: uint8 [128], aligned to 128 bytes. Must not be called during a graph
    capture."""
    return torch.frombuffer(bytearray(encode(windows, address)), dtype=torch.uint8).to(device)


def row_map(
    rows: int, row_bytes: int, box_rows: int, step_bytes: int, address: int, device: torch.device, swizzled: bool = True
) -> Tensor:  # fmt: skip
    """Returns the descriptor of a matrix uint8 [rows, row_bytes], copied in boxes of box_rows x step_bytes; zeros outside the
    matrix.

    The descriptor is in the memory of `device`, like that of `tensor_map`. Source: CUDA driver API, cuTensorMapEncodeTiled.
    """
    swizzle = _SWIZZLE[step_bytes] if swizzled else 0
    return _tiled(_UINT8, (row_bytes, rows), (row_bytes,), (step_bytes, box_rows), swizzle, address, device)


def image_map(size: tuple[int, int, int], box: tuple[int, int], address: int, device: torch.device) -> Tensor:
    """Returns the descriptor of images uint8 [N, rows, row_bytes], copied in boxes [rows, bytes] without a swizzle; zeros
    outside the images.

    Columns are counted in words of 8 bytes, of which a box has up to MOST_BOX.
    """
    n, rows, row_bytes = size
    return _tiled(
        _UINT64, (row_bytes // 8, rows, n), (row_bytes, rows * row_bytes), (box[1] // 8, box[0], 1), 0, address, device
    )  # fmt: skip


def _tiled(
    kind: int, size: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int, address: int,
    device: torch.device,
) -> Tensor:  # fmt: skip
    """Returns a descriptor in tiled mode; extents are given from the innermost to the outermost."""
    rank = len(size)
    descriptor = _encoded(
        f"boxes of {box} of {size}", "cuTensorMapEncodeTiled", ctypes.c_int(kind), ctypes.c_uint32(rank),
        ctypes.c_void_p(address), (ctypes.c_uint64 * rank)(*size), (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank), ctypes.c_int(0), ctypes.c_int(swizzle),
        ctypes.c_int(_PROMOTE_L2_128), ctypes.c_int(0),
    )  # fmt: skip
    return torch.frombuffer(bytearray(descriptor), dtype=torch.uint8).to(device)


class WindowOperand:
    """Kernel arguments of one product of a convolution: packed weights, and geometry of windows in its input.

    A copy loads `step_bytes` bytes of each of `pixels` windows. `images` describes the packed input of a stem, for which
    `product` is `images.product`. Descriptors of 128 bytes are created once for each address and size. They are never freed,
    since captured graphs read them.
    """

    def __init__(
        self, product: ProductSpec, weight: Tensor, pixels: int, step_bytes: int, images: StemImages | None = None
    ) -> None:
        self.product, self.weight, self.pixels, self.step_bytes, self.images = product, weight, pixels, step_bytes, images
        self.map = functools.lru_cache(maxsize=None)(self._map)

    def arguments(self, x: Tensor) -> tuple[object, ...]:
        """Returns the kernel arguments for an input: descriptor, weights, k blocks, and geometry of windows."""
        product = self.product
        row_bytes = x.shape[3] if self.images is None else PIXEL_BYTES * WINDOW_PIXELS
        blocks = row_bytes // self.step_bytes
        return (
            self.map(tuple(x.shape), x.data_ptr(), x.device), self.weight, blocks * product.taps, blocks, product.kernel[1],
            product.kernel[0], *product.stride, -product.padding[0], -product.padding[1],
        )  # fmt: skip

    def _map(self, size: tuple[int, ...], address: int, device: torch.device) -> Tensor:
        product = self.product
        if self.images is None:
            windows = windows_of(size, product.kernel, product.stride, product.padding, self.pixels, self.step_bytes)
        else:
            windows = stem_windows(size, self.images, product.padding, self.pixels, self.step_bytes)
        return tensor_map(windows, address, device)


NO_OPERAND = (None, None, *(0,) * 8)
"""Arguments that stand for the second product in layers without one."""


def stem_windows(
    size: tuple[int, ...], images: StemImages, padding: tuple[int, int], pixels: int, step_bytes: int
) -> PixelWindows:
    """Returns the windows of a stem: rows of 4 packed pixels of [N, rows, columns, 16], one window starting at each packed
    pixel."""
    n, rows, columns, _ = size
    down, across = images.output
    row_bytes = columns * PIXEL_BYTES
    first = (-padding[0], 0)
    last = (first[0] + down - rows, 0)
    return PixelWindows(
        (n, rows, across, PIXEL_BYTES * WINDOW_PIXELS), (PIXEL_BYTES, row_bytes, rows * row_bytes), (1, 1), first, last, pixels,
        step_bytes,
    )  # fmt: skip
