"""The depthwise kernel: codes against the reference, without a GPU in Triton's interpreter; weights in memory; machine code."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats.conv import ConvLayer, code_range, requantize
from lowbit.kernels.choose.depthwise import depthwise_refusals, depthwise_tile, vectors_of_block
from lowbit.kernels.reference.conv import conv_reference
from lowbit.pack.depthwise import DepthwiseTaps
from lowbit.pack.nhwc64 import Nhwc64
from tests.kernels.interpreter import interpreted
from tests.kernels.sass import TRITON, compile_triton

triton = pytest.importorskip("triton", reason="the kernel is written in Triton")
from lowbit.kernels.sm80 import depthwise  # noqa: E402
from lowbit.kernels.sm80.depthwise import PreparedDepthwise, depthwise_kernel  # noqa: E402
from tests.kernels.parts.test_pixel_words import replace_instructions  # noqa: E402

CASES = [
    # window, stride, padding, x, y, ReLU, channels, size; channels pad to blocks of 64, sizes leave partial tiles
    ((3, 3), (1, 1), (1, 1), "s8", "s8", True, 70, (9, 11)),
    ((3, 3), (2, 2), (1, 1), "s8", "u4", True, 8, (7, 10)),
    ((4, 4), (2, 2), (1, 1), "u4", "u4", True, 64, (8, 6)),
    ((5, 5), (1, 1), (2, 2), "u4", "s8", False, 100, (7, 7)),
    ((6, 6), (2, 2), (2, 2), "s8", "s8", True, 16, (8, 14)),
    ((7, 7), (1, 1), (3, 3), "s8", "f16", False, 40, (7, 5)),
    ((1, 3), (1, 2), (0, 1), "u4", "f32", True, 9, (3, 9)),
    ((1, 1), (1, 1), (0, 0), "s8", "s8", False, 64, (2, 3)),
    ((3, 3), (1, 1), (1, 1), "s8", "s8", True, 96, (5, 7)),
    ((3, 3), (1, 1), (1, 1), "u4", "u4", True, 32, (5, 7)),
]  # fmt: skip


def layer(kernel, stride, padding, x, y, relu, channels, on="cpu", bits=8):
    """A depthwise convolution whose outputs use the whole range of codes."""
    wide = 1 << bits - 1
    weight = torch.randint(-wide, wide, (channels, 1, *kernel), dtype=torch.int8)
    deviation = (kernel[0] * kernel[1]) ** 0.5 * wide * 0.58 * {"u4": 8.8, "s8": 74}[x]
    scale = (5.0 if y == "u4" else 60.0) / deviation * (torch.rand(channels) + 0.5)
    s, b, _ = requantize(scale, 3 * torch.randn(channels), 1.0, 1.0, y)
    return ConvLayer(weight, s, b, x, y, stride, padding, relu, groups=channels).to(on)


def check(case, on="cpu", images=2):
    torch.manual_seed(0)
    *options, size = case
    conv = layer(*options, on)
    low, high = code_range(conv.x)
    codes = torch.randint(low, high + 1, (images, conv.channels, *size), dtype=torch.int32, device=on)
    prepared = PreparedDepthwise(conv.spec, DepthwiseTaps().pack_layer(conv), depthwise_tile(conv.spec))
    x = Nhwc64(conv.x).pack(codes)
    out = torch.empty(
        prepared.output_shape(tuple(x.shape)), dtype={"f16": torch.half, "f32": torch.float}.get(conv.y, torch.uint8), device=on
    )
    out.view(torch.uint8).fill_(0xA5)
    prepared(x, out=out)
    wanted = conv_reference(codes, conv)
    if conv.y in ("u4", "s8"):
        padding = torch.nn.functional.pad(wanted, (0, 0, 0, 0, 0, -conv.channels % 64))
        assert torch.equal(Nhwc64(conv.y).unpack(out, padding.shape[1]), padding), case
        assert wanted.unique().numel() > 12
    else:
        got = out.permute(0, 3, 1, 2)
        # Triton's interpreter before 3.7 rounds twice in tl.fma
        if on == "cpu" and TRITON < (3, 7) and got.dtype == torch.float32:
            torch.testing.assert_close(got, wanted, rtol=2**-22, atol=2**-22 * float(wanted.abs().max()))
        else:
            assert torch.equal(got, wanted), case


def check_without_a_gpu():
    replace_instructions(depthwise)
    for case in CASES:
        check(case)


def test_the_codes_in_tritons_interpreter():
    interpreted(check_without_a_gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_codes_on_a_gpu(case):
    check(case, "cuda", images=5)


def test_weights_are_unpacked():
    weight = torch.randint(-128, 128, (70, 1, 3, 5), dtype=torch.int8)
    packed = DepthwiseTaps().pack(weight)
    assert packed.shape == (3, 2, 8, 16, 4)
    assert torch.equal(DepthwiseTaps().unpack(packed, tuple(weight.shape)), weight)
    assert torch.equal(packed[1, 1, 3, 2], torch.tensor([weight[19, 0, 1, 4], 0, 0, 0], dtype=torch.int8))
    with pytest.raises(ValueError, match="each output reads 2 channels"):
        DepthwiseTaps().pack(torch.zeros(4, 2, 3, 3, dtype=torch.int8))


def test_windows_that_are_too_large_are_refused():
    spec = layer((17, 17), (1, 1), (8, 8), "s8", "s8", True, 8).spec
    assert depthwise_refusals(spec) == (
        "a window of 289 taps, at most 256 are summed exactly",
        "a window of (17, 17) covers 340 pixels of a thread, which has registers for 64",
    )
    assert depthwise_refusals(layer((7, 7), (1, 1), (3, 3), "s8", "s8", True, 8).spec) == ()
    assert "not one of one each" in depthwise_refusals(ConvLayer(
        torch.zeros(8, 2, 1, 1, dtype=torch.int8), torch.ones(8), torch.zeros(8), "s8", "s8", groups=4
    ).spec)[0]  # fmt: skip


def test_blocks_leave_out_padding():
    """A case is (vectors of 8 channels in a stored pixel, those without padding): 64 of 64 channels, 96 of 128, 144 of 192,
    then 32, 40 and 72 channels.
    """
    assert [vectors_of_block(*known) for known in ((8, 8), (16, 12), (24, 18), (8, 4), (8, 5), (16, 9))] == [8, 4, 4, 4, 8, 4]


@pytest.mark.parametrize(("capability", "x", "y", "window", "stride", "of_block"), [
    (90, "s8", "s8", 3, 1, 8), (80, "s8", "s8", 5, 1, 8), (90, "s8", "s8", 6, 2, 8), (90, "u4", "u4", 3, 1, 8),
    (90, "s8", "s8", 3, 1, 4), (90, "s8", "s8", 4, 2, 4),
])  # fmt: skip
def test_machine_code(capability, x, y, window, stride, of_block):
    """Nothing spills. Four taps take one dp4a. No load of a pixel waits for another load."""
    conv = layer((window, window), (stride, stride), (window // 2,) * 2, x, y, True, 192)
    tile = depthwise_tile(conv.spec)
    constants = dict(VECTORS=24, OF_BLOCK=of_block, KH=window, KW=window, SH=stride, SW=stride, PH=window // 2, PW=window // 2)
    constants |= dict(ROWS=tile.rows, COLUMNS=tile.columns, X_FOUR=x == "u4", Y_FOUR=y == "u4", VALUES=False, RELU=True)
    signature = {"y": "*i32" if y == "u4" else "*i64", "x": "*i32" if x == "u4" else "*i64"}
    signature |= {"weight": "*i32", "s": "*fp32", "b": "*fp32"}
    signature |= dict.fromkeys(("height", "width", "out_height", "out_width", "across", "down", "total", "channels"), "i32")
    kernel = compile_triton(depthwise_kernel, signature, constants, ("y", "x", "weight", "s", "b"), 4, capability)
    pixels = ((tile.rows - 1) * stride + window) * ((tile.columns - 1) * stride + window)
    assert kernel.stack_bytes == 0 and kernel.registers <= 255
    assert kernel.count("IDP.4A") == 8 * tile.rows * tile.columns * window * -(-window // 4)
    if x == "s8":
        stores = tile.rows * tile.columns * (2 if of_block == 4 else 1)  # of codes, and of zeros
        assert kernel.opcodes["LDG.E.64"] == pixels and kernel.opcodes["STG.E.64"] == stores
    assert kernel.registers <= 168
