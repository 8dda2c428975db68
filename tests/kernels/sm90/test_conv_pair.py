"""Two 1 x 1 convolutions in one kernel, and a 3 x 3 one before them: machine code without a GPU; on one, codes bit-equal to the
layers' references."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")


from lowbit.formats.conv import SecondProduct
from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose.conv import WHOLE_WIDTH, conv_candidates, pair_refusals, pair_tile, third_parts, whole_refusals
from lowbit.kernels.reference.conv import conv_reference
from lowbit.kernels.sm90.conv_pair import PairConv, pair_conv
from lowbit.ops.conv import launcher
from lowbit.ops.conv_block import block_launcher, prepare_block
from lowbit.ops.conv_pair import pair_launcher, prepare_pair
from lowbit.pack.conv_pair import PairLayout
from lowbit.pack.nhwc64 import Nhwc64
from tests.kernels.sass import compile_kernel
from tests.kernels.sm90.test_compile import check_straight_line
from tests.kernels.sm90.test_conv import codes_of, layer

SHAPES = [(128, 512, 128, 0), (256, 1024, 256, 0), (128, 512, 128, 256), (256, 1024, 256, 512)]
"""As in ResNet-50: channels of x, y, z and of the shortcut's input."""

PAIRS = [(storage, *shape) for storage in ("u4", "s8") for shape in SHAPES]


def layers(storage, channels, expanded, following, entry):
    product = None
    if entry:
        other = layer(entry, expanded, 1, 2, 0, storage, storage)
        product = SecondProduct(other.weight, 0.7 * other.s, storage, (2, 2))
    third = layer(channels, expanded, 1, 1, 0, storage, storage, None if entry else storage, second=product)
    return third, layer(expanded, following, 1, 1, 0, storage, storage)


WHOLE = [(storage, *shape, width) for storage in ("u4", "s8") for shape, width in ((SHAPES[0], 28), (SHAPES[1], 14))]
"""Channels of x, y and z, none of a shortcut, and the width of images."""


@pytest.mark.parametrize(
    ("storage", "channels", "expanded", "following", "entry", "width"), [*((*pair, 0) for pair in PAIRS), *WHOLE]
)
def test_machine_code(storage, channels, expanded, following, entry, width):
    layout = PairLayout(storage, channels, expanded, following, entry, width > 0)
    config = PairConv(**vars(pair_tile(layout, width)))
    pointers = ["y", "z", "maps" if width else "x", "added", "weight"]
    signature = {"y": "*i32", "z": "*i32", "x": None if width else "*i32", "added": "*i32", "g": "fp32"}
    signature |= dict.fromkeys(("pixels", "tiles", "image", "width", "entry_image", "entry_width", "stride"), "i32")
    signature |= {"maps": "*i8" if width else None, "weight": "*i8"}
    kernel = compile_kernel(pair_conv, signature, config, pointers, config.warps, 90, maxnreg=128)
    assert kernel.stack_bytes <= (40 if entry else 0), "addresses of the next tile, outside of loops"
    chunks, tiles = 128 // config.chunk, channels // 128 if width else 0
    products = (channels + entry) // 32 * chunks + expanded // 32 + tiles * 9 * 4
    assert kernel.count("IGMMA") == products, "taps of 128 channels, an iteration of y, a pass of z"
    waits = chunks + expanded // 128 + tiles * 9 + (chunks * (channels + entry) // 128 if config.streams else 0)
    assert kernel.count("WARPGROUP.DEPBAR") == waits, "a wait for each chunk, k block and tap: not serialized"
    assert kernel.count("SHFL") == 0, "operand A is loaded as it is in memory"
    assert kernel.count("LDSM") == tiles * 9 * config.row_bytes // 32
    assert kernel.count("STG.E.128") == kernel.count("STG") == 4 * config.step_vectors
    lines = [line.replace("IGMMA", "HGMMA") for line in kernel.lines]
    last = max(i for i, line in enumerate(lines) if "WARPGROUP.DEPBAR" in line)
    check_straight_line(lines[: last + 1])


@pytest.mark.parametrize("storage", ["u4", "s8"])
def test_one_convolution_alone(storage):
    config = PairConv(**vars(pair_tile(PairLayout(storage, 512, 2048, 0), 0, 4)))
    pointers = ["y", "x", "added", "weight"]
    signature = {"y": "*i32", "z": None, "x": "*i32", "added": "*i32", "g": "fp32"}
    signature |= dict.fromkeys(("pixels", "tiles", "image", "width", "entry_image", "entry_width", "stride"), "i32")
    kernel = compile_kernel(
        pair_conv, signature | {"maps": None, "weight": "*i8"}, config, pointers, config.warps, 90, maxnreg=128
    )
    assert kernel.stack_bytes == 0 and kernel.count("IGMMA") == 64 and kernel.count("WARPGROUP.DEPBAR") == 4
    lines = [line.replace("IGMMA", "HGMMA") for line in kernel.lines]
    check_straight_line(lines[: max(i for i, line in enumerate(lines) if "WARPGROUP.DEPBAR" in line) + 1])


