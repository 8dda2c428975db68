"""Depthwise kernel of 4 channels a thread: codes against the reference, without a GPU in Triton's interpreter; machine code."""

from __future__ import annotations

import pytest
import torch

from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose.conv import choose_conv
from lowbit.kernels.choose.depthwise import QUAD_TILES, DepthwiseTile, quad_refusals, quad_tile, window_without_zeros
from lowbit.kernels.reference.conv import conv_reference
from lowbit.ops import conv as conv_ops
from lowbit.pack.depthwise import DepthwiseTaps
from lowbit.pack.nhwc64 import Nhwc64
from tests.kernels.interpreter import interpreted
from tests.kernels.sass import compile_triton

triton = pytest.importorskip("triton", reason="the kernel is written in Triton")
import triton.language as tl  # noqa: E402

from lowbit.kernels.sm80 import depthwise_quads  # noqa: E402
from lowbit.kernels.sm80.depthwise_quads import PreparedDepthwiseQuads, depthwise_quads_kernel  # noqa: E402
from tests.kernels.parts.test_pixel_words import replace_instructions  # noqa: E402
from tests.kernels.sm80.test_depthwise import layer  # noqa: E402

CASES = [
    # window, stride, padding, ReLU, channels, size, row and column of zeros, tile; partial tiles, padded channels
    ((3, 3), 1, 1, True, 70, (13, 5), None, (14, 2)),
    ((3, 3), 1, 1, False, 96, (7, 7), None, (7, 2)),
    ((3, 3), 2, 1, True, 32, (9, 7), None, (7, 2)),
    ((4, 4), 2, 1, True, 64, (8, 10), (3, 3), (4, 2)),
    ((5, 5), 1, 2, True, 64, (3, 7), None, (4, 4)),
    ((5, 5), 1, 2, False, 32, (7, 6), None, (7, 2)),
    ((6, 6), 2, 2, True, 40, (12, 10), (0, 0), (4, 2)),
    ((6, 6), 2, 2, True, 16, (6, 5), (0, 5), (4, 2)),
]  # fmt: skip


def layer_of(case, on="cpu"):
    kernel, stride, padding, relu, channels, _, zeros, _ = case
    conv = layer(kernel, (stride, stride), (padding, padding), "s8", "s8", relu, channels, on)
    if zeros is not None:
        conv.weight[:, :, zeros[0], :] = 0
        conv.weight[:, :, :, zeros[1]] = 0
    return conv


def check(case, on="cpu", images=2):
    torch.manual_seed(0)
    conv, size, tile = layer_of(case, on), case[5], case[7]
    codes = torch.randint(-128, 128, (images, conv.channels, *size), dtype=torch.int32, device=on)
    assert quad_refusals(conv.spec, conv.weight) == ()
    prepared = PreparedDepthwiseQuads(conv.spec, DepthwiseTaps().pack_layer(conv), conv.weight)
    x = Nhwc64("s8").pack(codes)
    out = torch.full(prepared.output_shape(tuple(x.shape)), 0xA5, dtype=torch.uint8, device=on)
    assert quad_tile(conv.spec, prepared.window, (out.shape[1], out.shape[2])) == DepthwiseTile(*tile, 4)
    prepared(x, out=out)
    wanted = conv_reference(codes, conv)
    padded = torch.nn.functional.pad(wanted, (0, 0, 0, 0, 0, -conv.channels % 64))
    assert torch.equal(Nhwc64("s8").unpack(out, padded.shape[1]), padded), case
    assert wanted.min() == (0 if conv.relu else -128) and wanted.max() == 127, "both ends of the range are tested"


@triton.jit
def plain_clamped_fma(a, b, c):
    """What the instruction computes."""
    return tl.minimum(tl.maximum(tl.fma(a, b, c), 0.0), 1.0)


@triton.jit
def plain_at_most_127(word):
    """What the instructions compute for bytes of 0 to 128."""
    return word - ((word >> 7) & 0x01010101)


def check_without_a_gpu():
    replace_instructions(depthwise_quads)
    depthwise_quads.clamped_fma, depthwise_quads.at_most_127 = plain_clamped_fma, plain_at_most_127
    for case in CASES:
        check(case)


