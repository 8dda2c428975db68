"""The convolution kernel for few channels and many outputs: machine code on any machine, codes bit for bit on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.conv_reference import ConvLayer, SecondProduct, conv_reference
from lowbit.kernels.sm90.conv_wide import MULTIPLIERS, SHARED_UNITS, PreparedWide, wide_config, wide_conv, wide_refusals
from lowbit.pack.nhwc64 import CODE_BITS, Nhwc64
from tests.kernels.sass import compile_kernel
from tests.kernels.sm90.test_compile import check_straight_line
from tests.kernels.sm90.test_conv import codes_of, layer


def plain_layer(c, o, x="u4", y="u4", residual=None, second=None, **more):
    s = torch.zeros(o)
    if second is not None:
        second = SecondProduct(torch.zeros(o, second, 1, 1, dtype=torch.int8), s, x, (2, 2))
    return ConvLayer(torch.zeros(o, c, 1, 1, dtype=torch.int8), s, s, x, y, residual=residual, second=second, **more)


def compiled(config):
    second = config.second is not None
    added = second or config.residual is not None
    signature = {"y": "*i32", "s": "*fp32", "b": "*fp32", "g": "fp32", "s2": "*fp32" if second else None}
    signature |= dict.fromkeys(("pixels", "row_units", "tiles_down", "near", "span", "share", "extra"), "i32")
    signature |= {"maps": "*i8", "weight": "*i8", "added_maps": "*i8" if added else None, "weight2": "*i8" if second else None}
    signature |= dict.fromkeys(("out_height", "out_width", "stride_down", "stride_across"), "i32")
    pointers = [name for name in ("y", "s", "b", "s2", "maps", "added_maps", "weight", "weight2") if signature[name]]
    return compile_kernel(wide_conv, signature, config, pointers, config.warps, 90, maxnreg=128)


def tile_loop(code):
    """The loop over tiles of a warpgroup that multiplies: the smallest one with all products."""
    products = [i for i, line in enumerate(code.lines) if "IGMMA" in line]
    return min((b - a, a, b) for a, b in code.loops if a < products[0] and products[-1] < b)[1:]


@pytest.mark.parametrize(
    ("x", "y", "residual", "most"), [("u4", "u4", "u4", 540), ("s8", "s8", "s8", 550), ("u4", "s8", "u4", 600)]
)
def test_machine_code(x, y, residual, most):
    config = wide_config(plain_layer(256, 1024, x, y, residual))
    code = compiled(config)
    assert code.registers == 128 and code.count("USETMAXREG") == 2 and code.stack_bytes <= 16
    assert code.count("IGMMA") == 8 and code.count("WARPGROUP.DEPBAR") == config.steps, "not serialized"
    assert code.opcodes["UTMALDG.2D"] == 1 + 256 * CODE_BITS[x] // 8 // config.row_bytes, "x and residual codes"
    assert code.count("BAR.SYNC") == 1, "warpgroups meet once, when barriers are made"
    first, last = tile_loop(code)
    lines = code.lines[first : last + 1]
    assert len(lines) <= most, "instructions for the 64 outputs of a thread"
    # For a tile nothing is loaded but residual codes: constants are in registers.
    loads = sum("LDS." in line for line in lines)
    assert loads == 2 * CODE_BITS[residual] // config.loaded_words and not any("LDG" in line for line in lines)
    check_straight_line(2 * [line.replace("IGMMA", "HGMMA") for line in lines])


@pytest.mark.parametrize("x", ["u4", "s8"])
def test_two_products(x):
    config = wide_config(plain_layer(128, 512, x, x, second=256))
    code = compiled(config)
    assert config.second_steps == 2 * config.steps and code.count("BAR.SYNC") == 1
    assert code.count("IGMMA") == 12 and code.count("WARPGROUP.DEPBAR") == config.steps + config.second_steps
    assert code.count("UTMALDG.4D.IM2COL") > 0 and code.stack_bytes <= 96
    first, last = tile_loop(code)
    check_straight_line(2 * [line.replace("IGMMA", "HGMMA") for line in code.lines[first : last + 1]])


def test_room_in_shared_memory():
    most = plain_layer(512, 2048, "s8", "s8", "s8")
    config = wide_config(most)
    assert config.slots == 2 and config.barrier_unit < SHARED_UNITS
    # Weights of two tiles of outputs, then x and residual codes of three warpgroups.
    assert config.barrier_unit == 2 * 64 + MULTIPLIERS * (config.stages * 8 + config.residual_stages * 8)
    assert wide_config(plain_layer(512, 2048, second=1024)).slots == 1
    assert not wide_refusals(most)
    assert "no room" in wide_refusals(plain_layer(2048, 512))[0]


@pytest.mark.parametrize(
    ("conv", "part"),
    [
        (plain_layer(128, 64), "64 outputs"),
        (plain_layer(128, 128 * 65), "outputs"),
        (plain_layer(128, 128, padding=(1, 1)), "windows"),
        (plain_layer(128, 128, stride=(2, 2)), "windows"),
        (plain_layer(128, 128, y="f32"), "f32"),
    ],
)
def test_refusals(conv, part):
    assert part in " ".join(wide_refusals(conv))


CASES = [
    (256, 512, (5, 14, 13), "residual"),
    (64, 128, (1, 1, 1), "residual"),
    (512, 1024, (33, 7, 7), "residual"),
    (250, 120, (3, 9, 11), "residual"),
    (192, 640, (9, 23, 17), "residual"),
    (384, 256, (33, 7, 7), None),
    (128, 512, (8, 28, 28), (256, 2)),
    (128, 250, (5, 9, 13), (256, 1)),
    (512, 2048, (33, 7, 7), (1024, 2)),
    (64, 128, (1, 3, 3), (192, 3)),
]
"""Channels, outputs, size, and what is added: a residual, nothing, or a product (channels, stride)."""


@pytest.mark.gpu
@pytest.mark.parametrize(("x", "y"), [("u4", "u4"), ("s8", "s8"), ("u4", "s8"), ("s8", "u4")])
@pytest.mark.parametrize(("c", "o", "size", "added"), CASES, ids=str)
def test_codes(c, o, size, added, x, y):
    torch.manual_seed(8)
    second = other = residual = None
    if isinstance(added, tuple):
        w2 = torch.randint(-128, 128, (o, added[0], 1, 1), dtype=torch.int8, device="cuda")
        second = SecondProduct(w2, 0.3 * layer(added[0], o, 1, 1, 0, x, y).s, x, (added[1], added[1]))
        other = codes_of(x, size[0], added[0], size[1] * added[1] - (added[1] > 1), size[2] * added[1])
    kind = x if added == "residual" else None
    if added == "residual":
        residual = codes_of(kind, size[0], o, *size[1:])
    conv = layer(c, o, 1, 1, 0, x, y, kind, second=second)
    prepared = PreparedWide(conv, torch.cuda.get_device_properties(0).multi_processor_count)
    codes = codes_of(x, size[0], c, *size[1:])
    packed = Nhwc64(x).pack(codes)
    given = [None if t is None else Nhwc64(x).pack(t) for t in (residual, other)]
    out = torch.full(prepared.output_shape(tuple(packed.shape)), 0xA5, dtype=torch.uint8, device="cuda")
    prepared(packed, *given, out)
    assert torch.equal(Nhwc64(y).unpack(out, o), conv_reference(codes, conv, residual, other))
    assert not Nhwc64(y).unpack(out, out.shape[3] * 8 // CODE_BITS[y])[:, o:].any(), "filled up with 0"
    assert torch.equal(prepared(packed, *given), out)


@pytest.mark.gpu
@pytest.mark.parametrize(("x", "y", "residual"), [("u4", "u4", "s8"), ("s8", "s8", "u4")])
def test_residuals_of_another_storage(x, y, residual):
    torch.manual_seed(9)
    conv = layer(128, 256, 1, 1, 0, x, y, residual)
    codes, added = codes_of(x, 5, 128, 13, 11), codes_of(residual, 5, 256, 13, 11)
    prepared = PreparedWide(conv, torch.cuda.get_device_properties(0).multi_processor_count)
    out = prepared(Nhwc64(x).pack(codes), Nhwc64(residual).pack(added))
    assert torch.equal(Nhwc64(y).unpack(out, 256), conv_reference(codes, conv, added))
