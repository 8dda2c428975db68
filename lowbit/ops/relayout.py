"""Converts torch tensors to packed codes and back. One kernel does each on a GPU and the reference on a CPU, with the same
codes as the result."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.kernels.reference.conv import quantize_reference
from lowbit.pack.nhwc64 import Nhwc64
from lowbit.pack.stem import PIXEL_BYTES, StemImages


def pack_values(
    x: Tensor, gain: Tensor, shift: Tensor, layout: Nhwc64 | StemImages, out: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Returns packed codes clamp(round(float32(x) * gain[c] + shift[c])) of x [N, C, H, W] of any real type but
    float64 and any strides, for example NHWC. The product and the sum are one fma; codes are rounded to nearest, ties to even.

    gain and shift: float32 [C], on the device of x. `out` is contiguous uint8 in the shape of the layout, written if given.
    Raises ValueError for other tensors.
    """
    if x.dim() != 4 or x.is_complex() or x.dtype == torch.float64:
        raise ValueError(f"values are [N, C, H, W] of up to 32 bits, got {x.dtype} {list(x.shape)}")
    if isinstance(layout, StemImages) and tuple(x.shape[1:]) != (layout.channels, layout.height, layout.width):
        wanted = f"[N, {layout.channels}, {layout.height}, {layout.width}]"
        raise ValueError(f"the stem takes images {wanted}, got {list(x.shape)}")
    for name, constant in (("gain", gain), ("shift", shift)):
        if constant.dtype != torch.float32 or constant.shape != x.shape[1:2] or constant.device != x.device:
            raise ValueError(f"{name} is float32 [{x.shape[1]}] on {x.device}, got {constant.dtype} {list(constant.shape)}")
    rows = (layout.rows, layout.columns, PIXEL_BYTES) if isinstance(layout, StemImages) else layout.shape(tuple(x.shape))[1:]
    if out is not None and (tuple(out.shape) != (x.shape[0], *rows) or out.dtype != torch.uint8 or not out.is_contiguous()):
        raise ValueError(f"the packed codes are contiguous uint8 {[x.shape[0], *rows]}, got {out.dtype} {list(out.shape)}")
    if x.is_cuda:
        from lowbit.kernels.elementwise.relayout import pack, pack_stem

        if isinstance(layout, StemImages):
            return pack_stem(x, gain, shift, layout, out)
        return pack(x, gain, shift, layout.storage, out)
    storage: str = "s8" if isinstance(layout, StemImages) else layout.storage
    packed = layout.pack(quantize_reference(x, gain, shift, storage))
    return packed if out is None else out.copy_(packed)


def unpack_values(packed: Tensor, storage: str, scale: float, out: Tensor) -> Tensor:
    """Writes float32(code) * scale to `out` [N, C, H, W] of any floating type; if `out` has an integer type, writes the codes.

    `packed` is contiguous uint8 [N, H, W, bytes] of `pack/nhwc64.py`. Raises ValueError for another shape.
    """
    wanted = Nhwc64(storage).shape(tuple(out.shape))
    if packed.dtype != torch.uint8 or tuple(packed.shape) != wanted or not packed.is_contiguous():
        raise ValueError(f"packed codes of {list(out.shape)} are contiguous uint8 {list(wanted)}, got {list(packed.shape)}")
    if packed.is_cuda:
        from lowbit.kernels.elementwise.relayout import unpack

        return unpack(packed, storage, scale, out)
    codes = Nhwc64(storage).unpack(packed, out.shape[1])
    return out.copy_(codes.float() * scale if out.is_floating_point() else codes)
