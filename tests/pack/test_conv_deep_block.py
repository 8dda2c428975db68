"""Convolutions of a block with weights in one stream of stages, emulated thread by thread."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats.conv import ConvLayer, code_range
from lowbit.kernels.reference.conv import conv_reference
from lowbit.pack.conv_deep_block import STAGE_BYTES, STEP, DeepBlockLayout, ThirdStages, block_order, tap_order
from lowbit.pack.conv_layout import column_order
from lowbit.pack.conv_weight import swizzled
from lowbit.pack.nhwc64 import Nhwc64
from tests.pack.test_conv_block import columns_of, places_of


def loaded_operand(row, storage):
    """Operand A of one packed pixel [bytes]: int64 [K] as the kernel's four threads of a row load and unpack it."""
    found = torch.zeros(len(row) * 8 // (4 if storage == "u4" else 8), dtype=torch.int64)
    for q in range(4):
        words = row.reshape(-1, 4, 16)[:, q].reshape(-1, 4)  # 16 of every 64 bytes, in words
        held = [
            half
            for word in words
            for half in ((word * 16 & 0xF0, word & 0xF0) if storage == "u4" else (word.view(torch.int8),))
        ]
        found[places_of(q, len(found))] = torch.cat(held).long()
    return found


@pytest.mark.parametrize("storage", ["u4", "s8"])
@pytest.mark.parametrize("channels", [128, 256])
def test_operand_is_in_the_order_of_memory(storage, channels):
    low, high = code_range(storage)
    codes = torch.randint(low, high + 1, (channels,), generator=torch.Generator().manual_seed(1))
    packed = Nhwc64(storage).pack(codes.reshape(1, -1, 1, 1))[0, 0, 0]
    order = list(block_order(storage, channels))
    factor = 16 if storage == "u4" else 1
    assert torch.equal(loaded_operand(packed, storage), factor * codes[order])
    assert sorted(order) == list(range(channels))


def random_layers(storage, channels, expanded, following):
    torch.manual_seed(0)
    step = 16.0 if storage == "u4" else 1.0

    def random_layer(outputs, inputs, kernel=1, residual=None):
        weight = torch.randint(-128, 128, (outputs, inputs, kernel, kernel), dtype=torch.int8)
        s = step * (torch.rand(outputs) + 0.5) / (8 * inputs * kernel)
        return ConvLayer(
            weight, s, step * torch.randn(outputs), storage, storage, padding=(kernel // 2,) * 2, relu=True, residual=residual,
            g=0.7 * step if residual else 0,
        )  # fmt: skip

    third = random_layer(expanded, channels, residual=storage)
    return random_layer(channels, channels, 3), third, random_layer(following, expanded)


def random_codes(storage, *shape):
    low, high = code_range(storage)
    return torch.randint(low, high + 1, shape)


def operands_of(codes, storage):
    """Operand A of the packed pixels of codes [pixels, channels]."""
    return torch.stack([loaded_operand(row, storage) for row in Nhwc64(storage).pack(codes[:, :, None, None])[:, 0, 0]])


CASES = [(128, 256, 128), (256, 512, 256)]


@pytest.mark.parametrize("storage", ["u4", "s8"])
@pytest.mark.parametrize("case", CASES)
def test_stages_are_read_in_order(storage, case):
    """Sums of all products, computed from the stages as the kernel walks through them, are those of the matrices."""
    channels, expanded, following = case
    layout = DeepBlockLayout(storage, *case)
    second, third, last = random_layers(storage, *case)
    packed = layout.pack_layers(second, third, last)
    stages = list(packed[: layout.stages * STAGE_BYTES].reshape(-1, STAGE_BYTES))
    factor = 16 if storage == "u4" else 1
    x = random_codes(storage, 9, channels)  # by taps
    rows = Nhwc64(storage).pack(x[:, :, None, None])[:, 0, 0].reshape(9, channels // STEP, -1)
    columns = list(column_order(storage, channels))
    assert sorted(tap_order(storage)) == list(range(STEP))
    for tile in range(channels // STEP):
        total = torch.zeros(STEP, dtype=torch.int64)
        for block in range(channels // STEP):
            for tap in range(9):
                own = rows[tap, block]  # all bytes of a row in order: their low halves, then their high halves
                held = torch.cat((own * 16 & 0xF0, own & 0xF0)) if storage == "u4" else own.view(torch.int8)
                total += swizzled(stages.pop(0).reshape(STEP, STEP)).long() @ held.long()
        wanted = factor * torch.einsum("oct,tc->o", second.weight.long().flatten(2), x.long())
        assert torch.equal(total, wanted[columns[STEP * tile : STEP * (tile + 1)]])
    x = random_codes(storage, 3, channels)
    held, own = operands_of(x, storage), torch.zeros(0)
    tiles, columns = STAGE_BYTES // (layout.chunk * STEP), list(column_order(storage, expanded))
    for chunk in range(expanded // layout.chunk):
        total = torch.zeros(3, layout.chunk, dtype=torch.int64)
        for block in range(channels // STEP):
            place = chunk * channels // STEP + block
            if place % tiles == 0:  # the previous stage is used up
                own = stages.pop(0)
            tile = swizzled(own.reshape(tiles, layout.chunk, STEP)[place % tiles]).long()
            total += held[:, STEP * block : STEP * (block + 1)] @ tile.T
        wanted = factor * x @ third.weight[:, :, 0, 0].long().T
        assert torch.equal(total, wanted[:, columns[layout.chunk * chunk : layout.chunk * (chunk + 1)]])
    y = random_codes(storage, 3, expanded)
    held, columns = operands_of(y, storage), list(column_order(storage, following))
    for part in range(following // STEP):
        total = torch.zeros(3, STEP, dtype=torch.int64)
        for block in range(expanded // STEP):
            tile = swizzled(stages.pop(0).reshape(STEP, STEP)).long()
            total += held[:, STEP * block : STEP * (block + 1)] @ tile.T
        wanted = factor * y @ last.weight[:, :, 0, 0].long().T
        assert torch.equal(total, wanted[:, columns[STEP * part : STEP * (part + 1)]])
    assert not stages


@pytest.mark.parametrize("storage", ["u4", "s8"])
def test_a_thread_stores_neighbours(storage):
    """The columns of a thread's 128 outputs are, in order of its registers, the channels of the words that it stores."""
    unit = 128 if storage == "u4" else 64
    columns = column_order(storage, 256)
    for step in range(2):
        for q in range(4):
            channels = [columns[STEP * step + column] for column in columns_of(q, STEP)]
            wanted = [STEP * step + first + q * unit // 4 + i for first in range(0, STEP, unit) for i in range(unit // 4)]
            assert sorted(channels) == wanted


@pytest.mark.parametrize("storage", ["u4", "s8"])
@pytest.mark.parametrize("case", CASES)
def test_weights_come_back(storage, case):
    layout = DeepBlockLayout(storage, *case)
    layers = random_layers(storage, *case)
    packed = layout.pack_layers(*layers)
    assert packed.numel() == layout.stages * STAGE_BYTES + 4 * layout.constants
    assert all(torch.equal(found, layer.weight) for found, layer in zip(layout.unpack(packed), layers, strict=True))
    with pytest.raises(ValueError, match="the weights of a block are"):
        layout.pack_layers(layers[0], layers[2], layers[1])


def test_layers_have_many_codes():
    """The random layers of these tests saturate few codes, so that wrong sums would show."""
    second, third, last = random_layers("u4", 128, 256, 128)
    x = conv_reference(torch.randint(0, 16, (2, 128, 5, 5)), second)
    y = conv_reference(x, third, torch.randint(0, 16, (2, 256, 5, 5)))
    assert all(codes.unique().numel() > 8 for codes in (x, y, conv_reference(y, last)))


@pytest.mark.parametrize("storage", ["u4", "s8"])
def test_one_convolution_alone(storage):
    third = random_layers(storage, 512, 512, 128)[1]
    layout = ThirdStages(DeepBlockLayout(storage, 512, 512, 0))
    packed = layout.pack_layer(third)
    assert packed.weight.shape == (layout.block.stages, STAGE_BYTES) and layout.block.constants == 2 * 512
    assert torch.equal(layout.unpack(packed.weight, tuple(third.weight.shape)), third.weight)
    with pytest.raises(ValueError, match="cannot hold"):
        layout.pack(third.weight[:, :256])
