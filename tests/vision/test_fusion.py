"""Fusions into one kernel: found where allowed and nowhere else. tests/vision/test_device.py runs them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from lowbit import vision
from lowbit.vision.device import DeviceProgram
from lowbit.vision.fusion import KERNEL_FUSIONS, UNMEASURED_FUSIONS, fused, with_pooled_stems
from lowbit.vision.program import AverageCodes, Convolve, FusedBottleneck, FusedPair, Value, outputs_of
from tests.vision.nets import resnet


@pytest.fixture(scope="module")
def bottlenecks():
    """The program of two bottleneck blocks of 64 channels and one of 128."""
    torch.manual_seed(0)
    model = resnet("bottleneck", sizes=(256, 512), depths=(2, 1), embedding=64)
    return vision.quantize(model, torch.randn(2, 3, 24, 24), "w8a4").program


def test_blocks_of_64_channels_are_found(bottlenecks):
    whole = fused(bottlenecks, 3, None)
    blocks = [op for op in whole.operations if isinstance(op, FusedBottleneck)]
    parts = [[conv.layer.name.split("stages.")[1] for conv in (b.second, b.third, b.following)] for b in blocks]
    assert parts == [
        ["0.layers.0.layer.1.convolution", "0.layers.0.layer.2.convolution", "0.layers.1.layer.0.convolution"],
        ["0.layers.1.layer.1.convolution", "0.layers.1.layer.2.convolution", "1.layers.0.layer.0.convolution"],
    ]
    assert blocks[0].added == blocks[0].third.second and blocks[1].added == blocks[0].also  # a shortcut, then a residual
    assert sum(blocks[1].also in op.inputs for op in whole.operations) == 1  # the next block's shortcut reads this value too
    assert len(bottlenecks.operations) - len(whole.operations) == 2 * 2 + 2  # the stem's pool, means as codes
    made = [name for op in whole.operations for name in outputs_of(op)]
    assert not {blocks[0].second.y, blocks[1].second.y} & set(made)
    apart = fused(bottlenecks, 3, None, ("stem",))
    assert not any(isinstance(op, FusedBottleneck) for op in apart.operations)
    with pytest.raises(ValueError, match="stem, blocks, pairs, whole, got 'pool'"):
        fused(bottlenecks, 3, None, ("pool",))


def test_a_second_convolution_with_other_readers_stays(bottlenecks):
    (block, _) = [op for op in fused(bottlenecks, 3, None).operations if isinstance(op, FusedBottleneck)]
    read = Convolve("extra", block.second.y, block.second.layer)
    values = bottlenecks.values | {"extra": Value("u4", (64, 6, 6))}
    more = replace(bottlenecks, operations=(*bottlenecks.operations, read), values=values)
    found = [op for op in fused(more, 3, None).operations if isinstance(op, FusedBottleneck)]
    assert len(found) == 1 and found[0].second.y != block.second.y


class TwoReaders(nn.Module):
    """A stem whose codes are read by a max-pool and by a convolution."""

    def __init__(self):
        super().__init__()
        self.stem, self.pool, self.other = nn.Conv2d(3, 8, 3, 2, 1), nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 8, 1, 2)

    def forward(self, x):
        y = self.stem(x).relu()
        return self.pool(y) + self.other(y)


@pytest.mark.parametrize(
    ("model", "inside"),
    [
        (nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 8, 1)), True),
        (nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 1)), False),
        (nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 8, 1)), False),
        (TwoReaders(), False),
    ],
    ids=["stem", "window", "stride", "readers"],
)
def test_which_stems_have_their_max_pool_inside(model, inside):
    torch.manual_seed(0)
    images = torch.randn(2, 3, 12, 10)
    program = vision.quantize(model, images, "w8a4").program
    one = with_pooled_stems(program, None)
    assert len(program.operations) - len(one.operations) == inside
    assert torch.equal(one.run(images), program.run(images))


def test_means_are_made_as_codes_where_nothing_else_reads_them():
    class Read(nn.Module):
        """The classifier reads the means; with `twice`, a second operation reads them too."""

        def __init__(self, twice):
            super().__init__()
            self.conv, self.last, self.twice = nn.Conv2d(3, 8, 3), nn.Linear(8, 8), twice

        def forward(self, x):
            means = self.conv(x).relu().mean((2, 3))
            return self.last(means) + means if self.twice else self.last(means)

    for twice in (False, True):
        program = vision.quantize(Read(twice), torch.randn(2, 3, 8, 8), "w8a8").program
        found = [op for op in fused(program, 2, None).operations if isinstance(op, AverageCodes)]
        assert len(found) == (not twice)


def test_whole_blocks_and_pairs_of_128_channels():
    """The second block keeps its size, so it is whole; of the first one, whose 3 x 3 window has stride 2, the rest is a pair.
    The codes of the device's wiring are the reference's."""
    torch.manual_seed(3)
    images = torch.randn(2, 3, 32, 24)
    model = resnet("bottleneck", sizes=(256, 512, 1024), depths=(1, 3, 1), embedding=64)
    program = vision.quantize(model, images, "w8a4").program
    asked = (*KERNEL_FUSIONS, *UNMEASURED_FUSIONS)
    found = fused(program, 2, None, asked).operations
    parts = [type(op).__name__ for op in found if isinstance(op, (FusedBottleneck, FusedPair))]
    assert parts == ["FusedBottleneck", "FusedPair", "FusedBottleneck", "FusedBottleneck"]
    (pair,) = [op for op in found if isinstance(op, FusedPair)]
    assert pair.added == pair.third.second and pair.third.layer.channels == 128
    pairs = [op for op in fused(program, 2, None, ("stem", "blocks", "pairs")).operations if isinstance(op, FusedPair)]
    assert len(pairs) == 3 and [op.third.residual is None for op in pairs] == [True, False, False]
    launched = DeviceProgram(program, 2, torch.device("cpu"), asked)
    assert torch.equal(launched.run(images), program.run(images))
    assert len(fused(program, 2, None).operations) == len(found), "as asked by default"
