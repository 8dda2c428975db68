"""TMA descriptors in im2col mode, encoded by the driver: Triton's Python interface has none.

One copy with such a descriptor loads a run of output pixels, in order over width, height and images, with one tap of the window
and some bytes of each pixel: rows of the implicit GEMM, zeros where the window leaves the image. Source: CUDA driver API,
cuTensorMapEncodeIm2col; PTX ISA, "Im2col mode".
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
"""Elements of a box on each side."""

_UINT8 = 0
_UINT64 = 4
_SWIZZLE = {32: 1, 64: 2, 128: 3}
_PROMOTE_L2_128 = 2


@dataclass(frozen=True)
class PixelWindows:
    """Parameters of a descriptor, apart from the address: images [N, H, W, bytes], and the windows to copy.

    strides are bytes from pixel to pixel, row to row and image to image, multiples of 16. A copy takes `pixels` windows and
    `step_bytes` bytes (32, 64 or 128) of one tap of each. Windows are `stride` apart; tap (0, 0) of the first one is at
    `first`, that of the last one at `last` pixels from the last row and column (down, across; both are often negative).
    """

    size: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    stride: tuple[int, int]
    first: tuple[int, int]
    last: tuple[int, int]
    pixels: int
    step_bytes: int

    def refusals(self) -> tuple[str, ...]:
        """Reasons why the hardware does not support it; empty if it does."""
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
    """Encodes the descriptor of the images at `address`, 128 bytes. Raises ValueError for what the hardware does not
    support."""
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
    """The descriptor that a function of the driver makes; raises ValueError that names `what`."""
    buffer = (ctypes.c_uint8 * (2 * MAP_BYTES))()
    start = -ctypes.addressof(buffer) % MAP_BYTES
    status = getattr(_driver(), function)(ctypes.c_void_p(ctypes.addressof(buffer) + start), *arguments)
    if status != 0:
        raise ValueError(f"the driver refuses {what} at address {arguments[2].value:#x}: error {status}")
    return bytes(buffer[start : start + MAP_BYTES])


def tensor_map(windows: PixelWindows, address: int, device: torch.device) -> Tensor:
    """Returns the descriptor in the memory of `device`: uint8 [128], aligned to 128 bytes. Not to be called during a
    capture."""
    return torch.frombuffer(bytearray(encode(windows, address)), dtype=torch.uint8).to(device)


def row_map(
    rows: int, row_bytes: int, box_rows: int, step_bytes: int, address: int, device: torch.device, swizzled: bool = True
) -> Tensor:  # fmt: skip
    """The descriptor of a matrix uint8 [rows, row_bytes], copied in boxes of box_rows x step_bytes; zeros outside it.

    In the memory of `device`, as `tensor_map`'s. Source: CUDA driver API, cuTensorMapEncodeTiled.
    """
    swizzle = _SWIZZLE[step_bytes] if swizzled else 0
    return _tiled(_UINT8, (row_bytes, rows), (row_bytes,), (step_bytes, box_rows), swizzle, address, device)


def image_map(size: tuple[int, int, int], box: tuple[int, int], address: int, device: torch.device) -> Tensor:
    """The descriptor of images uint8 [N, rows, row_bytes], copied in boxes [rows, bytes] as they lie; zeros outside them.

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
    """The descriptor of boxes; the innermost extent comes first."""
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

    `pixels` windows and `step_bytes` of each are copied at a time. With `images`, the input is what they pack and `product` is
    `images.product`. Descriptors, 128 bytes each, are created once for each address and size, and never freed: a captured graph
    reads them.
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
"""The arguments in place of a second product where there is none."""


def stem_windows(
    size: tuple[int, ...], images: StemImages, padding: tuple[int, int], pixels: int, step_bytes: int
) -> PixelWindows:
    """The windows of a stem: rows of 4 packed pixels of [N, rows, columns, 16], one at each packed pixel."""
    n, rows, columns, _ = size
    down, across = images.output
    row_bytes = columns * PIXEL_BYTES
    first = (-padding[0], 0)
    last = (first[0] + down - rows, 0)
    return PixelWindows(
        (n, rows, across, PIXEL_BYTES * WINDOW_PIXELS), (PIXEL_BYTES, row_bytes, rows * row_bytes), (1, 1), first, last, pixels,
        step_bytes,
    )  # fmt: skip
