"""Weights of convolutions as the wgmma kernel copies them to shared memory: one piece per tile of outputs and step of K.

A step is one tap of the window and one run of input channels: `step_bytes` of each packed pixel. Its piece holds, for every
plane, a matrix [outputs, step_bytes] of int8 weights, K-major, in the swizzle that wgmma reads. Activations of 4 bits have two
planes, as decoding a word leaves even channels (low halves) in one register and odd ones (high halves) in another; K may be
in any order as long as both operands have the same.

Columns of the product are re-ordered too: a thread of a warpgroup holds columns 8 j + 2 q and 8 j + 2 q + 1 of its rows
(q = lane % 4), and it is to hold neighbouring channels of the output, 16 bytes of them where the tile is wide enough, so
that it stores what it has computed without an exchange. So weights, not activations, carry every permutation.
Source: the accumulator of wgmma, PTX ISA; the swizzle of its shared-memory operands, the same.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as functional
from torch import Tensor

from lowbit.formats.conv import ACTIVATIONS, CODES
from lowbit.pack.nhwc64 import padded_channels

GROUP = 8
"""Columns that are requantized together: one word of 4-bit codes, two of 8-bit ones."""


def group_order(y: str) -> tuple[int, ...]:
    """Channel within a group of 8 of the i-th column that a thread holds.

    For 4-bit codes bytes of the first four columns give the low halves of a word and those of the last four the high halves.
    """
    return (0, 2, 4, 6, 1, 3, 5, 7) if y == "u4" else (0, 1, 2, 3, 4, 5, 6, 7)


def unit_channels(y: str, outputs: int) -> int:
    """Channels that the four threads of a row store with one instruction each: 16 bytes a thread where there are so many."""
    return min(outputs, 4 * 128 // CODES[y].bits) if y in ACTIVATIONS else outputs


@functools.cache
def column_order(y: str, outputs: int) -> tuple[int, ...]:
    """Output channel (within a tile of `outputs`) of each column of the product; y is the storage of the output."""
    if y not in ACTIVATIONS:
        return tuple(range(outputs))
    unit = unit_channels(y, outputs)
    order = []
    for column in range(outputs):
        first, inside = column // unit * unit, column % unit
        j, q, e = inside // 8, inside % 8 // 2, inside % 2
        group, i = divmod(2 * j + e, GROUP)
        order.append(first + q * (unit // 4) + group * GROUP + group_order(y)[i])
    return tuple(order)


def swizzled(matrix: Tensor) -> Tensor:
    """Rows [.., rows, bytes] of 32, 64 or 128 bytes with their 16-byte chunks exchanged as wgmma and TMA expect them."""
    rows, row_bytes = matrix.shape[-2:]
    chunks = row_bytes // 16
    row = torch.arange(rows, device=matrix.device)
    source = torch.arange(chunks, device=matrix.device)[None, :] ^ (row * row_bytes // 128 % chunks)[:, None]
    index = (source[..., None] * 16 + torch.arange(16, device=matrix.device)).reshape(rows, row_bytes)
    return matrix.gather(-1, index.expand(matrix.shape))


def planes(x: str) -> int:
    """Matrices of weights of a step: one for each half of a byte that holds a code."""
    return 8 // CODES[x].bits


def pack_conv_weight(weight: Tensor, x: str, y: str, outputs: int, step_bytes: int) -> Tensor:
    """int8 [tiles of outputs, steps, planes, outputs, step_bytes] of weights int8 [O, C, R, S].

    `x` and `y` are the storages of input and output; `step_bytes` is 32, 64 or 128 and divides the bytes of a packed pixel;
    `outputs` divides O filled up to a multiple of 64. Filled-up channels and outputs have weight 0.
    """
    o, c, r, s = weight.shape
    o64, c64 = padded_channels(o), padded_channels(c)
    step_channels = step_bytes * 8 // CODES[x].bits
    if step_bytes not in (32, 64, 128) or c64 % step_channels or o64 % outputs:
        raise ValueError(
            f"steps of {step_bytes} bytes and tiles of {outputs} outputs do not divide {c64} channels of {x} and {o64} outputs"
        )
    full = functional.pad(weight, (0, 0, 0, 0, 0, c64 - c, 0, o64 - o))
    columns = torch.tensor(column_order(y, outputs), device=weight.device)
    full = full.reshape(o64 // outputs, outputs, c64, r * s)[:, columns]
    # [tiles, outputs, steps per tap, bytes of a step, planes, taps] -> [tiles, taps, steps per tap, planes, outputs, bytes]
    full = full.reshape(o64 // outputs, outputs, c64 // step_channels, step_bytes, planes(x), r * s)
    full = full.permute(0, 5, 2, 4, 1, 3).contiguous()
    return swizzled(full).reshape(o64 // outputs, -1, planes(x), outputs, step_bytes)


def pack_constants(values: Tensor, y: str, outputs: int) -> Tensor:
    """Per-channel constants [O] in the order of the columns, filled up with zeros: float32 [tiles of outputs * outputs]."""
    o64 = padded_channels(values.shape[0])
    columns = torch.tensor(column_order(y, outputs), device=values.device)
    full = functional.pad(values.float(), (0, o64 - values.shape[0]))
    return full.reshape(-1, outputs)[:, columns].reshape(-1).contiguous()


def pack_lane_constants(values: Tensor, y: str, outputs: int) -> Tensor:
    """As `pack_constants`, but of each 16 columns of a tile, the 4 of a lane (of four) are neighbours: one load of 16 bytes."""
    columns = pack_constants(values, y, outputs).reshape(-1, 2, 4, 2)
    return columns.permute(0, 2, 1, 3).reshape(-1).contiguous()