def test_the_codes_in_tritons_interpreter():
    interpreted(check_without_a_gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_codes_on_a_gpu(case):
    check(case, "cuda", images=5)


def test_zeros_at_the_border_are_left_out():
    weight = torch.ones(8, 1, 4, 4, dtype=torch.int8)
    assert window_without_zeros(weight) == (4, (0, 0)), "no zeros"
    weight[:, :, 0] = 0
    assert window_without_zeros(weight) == (4, (0, 0)), "a row, no column"
    weight[:, :, :, 3] = 0
    assert window_without_zeros(weight) == (3, (1, 0))
    assert window_without_zeros(torch.zeros(8, 1, 5, 5, dtype=torch.int8)) == (5, (0, 0))


def test_layers_of_other_forms_are_refused():
    conv = layer((4, 4), (2, 2), (1, 1), "u4", "s8", True, 8)
    assert quad_refusals(conv.spec, conv.weight) == (
        "codes u4 to s8, it takes s8 to s8",
        "a window of (4, 4) with stride (2, 2); without borders of zeros it takes 3 x 3 / 1, 3 x 3 / 2, 5 x 5 / 1, 5 x 5 / 2",
    )


def test_constants_of_four_channels_are_neighbours():
    values = torch.arange(70.0)
    assert torch.equal(DepthwiseTaps(4).constants(values)[:, :17], torch.arange(68.0).reshape(17, 4).T)
    assert DepthwiseTaps(4).pack(torch.ones(70, 1, 5, 5, dtype=torch.int8)).shape == (5, 2, 4, 32, 4)


TILES = [(*key, tile) for key, tiles in QUAD_TILES.items() for tile in tiles]


@pytest.mark.parametrize(("window", "stride", "tile"), TILES, ids=str)
def test_machine_code(window, stride, tile):
    """Nothing spills; 9 taps take 3 dp4a, 25 taps 7; no pixel is loaded twice, and instructions are within 6 % of the count."""
    constants = dict(VECTORS=24, OF_BLOCK=4, K=window, S=stride, PH=1, PW=1, ROWS=tile.rows, COLUMNS=tile.columns, RELU=True)
    signature = {"y": "*i32", "x": "*i32", "weight": "*i32", "s": "*fp32", "b": "*fp32"}
    signature |= dict.fromkeys(("height", "width", "out_height", "out_width", "across", "down", "total"), "i32")
    kernel = compile_triton(depthwise_quads_kernel, signature, constants, ("y", "x", "weight", "s", "b"), 4, 90)
    outputs = tile.rows * tile.columns
    pixels = ((tile.rows - 1) * stride + window) * ((tile.columns - 1) * stride + window)
    assert kernel.stack_bytes == 0 and kernel.registers <= 128 and kernel.shared_bytes == 0
    assert kernel.count("IDP.4A") == 4 * outputs * {3: 3, 5: 7}[window]
    assert kernel.opcodes["LDG.E"] == pixels + 4 * (2 + {3: 3, 5: 10}[window]) and kernel.opcodes["STG.E"] == 2 * outputs
    assert kernel.count("FFMA.SAT") == 4 * outputs and kernel.count("FMNMX") == 0
    assert sum(kernel.opcodes.values()) <= 1.06 * QUAD_TILES[window, stride][tile]


@pytest.mark.parametrize(("form", "y", "name"), [
    ("vectors", "s8", "PreparedDepthwise"), ("quads", "s8", "PreparedDepthwiseQuads"), ("quads", "u4", "PreparedDepthwise")
])  # fmt: skip
def test_the_form_is_chosen(monkeypatch, form, y, name):
    monkeypatch.setattr(conv_ops, "DEPTHWISE_FORM", form)
    conv = layer((3, 3), (1, 1), (1, 1), "s8", y, True, 70)
    machine = typical_machine(90)
    choice = choose_conv(conv.spec, (2, 7, 7), machine)
    plan = conv_ops.launcher(conv.spec, choice.layout.pack_layer(conv), choice, machine)
    assert type(plan).__name__ == name
