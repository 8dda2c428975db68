"""Layouts of convolutions are lossless, and equal to the operands that wgmma expects. Emulated in NumPy and torch."""

from __future__ import annotations

import numpy
import pytest
import torch
import torch.nn.functional as functional

from lowbit.formats.conv import ConvLayer, SecondProduct, code_range
from lowbit.hardware.mma import wgmma_s8
from lowbit.pack.conv_fragment import MmaFragments
from lowbit.pack.conv_layout import column_constants, column_order, lane_constants
from lowbit.pack.conv_weight import WgmmaTiles, planes, swizzled
from lowbit.pack.nhwc64 import Nhwc64, padded_channels
from lowbit.pack.stem import StemImages
from lowbit.pack.stem_fragment import StemFragments


def codes_of(storage, *shape):
    low, high = code_range(storage)
    return torch.randint(low, high + 1, shape, dtype=torch.int32)


@pytest.mark.parametrize("storage", ["u4", "s8"])
@pytest.mark.parametrize("channels", [1, 56, 64, 100, 192])
def test_activations_come_back(storage, channels):
    torch.manual_seed(0)
    layout, codes = Nhwc64(storage), codes_of(storage, 2, channels, 3, 5)
    packed = layout.pack(codes)
    assert packed.shape == layout.shape(tuple(codes.shape)) and packed.dtype == torch.uint8
    assert torch.equal(layout.unpack(packed, channels), codes)
    assert not layout.unpack(packed, padded_channels(channels))[:, channels:].any(), "filled up with code 0"


def test_bytes_by_hand():
    codes = torch.zeros(1, 56, 1, 2, dtype=torch.int32)
    codes[0, 0, 0, 0], codes[0, 1, 0, 0], codes[0, 55, 0, 1] = 3, 9, 12
    packed = Nhwc64("u4").pack(codes)
    assert packed.shape == (1, 1, 2, 32) and packed[0, 0, 0, 0] == 0x93 and packed[0, 0, 1, 27] == 0xC0
    assert int(packed.sum()) == 0x93 + 0xC0
    assert Nhwc64("s8").pack(-codes)[0, 0, 0, :2].tolist() == [253, 247]


@pytest.mark.parametrize(("storage", "code"), [("u4", 16), ("u4", -1), ("s8", 128)])
def test_codes_out_of_range_are_refused(storage, code):
    with pytest.raises(ValueError, match="codes are in"):
        Nhwc64(storage).pack(torch.full((1, 1, 1, 1), code))


def test_wrong_bytes_are_refused():
    with pytest.raises(ValueError, match=r"uint8 \[N, H, W, 32\]"):
        Nhwc64("u4").unpack(torch.zeros(1, 1, 1, 64, dtype=torch.uint8), 64)


@pytest.mark.parametrize("row_bytes", [32, 64, 128])
def test_swizzle_is_that_of_the_hardware(row_bytes):
    """PTX ISA: 1, 2 or 3 address bits from bit 4 on (for rows of 32, 64 or 128 bytes) are XORed with the bits from bit 7 on."""
    matrix = (torch.arange(64 * row_bytes) % 251).to(torch.int8).reshape(64, row_bytes)
    memory = swizzled(matrix).flatten()
    address = torch.arange(64 * row_bytes)
    mask = row_bytes // 16 - 1
    where = address ^ (((address >> 7) & mask) << 4)
    assert torch.equal(memory[where], matrix.flatten())


