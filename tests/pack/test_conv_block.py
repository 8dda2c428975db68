"""Two linked products. Each thread uses its results of the first directly as its operand of the second. Emulated thread by
thread."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lowbit.formats.conv import ConvLayer, SecondProduct, code_range
from lowbit.pack.conv_block import BlockLayout, LinkedTiles, linked_channels, linked_order, loaded_order
from lowbit.pack.conv_layout import column_order
from lowbit.pack.conv_weight import swizzled
from lowbit.pack.nhwc64 import Nhwc64


def columns_of(q, count):
    """The accumulator columns that lane q of a row holds, in register order."""
    return [8 * j + 2 * q + e for j in range(count // 8) for e in (0, 1)]


def places_of(q, count):
    """The indices of K that lane q of a row holds in operand A, in the order of registers and bytes."""
    return [32 * step + 16 * half + 4 * q + i for step in range(count // 32) for half in (0, 1) for i in range(4)]


@pytest.mark.parametrize("columns", [32, 64])
def test_a_thread_keeps_its_codes(columns):
    order = linked_order(columns)
    for q in range(4):
        assert [order[k] for k in places_of(q, columns)] == columns_of(q, columns)


@pytest.mark.parametrize("x", ["u4", "s8"])
def test_a_thread_loads_16_channels(x):
    """The codes are in the kernel's order of unpacking: of each word of 4-bit codes, first the low nibbles, then the high
    nibbles."""
    codes = torch.arange(64) % 16 if x == "u4" else torch.arange(64)
    packed, order = Nhwc64(x).pack(codes.reshape(1, 64, 1, 1))[0, 0, 0], loaded_order(x)
    for q in range(4):
        own = packed.reshape(4, -1)[q].reshape(-1, 4)  # words
        held = [half for word in own for half in ((word & 15, word >> 4) if x == "u4" else (word,))]
        assert torch.equal(torch.cat(held).long(), codes[[order[k] for k in places_of(q, 64)]])
    assert sorted(order) == list(range(64))


@pytest.mark.parametrize("y", ["u4", "s8"])
@pytest.mark.parametrize(("chunk", "following"), [(64, 64), (32, 128)])
def test_two_products_in_a_row(y, chunk, following):
    """The linked product with packed weights equals the product of the two matrices, column by column."""
    torch.manual_seed(0)
    low, high = code_range(y)
    first = torch.randint(-128, 128, (256, 64), dtype=torch.int8)
    second = torch.randint(-128, 128, (following, 256), dtype=torch.int8)
    x = torch.randint(0, 16, (5, 64))
    rows, linked = column_order(y, 256), linked_channels(y, 256, chunk)
    chunks = LinkedTiles(rows, linked_order(64), chunk).pack(first[:, :, None, None])
    last = LinkedTiles(column_order(y, following), linked, chunk, by_columns=True).pack(second[:, :, None, None])
    assert chunks.shape == (256 // chunk, chunk, 64) and last.shape == (256 // chunk, following, chunk)
    total = torch.zeros(5, following, dtype=torch.int64)
    for number, (first_chunk, slab) in enumerate(zip(chunks, last, strict=True)):
        sums = x[:, list(linked_order(64))] @ swizzled(first_chunk).long().T  # [pixels, columns]
        wanted = x @ first.long().T
        assert torch.equal(sums, wanted[:, list(rows[number * chunk : (number + 1) * chunk])])
        codes = (sums >> 8).clamp(low, high)
        total += codes[:, list(linked_order(chunk))] @ swizzled(slab).long().T
    wanted = ((x @ first.long().T) >> 8).clamp(low, high) @ second.long().T
    assert torch.equal(total, wanted[:, list(column_order(y, following))])


@pytest.mark.parametrize("storage", ["u4", "s8"])
@pytest.mark.parametrize(("shortcut", "following"), [(False, 64), (True, 64), (False, 128)])
def test_the_weights_of_a_block_come_back(storage, shortcut, following):
    torch.manual_seed(0)
    layout = BlockLayout(storage, following, shortcut)
    weights = [torch.randint(-128, 128, shape, dtype=torch.int8) for shape in layout.shapes]
    product = SecondProduct(weights[2], torch.rand(256), storage) if shortcut else None
    padding = [(1, 1), (0, 0), (0, 0)]
    firsts = [weights[0], weights[1], weights[-1]]
    layers = [
        ConvLayer(w, s := torch.rand(len(w)), s, storage, storage, padding=p) for w, p in zip(firsts, padding, strict=True)
    ]
    layers[1] = dataclasses.replace(layers[1], second=product)
    packed = layout.pack_layers(*layers)
    assert packed.numel() == sum(w.numel() for w in weights) + 4 * (128 + 2 * following + (2 + shortcut) * 256)
    assert all(torch.equal(a, b) for a, b in zip(layout.unpack(packed), weights, strict=True))
