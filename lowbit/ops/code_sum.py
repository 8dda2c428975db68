"""Sums and ReLUs of packed codes. One kernel computes them on a GPU and the reference on a CPU, with the same codes as the
result."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.formats.conv import CODES, SumSpec
from lowbit.kernels.reference.conv import sum_reference
from lowbit.pack.nhwc64 import Nhwc64


def sum_codes(x: Tensor, layer: SumSpec, other: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Returns the packed codes uint8 [N, H, W, bytes] that `layer` computes from packed x, and from `other` if the layer has a
    second input.

    All tensors are contiguous and on one device; `out` is written if given. Raises ValueError for tensors that do not match the
    layer.
    """
    if (other is None) != (layer.other is None):
        raise ValueError(f"the sum takes another value stored as {layer.other}, got {'none' if other is None else 'one'}")
    blocks = x.shape[3] // (8 * CODES[layer.x].bits) if x.dim() == 4 else 0
    given = [("x", x, layer.x), ("the other value", other, layer.other), ("the output", out, layer.y)]
    for name, tensor, storage in given:
        if tensor is None or storage is None:
            continue
        shape = (*x.shape[:3], 8 * CODES[storage].bits * blocks)
        if tensor.dtype != torch.uint8 or tuple(tensor.shape) != shape or not tensor.is_contiguous() or not blocks:
            raise ValueError(
                f"{name} of the sum is contiguous uint8 {list(shape)} of {storage}, got {tensor.dtype} {list(tensor.shape)}"
            )
        if tensor.device != x.device:
            raise ValueError(f"all tensors must be on {x.device}, {name} is on {tensor.device}")
    if x.is_cuda:
        from lowbit.kernels.elementwise.add import add_codes

        shape = (*x.shape[:3], 8 * CODES[layer.y].bits * blocks)
        return add_codes(x, layer, other, x.new_empty(shape) if out is None else out)
    added = None if other is None or layer.other is None else Nhwc64(layer.other).unpack(other, 64 * blocks)
    y = Nhwc64(layer.y).pack(sum_reference(Nhwc64(layer.x).unpack(x, 64 * blocks), layer, added))
    return y if out is None else out.copy_(y)