@pytest.mark.parametrize("y", ["u4", "s8", "f32"])
@pytest.mark.parametrize("outputs", [64, 128, 256])
def test_threads_hold_neighbouring_channels(y, outputs):
    order = column_order(y, outputs)
    assert sorted(order) == list(range(outputs))
    if y == "f32":
        return
    for q in range(4):  # columns 8 j + 2 q + e belong to lane q of a row
        held = [order[8 * j + 2 * q + e] for j in range(outputs // 8) for e in (0, 1)]
        run = 128 // (4 if y == "u4" else 8) if outputs >= 128 or y == "s8" else 16
        for i in range(0, len(held), run):
            piece = sorted(held[i : i + run])
            assert piece == list(range(piece[0], piece[0] + run)) and piece[0] % run == 0


@pytest.mark.parametrize(("x", "y"), [("u4", "u4"), ("s8", "s8"), ("u4", "f32"), ("s8", "u4")])
@pytest.mark.parametrize(("channels", "step_bytes"), [(100, 32), (128, 64), (256, 128)])
def test_packed_weights_give_the_convolution(x, y, channels, step_bytes):
    """Repeats the kernel's steps on packed bytes: unswizzle, split codes into planes, multiply step by step, reorder
    columns.
    """
    torch.manual_seed(0)
    outputs, tile = 150, 64
    weight = torch.randint(-128, 128, (outputs, channels, 2, 1), dtype=torch.int8)
    codes = codes_of(x, 1, channels, 4, 3)
    if step_bytes > Nhwc64(x).pixel_bytes(channels):
        pytest.skip("a pixel has fewer bytes than a step")
    packed = WgmmaTiles(x, y, tile, step_bytes).pack(weight)
    pixels = Nhwc64(x).pack(codes)[0]
    rows = pixels.shape[2] // step_bytes
    out = torch.zeros(3 * tile, 3, 3, dtype=torch.int64)
    for t in range(packed.shape[0]):
        for step in range(packed.shape[1]):
            tap, block = divmod(step, rows)
            window = pixels[tap : tap + 3, :, block * step_bytes : (block + 1) * step_bytes]
            parts = [window.view(torch.int8)] if planes(x) == 1 else [window & 15, window >> 4]
            for plane, part in enumerate(parts):
                matrix = swizzled(packed[t, step, plane]).long()  # swizzled is its own inverse
                product = torch.einsum("hwk,nk->nhw", part.long(), matrix)
                for column, channel in enumerate(column_order(y, tile)):
                    out[t * tile + channel] += product[column]
    wanted = functional.conv2d(codes.double(), weight.double())[0]
    assert torch.equal(out[:outputs].double(), wanted) and not out[outputs:].any()


def test_constants_follow_their_columns():
    values = torch.arange(1.0, 101.0)
    packed = column_constants(values, "u4", 128)
    order = torch.tensor(column_order("u4", 128))
    assert torch.equal(packed, torch.cat([values, torch.zeros(28)])[order])


def test_a_lane_finds_its_constants_in_16_bytes():
    values = torch.arange(128.0)
    columns, lanes = column_constants(values, "s8", 128), lane_constants(values, "s8", 128)
    for block in range(8):
        for lane in range(4):
            own = [16 * block + 8 * j + 2 * lane + e for j in range(2) for e in range(2)]
            assert torch.equal(lanes[16 * block + 4 * lane :][:4], columns[own])


@pytest.mark.parametrize("step_bytes", [16, 128])
def test_steps_that_do_not_fit_are_refused(step_bytes):
    with pytest.raises(ValueError, match="do not divide"):
        WgmmaTiles("u4", "u4", 64, step_bytes).pack(torch.zeros(64, 64, 1, 1, dtype=torch.int8))


@pytest.mark.parametrize(
    ("channels", "height", "width", "kernel", "padding"),
    [(3, 32, 24, 7, 3), (1, 17, 15, 3, 1), (4, 19, 12, 5, 2), (3, 9, 8, 3, 0)],
)
def test_a_stem_is_its_convolution(channels, height, width, kernel, padding):
    torch.manual_seed(0)
    images = StemImages(channels, height, width, (kernel, kernel), (padding, padding))
    assert images.refusals() == ()
    codes = torch.randint(-128, 128, (2, channels, height, width))
    weight = torch.randint(-128, 128, (5, channels, kernel, kernel), dtype=torch.int8)
    packed = images.pack(codes).view(torch.int8).double()
    above = functional.pad(packed, (0, 0, 0, 0, images.before[0], 8))
    matrix = images.arrange(weight).double()[..., 0]
    down, across = images.output
    out = torch.zeros(2, 5, down, across, dtype=torch.float64)
    for i in range(down):
        for j in range(across):
            rows = [above[:, i + r, j : j + 4].reshape(2, 64) for r in range(images.window[0])]
            out[:, :, i, j] = torch.einsum("nrk,okr->no", torch.stack(rows, 1), matrix)
    assert torch.equal(out, functional.conv2d(codes.double(), weight.double(), stride=2, padding=padding))


@pytest.mark.parametrize(("channels", "kernel", "outputs"), [(3, 7, 64), (4, 5, 100), (1, 3, 64)])
def test_weights_of_a_stem_are_operand_a_and_rows_as_they_lie_operand_b(channels, kernel, outputs):
    """A thread's results are channels 2 g and 2 g + 1 of its warp, in columns 8 j + 2 q and 8 j + 2 q + 1."""
    torch.manual_seed(0)
    images = StemImages(channels, 8, 224, (kernel, kernel), (kernel // 2, kernel // 2))
    codes = torch.randint(-128, 128, (1, channels, 8, 224))
    weight = torch.randint(-128, 128, (outputs, channels, kernel, kernel), dtype=torch.int8)
    wanted = functional.conv2d(codes.double(), weight.double(), stride=2, padding=kernel // 2)[0]
    rows = (
        functional.pad(images.pack(codes).view(torch.int8)[0].flatten(1), (0, 0, images.before[0], 8)).numpy().astype("int64")
    )
    fragments = StemFragments(images).pack(weight).numpy().astype("int64")
    atom = wgmma_s8(112)
    channel_of = [16 * (row // 16) + 2 * (row % 8) + row % 16 // 8 for row in range(64)]
    for tile in range(len(fragments)):
        for down in range(images.output[0]):
            sums = numpy.zeros((64, 112), dtype="int64")
            for step, held in enumerate(fragments[tile]):
                row = rows[down + step // 2]
                windows = numpy.stack([row[16 * n + 32 * (step % 2) :][:32] for n in range(112)])
                sums += atom.a.scatter(held.reshape(128, 4, 4)) @ windows.T
            full = functional.pad(wanted, (0, 0, 0, 0, 0, 64 * len(fragments) - outputs))[64 * tile : 64 * tile + 64, down]
            assert numpy.array_equal(sums, full.numpy()[channel_of])
    row, column = (places[:, :, 0] for places in atom.c.coordinates())
    for thread in range(128):
        warp, g, q = thread // 32, thread % 32 // 4, thread % 4
        assert [channel_of[i] for i in row[thread]] == [16 * warp + 2 * g + i // 2 for i in range(4)] * 14
        assert column[thread].tolist() == [8 * (i // 4) + 2 * q + i % 2 for i in range(56)]


def test_stems_that_do_not_fit_are_refused():
    assert "5 channels" in StemImages(5, 32, 32, (7, 7), (3, 3)).refusals()[0]
    assert "more than 4 packed pixels" in StemImages(3, 32, 32, (11, 11), (5, 5)).refusals()[0]


STEM = StemImages(3, 32, 24, (7, 7), (3, 3))

LAYOUTS = [
    *(WgmmaTiles(x, y, outputs, 32 if x == "u4" else 64, first) for x in ("u4", "s8") for y in ("u4", "s8", "f32")
      for outputs, first in ((64, False), (128, True))),
    *(MmaFragments(x, bits, y) for x, bits in (("u4", 4), ("u4", 8), ("s8", 8)) for y in ("u4", "s8", "f16")),
]  # fmt: skip
STEMS = [WgmmaTiles("s8", "u4", 64, 64, images=STEM), MmaFragments("s8", 8, "s8", images=STEM), StemFragments(STEM)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", [(100, 70, 3, 3), (128, 128, 1, 1), (65, 1, 2, 5)])
def test_packed_weights_come_back(layout, shape):
    """unpack inverts pack: no weight is lost or stored twice, and padding is zero."""
    torch.manual_seed(0)
    most = 8 if getattr(layout, "bits", 8) == 4 else 128
    weight = torch.randint(-most, most, shape, dtype=torch.int8)
    packed = layout.pack(weight)
    assert torch.equal(layout.unpack(packed, shape), weight)
    places = layout.arrange(torch.arange(1, weight.numel() + 1).reshape(shape)).flatten()
    assert torch.equal(places[places > 0].sort().values, torch.arange(1, weight.numel() + 1))
    assert layout.constants(torch.rand(shape[0])).shape == (padded_channels(shape[0]),)


@pytest.mark.parametrize("layout", STEMS, ids=str)
def test_packed_weights_of_a_stem_come_back(layout):
    torch.manual_seed(0)
    weight = torch.randint(-128, 128, (70, 3, 7, 7), dtype=torch.int8)
    assert torch.equal(layout.unpack(layout.pack(weight), (70, 3, 7, 7)), weight)


def test_a_layer_is_packed_whole():
    torch.manual_seed(0)
    second = SecondProduct(torch.randint(-8, 8, (128, 64, 1, 1), dtype=torch.int8), torch.rand(128), "s8")
    weight = torch.randint(-128, 128, (128, 128, 3, 3), dtype=torch.int8)
    layer = ConvLayer(weight, torch.rand(128), torch.rand(128), "u4", "u4", padding=(1, 1), second=second)
    layout = WgmmaTiles("u4", "u4", 128, 64)
    packed = layout.pack_layer(layer)
    beside = layout.of_second(layer.spec.second)
    assert beside == WgmmaTiles("s8", "u4", 128, 64) and torch.equal(
        beside.unpack(packed.weight2, (128, 64, 1, 1)), second.weight
    )
    assert torch.equal(packed.s2, layout.constants(second.s)) and torch.equal(packed.b, layout.constants(layer.b))
    with pytest.raises(ValueError, match="of one product"):
        StemFragments(STEM).of_second(layer.spec.second)
