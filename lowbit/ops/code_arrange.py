"""Resizes packed codes, and concatenates channels of several packed values. Kernels compute this on a GPU and the reference on
a CPU, with the same codes as the result."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit.formats.conv import ResizeSpec, SumSpec
from lowbit.kernels.reference.conv import concat_reference, resize_reference
from lowbit.pack.nhwc64 import Nhwc64


def resize_codes(x: Tensor, layer: ResizeSpec, storage: str, out: Tensor) -> Tensor:
    """Resizes packed codes x uint8 [N, H, W, bytes] as `layer` says, writes them to `out` [N, Ho, Wo, bytes], and returns it.

    Both tensors are contiguous, on one device, and have the format `storage`. Raises ValueError for tensors of other shapes and
    for sizes that have no integer form.
    """
    block = Nhwc64(storage).pixel_bytes(1)
    pixel = x.shape[3] if x.dim() == 4 and x.shape[3] % block == 0 else block
    _check("x", x, (*x.shape[:3], pixel), x.device)
    _check("the output", out, (x.shape[0], *layer.size, pixel), x.device)
    reasons = layer.refusals((x.shape[1], x.shape[2]))
    if reasons:
        raise ValueError(reasons[0])
    if x.is_cuda:
        from lowbit.kernels.elementwise.resize import resize

        with torch.cuda.device_of(x):
            return resize(x, layer, storage, out)
    channels = pixel // block * 64
    return out.copy_(Nhwc64(storage).pack(resize_reference(Nhwc64(storage).unpack(x, channels), layer, storage)))


def concat_codes(parts: Sequence[Tensor], channels: Sequence[int], layers: Sequence[SumSpec], out: Tensor) -> Tensor:
    """Concatenates packed codes along channels: writes them to `out` and returns it. Part i is uint8 [N, H, W, bytes], has
    channels[i] channels, and is rescaled by layers[i].

    All tensors are contiguous and on one device. Raises ValueError for other shapes, for layers that add something or whose
    outputs differ, and for 4-bit codes that would start in the middle of a byte.
    """
    storages = {layer.y for layer in layers}
    if not len(parts) == len(channels) == len(layers) > 0 or len(storages) != 1 or any(layer.other for layer in layers):
        raise ValueError(
            f"{len(parts)} parts have as many numbers of channels and layers of one value with one output storage, got "
            f"{len(channels)} and {len(layers)} with {', '.join(sorted(storages))}"
        )
    storage = storages.pop()
    if storage == "u4" and (any(count % 2 for count in channels[:-1]) or any(layer.x != "u4" for layer in layers)):
        raise ValueError(f"4-bit outputs have 4-bit parts with even numbers of channels, got {list(channels)}")
    for x, count, layer in zip(parts, channels, layers, strict=True):
        _check("a part", x, (*out.shape[:3], Nhwc64(layer.x).pixel_bytes(count)), out.device)
    _check("the output", out, (*out.shape[:3], Nhwc64(storage).pixel_bytes(sum(channels))), out.device)
    if out.is_cuda:
        from lowbit.kernels.elementwise.concat import concat

        with torch.cuda.device_of(out):
            return concat(list(parts), list(channels), tuple(layers), out)
    codes = [Nhwc64(layer.x).unpack(x, count) for x, count, layer in zip(parts, channels, layers, strict=True)]
    return out.copy_(Nhwc64(storage).pack(concat_reference(codes, layers)))


def _check(name: str, tensor: Tensor, wanted: tuple[int, ...], device: torch.device) -> None:
    if tensor.dtype != torch.uint8 or tuple(tensor.shape) != wanted or not tensor.is_contiguous() or tensor.device != device:
        raise ValueError(
            f"{name} is contiguous uint8 {list(wanted)} on {device}, got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )
