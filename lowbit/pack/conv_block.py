"""Weights and constants of a bottleneck block as one kernel reads them: products whose outputs are the next product's input.

A thread that has turned its columns of a product into codes has them in the registers of operand A of the next one as they
are: K may be in any order, so the next product's weights have theirs in the order in which the columns come.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.pack.conv_weight import column_order, swizzled


def linked_order(columns: int) -> tuple[int, ...]:
    """Column of a product (of `columns`, a multiple of 32) at each place of K of the product that reads its codes.

    Register 2 s + h of operand A holds, in thread q of a row's four, the places 32 s + 16 h + 4 q to + 3 of K; of the
    product before, that thread has columns 8 j + 2 q and 8 j + 2 q + 1.
    """
    order = []
    for k in range(columns):
        register, q, i = k // 16, k % 16 // 4, k % 4
        order.append(8 * (2 * register + i // 2) + 2 * q + i % 2)
    return tuple(order)


def loaded_order(x: str) -> tuple[int, ...]:
    """Channel of 64 at each place of K, where each thread of a row's four loads 16 neighbouring channels of packed codes.

    Of a word of 4-bit codes the even channels make one register, the odd ones the next.
    """
    order = []
    for k in range(64):
        step, half, q, i = k // 32, k % 32 // 16, k % 16 // 4, k % 4
        order.append(16 * q + 8 * step + (2 * i + half if x == "u4" else 4 * half + i))
    return tuple(order)


def pack_rows(weight: Tensor, rows: tuple[int, ...], places: tuple[int, ...], chunk: int) -> Tensor:
    """int8 [len(rows) / chunk, chunk, K] of weights int8 [O, K]: outputs `rows`, channels `places`, as wgmma reads them."""
    matrix = _taken(weight, rows, places)
    return swizzled(matrix.reshape(-1, chunk, len(places)).contiguous())


def pack_columns(weight: Tensor, rows: tuple[int, ...], places: tuple[int, ...], chunk: int) -> Tensor:
    """int8 [len(places) / chunk, O, chunk]: as `pack_rows`, cut into pieces of K, one after the other."""
    matrix = _taken(weight, rows, places).reshape(len(rows), -1, chunk)
    return swizzled(matrix.transpose(0, 1).contiguous())


def linked_channels(y: str, outputs: int, chunk: int) -> tuple[int, ...]:
    """Channel at each place of K of a product that reads codes y of `outputs` channels, `chunk` columns after `chunk`."""
    columns = column_order(y, outputs)
    return tuple(columns[first + column] for first in range(0, outputs, chunk) for column in linked_order(chunk))


def _taken(weight: Tensor, rows: tuple[int, ...], places: tuple[int, ...]) -> Tensor:
    of = weight.device
    return weight[torch.tensor(rows, device=of)][:, torch.tensor(places, device=of)]
