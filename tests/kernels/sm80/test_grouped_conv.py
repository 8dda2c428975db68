"""The kernel of convolutions in groups: codes against the reference, without a GPU in Triton's interpreter; machine code."""

from __future__ import annotations

import pytest
import torch

from lowbit.formats.conv import ConvLayer, code_range, requantize, stored_dtype
from lowbit.kernels.reference.conv import conv_reference
from lowbit.pack.grouped import GroupedBlocks
from lowbit.pack.nhwc64 import Nhwc64
from tests.kernels.interpreter import interpreted
from tests.kernels.sass import compile_triton

pytest.importorskip("triton", reason="the kernel is written in Triton")
from lowbit.kernels.sm80.grouped_conv import PreparedGrouped, grouped_kernel

CASES = [
    # groups, channels, outputs, window, stride, padding, x, y, ReLU, size
    (3, 72, 72, (3, 3), (1, 1), (1, 1), "s8", "s8", True, (5, 6)),  # groups of 24 straddle blocks of 64
    (2, 128, 192, (3, 3), (2, 2), (1, 1), "u4", "u4", True, (7, 9)),
    (4, 160, 36, (1, 3), (1, 2), (0, 1), "u4", "s8", False, (4, 9)),
    (40, 40, 80, (3, 3), (1, 1), (1, 1), "s8", "u4", True, (5, 4)),  # a depthwise one with two outputs per channel
    (2, 24, 30, (1, 1), (1, 1), (0, 0), "s8", "f16", False, (3, 5)),
]


def layer(groups, channels, outputs, kernel, stride, padding, x, y, relu, on="cpu"):
    weight = torch.randint(-128, 128, (outputs, channels // groups, *kernel), dtype=torch.int8)
    deviation = weight[0].numel() ** 0.5 * 74 * {"u4": 8.8, "s8": 74}[x]
    scale = (60.0 if y != "u4" else 5.0) / deviation * (torch.rand(outputs) + 0.5)
    s, b, _ = requantize(scale, 3 * torch.randn(outputs), 1.0, 1.0, y)
    return ConvLayer(weight, s, b, x, y, stride, padding, relu, groups=groups).to(on)


def layout_of(conv):
    return GroupedBlocks(conv.x, conv.groups, conv.channels, conv.spec.outputs)


def check(case, on="cpu", images=2):
    torch.manual_seed(0)
    *options, size = case
    conv = layer(*options, on)
    low, high = code_range(conv.x)
    codes = torch.randint(low, high + 1, (images, conv.channels, *size), dtype=torch.int32, device=on)
    prepared = PreparedGrouped(conv.spec, layout_of(conv).pack_layer(conv), layout_of(conv))
    x = Nhwc64(conv.x).pack(codes)
    out = torch.empty(prepared.output_shape(tuple(x.shape)), dtype=stored_dtype(conv.y), device=on)
    out.view(torch.uint8).fill_(0xA5)
    prepared(x, out=out)
    wanted = conv_reference(codes, conv)
    if conv.y in ("u4", "s8"):
        padded = torch.nn.functional.pad(wanted, (0, 0, 0, 0, 0, -wanted.shape[1] % 64))
        assert torch.equal(Nhwc64(conv.y).unpack(out, padded.shape[1]), padded), case
        assert wanted.unique().numel() > 12
    else:
        assert torch.equal(out.permute(0, 3, 1, 2), wanted), case


def check_without_a_gpu():
    for case in CASES:
        check(case)


def test_the_codes_in_tritons_interpreter():
    interpreted(check_without_a_gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_codes_on_a_gpu(case):
    check(case, "cuda", images=5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights_are_unpacked(case):
    conv = layer(*case[:-1])
    layout = layout_of(conv)
    packed = layout.pack(conv.weight)
    assert torch.equal(layout.unpack(packed, tuple(conv.weight.shape)), conv.weight)
    assert int(packed.count_nonzero()) == int(conv.weight.count_nonzero())


def test_blocks_of_channels_that_64_outputs_read():
    assert GroupedBlocks("s8", 3, 72, 72).span == 2 and GroupedBlocks("s8", 64, 64, 64).span == 1
    wide = GroupedBlocks("s8", 2, 256, 256)
    assert wide.span == 2 and [wide.first_block(o) for o in (0, 64, 128, 192)] == [0, 0, 2, 2]
    with pytest.raises(ValueError, match=r"weights are \[256, 128, R, S\]"):
        wide.pack(torch.zeros(256, 64, 3, 3, dtype=torch.int8))


@pytest.mark.parametrize(("capability", "instruction"), [(90, "IGMMA.64"), (80, "IMMA.16832.S8.S8")])
def test_machine_code(capability, instruction):
    constants = dict(INPUTS=24, OUTPUTS=24, SPAN=2, BLOCKS=2, OUT_BLOCKS=2, KH=3, KW=3, SH=1, SW=1, PH=1, PW=1)
    constants |= dict(X_FOUR=True, Y_FOUR=True, VALUES=False, RELU=True, PIXELS=128)
    signature = {"y": "*i8", "x": "*i8", "weight": "*i8", "s": "*fp32", "b": "*fp32"}
    signature |= dict.fromkeys(("height", "width", "out_height", "out_width", "total", "channels"), "i32")
    kernel = compile_triton(grouped_kernel, signature, constants, ("y", "x", "weight", "s", "b"), 4, capability, num_stages=3)
    assert kernel.stack_bytes == 0 and kernel.registers <= 128 and kernel.shared_bytes <= 40_960, "four blocks an SM"
    assert kernel.count(instruction) > 0 and kernel.count("LDGSTS") > 0 and kernel.opcodes["STG.E.128"] == 2