def test_jobs_of_a_tile():
    assert third_parts(33, 2048, 132) == 4, "132 jobs of 4 iterations"
    assert third_parts(1, 2048, 132) == 8 and third_parts(1000, 2048, 132) in (1, 2, 4, 8)
    assert third_parts(5, 256, 132) == 1, "an even number of iterations"


def test_refusals():
    machine = typical_machine(90)

    def spec(*shape):
        third, last = layers_on_cpu(*shape)
        return third.spec, last.spec

    fits = spec("u4", 128, 512, 128, 0)
    assert not pair_refusals(*fits, (128, 28, 28), machine) and not pair_refusals(*fits, (1, 28, 28), None)
    assert "tiles leave more than a quarter" in pair_refusals(*fits, (1, 28, 28), machine)[0]
    assert "is for sm_90" in pair_refusals(*fits, (128, 28, 28), typical_machine(80))[0]
    assert "channels are 512" in pair_refusals(*spec("u4", 512, 2048, 512, 0), (128, 28, 28), machine)[0]
    assert "the shortcut is 64 channels" in pair_refusals(*spec("u4", 256, 1024, 256, 64), (128, 28, 28), machine)[0]
    for change, reason in (
        ({"relu": False}, "has no ReLU"),
        ({"stride": (2, 2)}, "supported: 1 x 1"),
        ({"y": "s8"}, "one storage"),
    ):
        wrong = dataclasses.replace(fits[0], **change)
        assert any(reason in each for each in pair_refusals(wrong, fits[1], (128, 28, 28), machine))


def test_whole_refusals():
    third, last = (each.spec for each in layers_on_cpu("u4", 128, 512, 128, 0))
    second = dataclasses.replace(third, outputs=128, kernel=(3, 3), padding=(1, 1), residual=None)
    machine, size = typical_machine(90), (128, 28, 28)
    assert not whole_refusals(second, third, last, size, machine)
    assert (
        "3 x 3, as large as its input"
        in whole_refusals(dataclasses.replace(second, stride=(2, 2)), third, last, size, machine)[0]
    )
    assert "wide" in whole_refusals(second, third, last, (128, 56, 56), machine)[0]
    other = [each.spec for each in layers_on_cpu("u4", 128, 512, 128, 256)]
    assert "shortcut" in whole_refusals(second, *other, size, machine)[0]


def layers_on_cpu(storage, channels, expanded, following, entry):
    from tests.pack.test_conv_pair import random_layers

    return random_layers(storage, channels, expanded, following, entry)


def test_on_the_cpu():
    third, last = layers_on_cpu("u4", 128, 256, 128, 256)
    pair = prepare_pair(third, last, (2, 3, 5), "cpu")
    layout = Nhwc64("u4")
    x, entry = torch.randint(0, 16, (2, 128, 3, 5)), torch.randint(0, 16, (2, 256, 6, 10))
    y, z = pair(layout.pack(x), layout.pack(entry))
    wanted = conv_reference(x, third, None, entry)
    assert torch.equal(layout.unpack(y, 256), wanted) and torch.equal(layout.unpack(z, 128), conv_reference(wanted, last))
    second = dataclasses.replace(
        last, weight=last.weight[:, :128].expand(-1, -1, 3, 3).contiguous(), s=last.s / 9, padding=(1, 1)
    )
    third, last = layers_on_cpu("u4", 128, 256, 128, 0)
    added = torch.randint(0, 16, (2, 256, 3, 5))
    y, z = prepare_block(second, third, last, (2, 3, 5), "cpu")(layout.pack(x), layout.pack(added))
    wanted = conv_reference(conv_reference(x, second), third, added)
    assert torch.equal(layout.unpack(y, 256), wanted) and torch.equal(layout.unpack(z, 128), conv_reference(wanted, last))
    with pytest.raises(ValueError, match="does not make an output"):
        pair(layout.pack(x), layout.pack(entry)[:, :3].contiguous())


SIZES = [(3, 28, 28), (5, 9, 11), (1, 1, 1), (2, 14, 14), (7, 16, 12)]


@pytest.mark.gpu
@pytest.mark.parametrize("sms", [2, 132])
@pytest.mark.parametrize(
    ("storage", "channels", "expanded", "following", "entry"), [*PAIRS, ("u4", 128, 512, 256, 0), ("s8", 256, 1024, 512, 0)]
)
def test_codes(storage, channels, expanded, following, entry, sms):
    torch.manual_seed(7)
    third, last = layers(storage, channels, expanded, following, entry)
    launch = pair_launcher(third, last, dataclasses.replace(typical_machine(90), sm_count=sms))
    layout = Nhwc64(storage)
    for n, height, width in SIZES:
        x = codes_of(storage, n, channels, height, width)
        added = (
            codes_of(storage, n, entry, 2 * height - 1, 2 * width) if entry else codes_of(storage, n, expanded, height, width)
        )
        shapes = [(n, height, width, layout.pixel_bytes(count)) for count in (expanded, following)]
        out = tuple(torch.full(shape, 0xA5, dtype=torch.uint8, device="cuda") for shape in shapes)
        launch(layout.pack(x), layout.pack(added), out)
        y = conv_reference(x, third, None if entry else added, added if entry else None)
        z = conv_reference(y, last)
        assert torch.equal(layout.unpack(out[0], expanded), y), (n, height, width)
        assert torch.equal(layout.unpack(out[1], following), z), (n, height, width)
        assert y.unique().numel() > 4 and z.unique().numel() > 4
        again = tuple(torch.empty_like(each) for each in out)
        launch(layout.pack(x), layout.pack(added), again)
        assert torch.equal(again[0], out[0]) and torch.equal(again[1], out[1])


@pytest.mark.gpu
@pytest.mark.parametrize("sms", [2, 132])
@pytest.mark.parametrize(("storage", "channels", "expanded", "following"), [pair[:4] for pair in PAIRS if not pair[4]])
def test_codes_of_whole_blocks(storage, channels, expanded, following, sms):
    torch.manual_seed(8)
    third, last = layers(storage, channels, expanded, following, 0)
    second = layer(channels, channels, 3, 1, 1, storage, storage)
    launch = block_launcher(second, third, last, dataclasses.replace(typical_machine(90), sm_count=sms))
    layout = Nhwc64(storage)
    for n, height, width in (*SIZES, (3, 17, WHOLE_WIDTH)):
        x, added = codes_of(storage, n, channels, height, width), codes_of(storage, n, expanded, height, width)
        shapes = [(n, height, width, layout.pixel_bytes(count)) for count in (expanded, following)]
        out = tuple(torch.full(shape, 0xA5, dtype=torch.uint8, device="cuda") for shape in shapes)
        launch(layout.pack(x).contiguous(), layout.pack(added).contiguous(), out)
        y = conv_reference(conv_reference(x, second), third, added)
        z = conv_reference(y, last)
        assert torch.equal(layout.unpack(out[0], expanded), y), (n, height, width)
        assert torch.equal(layout.unpack(out[1], following), z), (n, height, width)
        assert y.unique().numel() > 4 and z.unique().numel() > 4
        again = tuple(torch.empty_like(each) for each in out)
        launch(layout.pack(x).contiguous(), layout.pack(added).contiguous(), again)
        assert torch.equal(again[0], out[0]) and torch.equal(again[1], out[1])


@pytest.mark.gpu
@pytest.mark.parametrize("sms", [1, 132])
@pytest.mark.parametrize(
    ("storage", "channels", "outputs"), [("u4", 512, 2048), ("s8", 512, 2048), ("u4", 256, 512), ("s8", 128, 512)]
)
def test_codes_of_one_convolution(storage, channels, outputs, sms):
    torch.manual_seed(9)
    third = layer(channels, outputs, 1, 1, 0, storage, storage, storage)
    few, layout = dataclasses.replace(typical_machine(90), sm_count=sms), Nhwc64(storage)
    rows = [row for row in conv_candidates(third.spec, (128, 7, 7), typical_machine(90)) if row.kernel == "sm90/conv_pair"]
    launch = launcher(third.spec, rows[0].layout.pack_layer(third), rows[0], few)
    for n, height, width in ((9, 7, 7), (1, 1, 1), (13, 5, 11)):
        x, added = codes_of(storage, n, channels, height, width), codes_of(storage, n, outputs, height, width)
        y = torch.full((n, height, width, layout.pixel_bytes(outputs)), 0xA5, dtype=torch.uint8, device="cuda")
        launch(layout.pack(x).contiguous(), layout.pack(added).contiguous(), None, y)
        assert torch.equal(layout.unpack(y, outputs), conv_reference(x, third, added)), (n, height, width)
        assert layout.unpack(y, outputs).unique().numel() > 4
