"""Two 1 x 1 convolutions with weights in one stream of stages, emulated thread by thread."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats.conv import ConvLayer, SecondProduct, code_range
from lowbit.kernels.reference.conv import conv_reference
from lowbit.pack.conv_layout import column_order
from lowbit.pack.conv_pair import STAGE_BYTES, STEP, PairLayout, ThirdStages, block_order, tap_order
from lowbit.pack.conv_weight import swizzled
from lowbit.pack.nhwc64 import Nhwc64
from tests.pack.test_conv_block import columns_of, places_of


def loaded_operand(row, storage):
    """Returns operand A of one packed pixel [bytes] as int64 [K], in the order in which the four threads of a row load and
    unpack it."""
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


def random_layers(storage, channels, expanded, following, entry):
    torch.manual_seed(0)
    step = 16.0 if storage == "u4" else 1.0

    def weights(outputs, inputs):
        return torch.randint(-128, 128, (outputs, inputs, 1, 1), dtype=torch.int8), step * (torch.rand(outputs) + 0.5) / (
            8 * inputs
        )

    second = None
    if entry:
        weight, s = weights(expanded, entry)
        second = SecondProduct(weight, s, storage, (2, 2))
    weight, s = weights(expanded, channels)
    third = ConvLayer(
        weight, s, step * torch.randn(expanded), storage, storage, relu=True, residual=None if entry else storage,
        g=0 if entry else 0.7 * step, second=second,
    )  # fmt: skip
    weight, s = weights(following, expanded)
    return third, ConvLayer(weight, s, step * torch.randn(following), storage, storage, relu=True)


CASES = [(128, 256, 128, 0), (256, 512, 256, 0), (128, 256, 128, 256), (256, 256, 128, 512)]


@pytest.mark.parametrize("storage", ["u4", "s8"])
@pytest.mark.parametrize("case", CASES)
def test_stages_are_read_in_order(storage, case):
    """Sums of both products, computed from the stages as the kernel walks through them, are those of the matrices."""
    channels, expanded, following, entry = case
    layout = PairLayout(storage, *case)
    third, last = random_layers(storage, *case)
    packed = layout.pack_layers(third, last)
    stages = list(packed[: layout.stages * STAGE_BYTES].reshape(-1, STAGE_BYTES))
    low, high = code_range(storage)
    factor = 16 if storage == "u4" else 1
    x = torch.randint(low, high + 1, (3, channels))
    e = torch.randint(low, high + 1, (3, max(entry, 1)))
    rows = torch.stack([loaded_operand(row, storage) for row in Nhwc64(storage).pack(x[:, :, None, None])[:, 0, 0]])
    operands = [(rows, x, third.weight)]
    if entry and third.second is not None:
        rows = torch.stack([loaded_operand(row, storage) for row in Nhwc64(storage).pack(e[:, :, None, None])[:, 0, 0]])
        operands.append((rows, e, third.second.weight))
    tiles = STAGE_BYTES // (layout.chunk * STEP)
    columns = list(column_order(storage, expanded))
    for step in range(expanded // STEP):
        own = [torch.zeros(0)] * 2
        for chunk in range(STEP // layout.chunk):
            first = STEP * step + layout.chunk * chunk
            for product, (held, codes, weight) in enumerate(operands):
                total = torch.zeros(3, layout.chunk, dtype=torch.int64)
                for block in range(held.shape[1] // STEP):
                    place = chunk * held.shape[1] // STEP + block
                    if place % tiles == 0:  # the previous stage of this product is used up
                        own[product] = stages.pop(0)
                    tile = swizzled(own[product].reshape(tiles, layout.chunk, STEP)[place % tiles]).long()
                    total += held[:, STEP * block : STEP * (block + 1)] @ tile.T
                wanted = factor * codes @ weight[:, :, 0, 0].long().T
                assert torch.equal(total, wanted[:, columns[first : first + layout.chunk]])
    y = torch.randint(low, high + 1, (3, expanded))
    held = torch.stack([loaded_operand(row, storage) for row in Nhwc64(storage).pack(y[:, :, None, None])[:, 0, 0]])
    columns = list(column_order(storage, following))
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
    layout = PairLayout(storage, *case)
    third, last = random_layers(storage, *case)
    packed = layout.pack_layers(third, last)
    assert packed.numel() == layout.stages * STAGE_BYTES + 4 * layout.constants
    found = layout.unpack(packed)
    wanted = [third.weight, *([third.second.weight] if third.second is not None else []), last.weight]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    with pytest.raises(ValueError, match="the weights of a pair are"):
        layout.pack_layers(last, third)


def test_layers_have_many_codes():
    """The random layers of these tests saturate few codes, so that wrong sums would show."""
    third, last = random_layers("u4", 128, 256, 128, 0)
    y = conv_reference(torch.randint(0, 16, (2, 128, 5, 5)), third, torch.randint(0, 16, (2, 256, 5, 5)))
    assert y.unique().numel() > 8 and conv_reference(y, last).unique().numel() > 8


@pytest.mark.parametrize("storage", ["u4", "s8"])
@pytest.mark.parametrize("channels", [128, 256])
def test_taps_are_read_in_order(storage, channels):
    """Sums of the 3 x 3 convolution of one pixel from its stages, with operand A as ldmatrix loads and the kernel unpacks."""
    layout = PairLayout(storage, channels, 256, 128, 0, True)
    third, last = random_layers(storage, channels, 256, 128, 0)
    low, high = code_range(storage)
    weight = torch.randint(-128, 128, (channels, channels, 3, 3), dtype=torch.int8)
    second = ConvLayer(weight, torch.rand(channels), torch.rand(channels), storage, storage, padding=(1, 1), relu=True)
    packed = layout.pack_layers(third, last, second)
    assert packed.numel() == layout.stages * STAGE_BYTES + 4 * layout.constants
    assert torch.equal(layout.unpack(packed)[0], weight)
    stages = iter(packed.reshape(-1)[: layout.stages * STAGE_BYTES].reshape(-1, STAGE_BYTES))
    x = torch.randint(low, high + 1, (9, channels))  # by taps
    factor = 16 if storage == "u4" else 1
    rows = Nhwc64(storage).pack(x[:, :, None, None])[:, 0, 0].reshape(9, channels // STEP, -1)
    columns = list(column_order(storage, channels))
    assert sorted(tap_order(storage)) == list(range(STEP))
    for tile in range(channels // STEP):
        total = torch.zeros(STEP, dtype=torch.int64)
        for block in range(channels // STEP):
            for tap in range(9):
                own = rows[tap, block]  # all bytes of a row in order: their low halves, then their high halves
                held = torch.cat((own * 16 & 0xF0, own & 0xF0)) if storage == "u4" else own.view(torch.int8)
                total += swizzled(next(stages).reshape(STEP, STEP)).long() @ held.long()
        wanted = factor * torch.einsum("octx,tcx->o", weight.long().flatten(2)[..., None], x.long()[..., None])
        assert torch.equal(total, wanted[columns[STEP * tile : STEP * (tile + 1)]])


@pytest.mark.parametrize("storage", ["u4", "s8"])
def test_one_convolution_is_the_first_of_a_pair(storage):
    third, _ = random_layers(storage, 512, 512, 128, 0)
    layout = ThirdStages(PairLayout(storage, 512, 512, 0))
    packed = layout.pack_layer(third)
    assert torch.equal(layout.unpack(packed.weight, tuple(third.weight.shape)), third.weight)
    assert torch.equal(packed.weight, PairLayout(storage, 512, 512, 0).arrange((third.weight,)))
    with pytest.raises(ValueError, match="cannot hold"):
        layout.pack(third.weight[:, :256])
