"""Maps packed codes by a table, and multiplies them by a gate. A kernel computes this on a GPU and the reference on a CPU, with
the same codes as the result."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.formats.conv import CODES, GateSpec
from lowbit.kernels.reference.conv import gate_reference, map_reference
from lowbit.pack.nhwc64 import Nhwc64


def map_codes(x: Tensor, table: Tensor, channels: int, out: Tensor) -> Tensor:
    """Replaces each code of packed s8 codes x uint8 [N, H, W, bytes] by table[code + 128]; writes the s8 codes to `out` and
    returns it.

    table: int8 [256]. All tensors are contiguous and on one device. Raises ValueError for tensors of other shapes.
    """
    _check("x", x, Nhwc64("s8").pixel_bytes(channels), tuple(x.shape[:3]), x.device)
    _check("the output", out, x.shape[3], tuple(x.shape[:3]), x.device)
    if table.dtype != torch.int8 or table.shape != (256,) or table.device != x.device:
        raise ValueError(f"the table is int8 [256] on {x.device}, got {table.dtype} {list(table.shape)} on {table.device}")
    if x.is_cuda:
        from lowbit.kernels.elementwise.code_table import map_to_codes

        with torch.cuda.device_of(x):
            return map_to_codes(x, table, channels, out)
    return out.copy_(Nhwc64("s8").pack(map_reference(Nhwc64("s8").unpack(x, channels), table)))


def gate_codes(x: Tensor, gate: Tensor, layer: GateSpec, out: Tensor) -> Tensor:
    """Multiplies packed codes x uint8 [N, H, W, bytes] by the packed s8 codes of a gate [N, 1, 1, bytes] as `layer` says;
    writes the s8 codes of the product to `out` and returns it. All tensors are contiguous and on one device. Raises ValueError
    for tensors of other shapes."""
    padded = x.shape[3] * 8 // CODES[layer.x].bits
    _check("x", x, x.shape[3], tuple(x.shape[:3]), x.device)
    _check("the gate", gate, padded, (x.shape[0], 1, 1), x.device)
    _check("the output", out, padded, tuple(x.shape[:3]), x.device)
    if x.is_cuda:
        from lowbit.kernels.elementwise.code_table import multiply_by_gate

        with torch.cuda.device_of(x):
            return multiply_by_gate(x, gate, layer, out)
    codes = gate_reference(Nhwc64(layer.x).unpack(x, padded), Nhwc64("s8").unpack(gate, padded), layer)
    return out.copy_(Nhwc64("s8").pack(codes))


def _check(name: str, tensor: Tensor, pixel: int, shape: tuple[int, ...], device: torch.device) -> None:
    wanted = (*shape, pixel)
    if tensor.dtype != torch.uint8 or tuple(tensor.shape) != wanted or not tensor.is_contiguous() or tensor.device != device:
        raise ValueError(
            f"{name} is contiguous uint8 {list(wanted)} on {device}, got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )
