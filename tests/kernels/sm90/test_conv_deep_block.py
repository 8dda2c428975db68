"""Bottleneck blocks of 128 and 256 channels in one kernel, and third convolutions alone: machine code without a GPU; on one,
codes bit-equal to the layers' references."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")


from lowbit.formats.conv import ProductSpec
from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose.conv import DEEP_BLOCK_WIDTH, choose_conv, deep_block_refusals, deep_block_tile, third_parts
from lowbit.kernels.reference.conv import conv_reference
from lowbit.kernels.sm90.conv_deep_block import DeepBlockConv, SharedStages, deep_block_conv
from lowbit.ops.conv import launcher
from lowbit.ops.conv_block import block_launcher, prepare_block
from lowbit.pack.conv_deep_block import DeepBlockLayout
from lowbit.pack.nhwc64 import Nhwc64
from tests.kernels.parts.plain import operands
from tests.kernels.sass import compile_kernel
from tests.kernels.sm90.test_compile import check_straight_line
from tests.kernels.sm90.test_conv import codes_of, layer
from tests.pack.test_conv_deep_block import random_layers

SHAPES = [(128, 512, 128, 28), (256, 1024, 256, 14), (128, 512, 256, 28), (256, 1024, 512, 14)]
"""As in ResNet-50: channels of x, y and z, width of the images."""

BLOCKS = [(storage, *shape) for storage in ("u4", "s8") for shape in SHAPES]

INTEGERS = ("pixels", "tiles", "height", "width")


def layers(storage, channels, expanded, following):
    third = layer(channels, expanded, 1, 1, 0, storage, storage, storage)
    return layer(channels, channels, 3, 1, 1, storage, storage), third, layer(expanded, following, 1, 1, 0, storage, storage)


@pytest.mark.parametrize(("storage", "channels", "expanded", "following", "width"), BLOCKS)
def test_machine_code(storage, channels, expanded, following, width):
    config = DeepBlockConv(**vars(deep_block_tile(DeepBlockLayout(storage, channels, expanded, following), width)))
    signature = {"y": "*i32", "z": "*i32", "x": None, "added": "*i32", "g": "fp32"} | dict.fromkeys(INTEGERS, "i32")
    signature |= {"maps": "*i8", "weight": "*i8"}
    pointers = ["y", "z", "maps", "added", "weight"]
    kernel = compile_kernel(deep_block_conv, signature, config, pointers, config.warps, 90, maxnreg=128)
    assert kernel.stack_bytes <= 40 and 50 * (kernel.count("LDL") + kernel.count("STL")) < len(kernel.lines)
    chunks, tiles = 128 // config.chunk, channels // 128
    products = config.unroll * channels // 32 * chunks + expanded // 32 + tiles * 9 * 4
    assert kernel.count("IGMMA") == products, "taps of 128 channels, iterations of y, a pass of z"
    waits = config.unroll * chunks + expanded // 128 + tiles * 9
    assert kernel.count("WARPGROUP.DEPBAR") == waits, "a wait for each chunk, k block and tap: not serialized"
    assert kernel.count("SHFL") == 0, "operand A is loaded as it is in memory"
    assert sum("UBLKCP" in line and "MULTICAST" in line for line in kernel.lines) >= 2, "weights go to both blocks"
    assert kernel.count("UCGABAR_ARV") == kernel.count("UCGABAR_WAIT") == 2, "at the start and at the end"
    assert kernel.count("LDSM") == tiles * 9 * config.row_bytes // 32
    assert kernel.count("STG.E.128") == kernel.count("STG") == 2 * (config.unroll + 1) * config.step_vectors
    lines = [line.replace("IGMMA", "HGMMA") for line in kernel.lines]
    last = max(i for i, line in enumerate(lines) if "WARPGROUP.DEPBAR" in line)
    check_straight_line(lines[: last + 1])


@pytest.mark.parametrize("storage", ["u4", "s8"])
def test_one_convolution_alone(storage):
    config = DeepBlockConv(**vars(deep_block_tile(DeepBlockLayout(storage, 512, 2048, 0), 0, 4)))
    pointers = ["y", "x", "added", "weight"]
    signature = {"y": "*i32", "z": None, "x": "*i32", "added": "*i32", "g": "fp32"}
    signature |= dict.fromkeys(INTEGERS, "i32")
    kernel = compile_kernel(
        deep_block_conv, signature | {"maps": None, "weight": "*i8"}, config, pointers, config.warps, 90, maxnreg=128
    )
    assert kernel.stack_bytes <= 8 and kernel.count("IGMMA") == 64 and kernel.count("WARPGROUP.DEPBAR") == 4
    lines = [line.replace("IGMMA", "HGMMA") for line in kernel.lines]
    check_straight_line(lines[: max(i for i, line in enumerate(lines) if "WARPGROUP.DEPBAR" in line) + 1])


def test_blocks_of_a_cluster_share_stages():
    ring = SharedStages(50000, 5, 12)
    assert "selp.b32 count, 1, 24, q;" in ring.init, "the warps of both blocks"
    assert operands(ring.give) == {0, 1, 2} and f"add.u32 at, at, {50000 + 8 * 5};" in ring.give
    text = ring.fill_half(16384)
    assert operands(text) == {0, 1, 2, 3, 4} and f"[bar+{50000 + 8 * 5}], $3" in text, "its empty barrier"
    assert "[bar+50000], 16384;" in text and "[to], [from], 8192, [bar], both;" in text, "expects both halves"
    assert deep_block_tile(DeepBlockLayout("u4", 128, 512, 128), 28).cluster == 2
    assert deep_block_tile(DeepBlockLayout("u4", 512, 2048, 0)).cluster == 1, "jobs of neighbours read other weights"


def test_jobs_of_a_tile():
    assert third_parts(33, 2048, 132) == 4, "132 jobs of 4 iterations"
    assert third_parts(1, 2048, 132) == 8 and third_parts(1000, 2048, 132) in (1, 2, 4, 8)
    assert third_parts(5, 256, 132) == 1, "an even number of iterations"


def test_refusals():
    second, third, last = (each.spec for each in random_layers("u4", 128, 512, 128))
    machine, size = typical_machine(90), (128, 28, 28)
    assert not deep_block_refusals(second, third, last, size, machine)
    assert not deep_block_refusals(second, third, last, (1, 28, 28), None)
    shortcut = ProductSpec("u4", "s8", 256, (1, 1), (2, 2), (0, 0))
    for number, change, reason in (
        (0, {"stride": (2, 2)}, "3 x 3, as large as its input"),
        (1, {"relu": False}, "has no ReLU"),
        (1, {"stride": (2, 2)}, "supported: 1 x 1"),
        (1, {"residual": "s8"}, "one storage"),
        (1, {"second": shortcut, "residual": None}, "the block has a shortcut convolution"),
        (2, {"residual": "u4"}, "only the third convolution adds something"),
        (2, {"channels": 256}, "does not read what the third one writes"),
    ):
        specs = [second, third, last]
        specs[number] = dataclasses.replace(specs[number], **change)
        assert any(reason in each for each in deep_block_refusals(*specs, size, machine)), reason
    assert "wide" in deep_block_refusals(second, third, last, (128, 56, 56), machine)[0]
    assert "tiles leave more than a quarter" in deep_block_refusals(second, third, last, (1, 28, 28), machine)[0]
    assert "is for sm_90" in deep_block_refusals(second, third, last, size, typical_machine(80))[0]
    wide = [each.spec for each in random_layers("u4", 512, 2048, 512)]
    assert "channels are 512" in deep_block_refusals(*wide, size, machine)[0]


def test_on_the_cpu():
    second, third, last = random_layers("u4", 128, 256, 128)
    layout = Nhwc64("u4")
    x, added = torch.randint(0, 16, (2, 128, 3, 5)), torch.randint(0, 16, (2, 256, 3, 5))
    y, z = prepare_block(second, third, last, (2, 3, 5), "cpu")(layout.pack(x), layout.pack(added))
    wanted = conv_reference(conv_reference(x, second), third, added)
    assert torch.equal(layout.unpack(y, 256), wanted) and torch.equal(layout.unpack(z, 128), conv_reference(wanted, last))


SIZES = [(3, 28, 28), (5, 9, 11), (1, 1, 1), (2, 14, 14), (7, 16, 12)]


@pytest.mark.gpu
@pytest.mark.parametrize("sms", [2, 132])
@pytest.mark.parametrize(("storage", "channels", "expanded", "following", "_width"), BLOCKS)
def test_codes(storage, channels, expanded, following, _width, sms):
    torch.manual_seed(8)
    second, third, last = layers(storage, channels, expanded, following)
    launch = block_launcher(second, third, last, dataclasses.replace(typical_machine(90), sm_count=sms))
    layout = Nhwc64(storage)
    for n, height, width in (*SIZES, (3, 17, DEEP_BLOCK_WIDTH)):
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
    ("storage", "channels", "outputs"), [("u4", 512, 2048), ("s8", 512, 2048), ("u4", 512, 256), ("s8", 512, 512)]
)
def test_codes_of_one_convolution(storage, channels, outputs, sms):
    torch.manual_seed(9)
    third = layer(channels, outputs, 1, 1, 0, storage, storage, storage)
    few, layout = dataclasses.replace(typical_machine(90), sm_count=sms), Nhwc64(storage)
    chosen = choose_conv(third.spec, (128, 7, 7), typical_machine(90))
    assert chosen.kernel == "sm90/conv_deep_block"
    launch = launcher(third.spec, chosen.layout.pack_layer(third), chosen, few)
    for n, height, width in ((9, 7, 7), (1, 1, 1), (13, 5, 11)):
        x, added = codes_of(storage, n, channels, height, width), codes_of(storage, n, outputs, height, width)
        y = torch.full((n, height, width, layout.pixel_bytes(outputs)), 0xA5, dtype=torch.uint8, device="cuda")
        launch(layout.pack(x).contiguous(), layout.pack(added).contiguous(), None, y)
        assert torch.equal(layout.unpack(y, outputs), conv_reference(x, third, added)), (n, height, width)
        assert layout.unpack(y, outputs).unique().numel() > 4
