"""The convolution kernels: machine code without a GPU, and codes bit-equal to the reference on one."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")


from benchmarks.resnet50 import blocks
from lowbit.formats.conv import ACTIVATIONS, CODES, ConvLayer, SecondProduct, code_range, requantize
from lowbit.kernels.choose.conv import ConvTile
from lowbit.kernels.parts.conv_tile import WgmmaConv
from lowbit.kernels.reference.conv import conv_reference
from lowbit.kernels.sm90.conv import PreparedConv, wgmma_conv
from lowbit.kernels.sm90.conv_strip import PreparedStrip, StripConv, strip_conv
from lowbit.ops.conv import prepare_conv
from lowbit.pack.conv_weight import WgmmaTiles
from lowbit.pack.nhwc64 import Nhwc64
from lowbit.pack.stem import StemImages
from tests.kernels.sass import TRITON, batches, compile_kernel
from tests.kernels.sm90.test_compile import check_operands_in_flight, check_straight_line

OPERAND = [
    "maps",
    "weight",
    "steps",
    "blocks",
    "taps_across",
    "taps_down",
    "stride_down",
    "stride_across",
    "first_down",
    "first_across",
]
SIZES = [
    "pixels",
    "channels",
    "row_units",
    "out_height",
    "out_width",
    "tiles_across",
    "tiles_down",
    "column_step",
    "row_step",
    "image_step",
]


def compiled(*config, maxnreg=128, **more):
    c = WgmmaConv(*config, **more)
    signature = {"y": "*i32" if c.stores_codes else "*fp32", "residual": "*i32" if c.residual else None}
    signature |= {"s": "*fp32", "b": "*fp32", "g": "fp32", "s2": "*fp32" if c.second else None} | dict.fromkeys(SIZES, "i32")
    for suffix in ("", "2"):
        there = suffix == "" or c.second is not None
        signature |= {f"{name}{suffix}": "i32" for name in OPERAND}
        signature |= {f"{name}{suffix}": "*i8" if there else None for name in ("maps", "weight")}
    order = ["y", "residual", "s", "b", "g", "s2", *SIZES, *OPERAND, *(f"{name}2" for name in OPERAND)]
    signature = {name: signature[name] for name in order}
    pointers = [name for name in ("y", "residual", "maps", "weight", "s", "b", "s2", "maps2", "weight2") if signature[name]]
    return c, compile_kernel(wgmma_conv, signature, c, pointers, c.warps, 90, maxnreg=maxnreg)


def product_loops(kernel):
    """The innermost loops that contain products."""
    end = max(i for i, line in enumerate(kernel.lines) if "EXIT" in line)  # then slow paths of waits
    with_products = [(a, b) for a, b in kernel.loops if b < end and any("GMMA" in line for line in kernel.lines[a : b + 1])]
    return [(a, b) for a, b in with_products if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in with_products)]


def check_products_in_flight(kernel):
    """Asserts over two iterations of each product loop that nothing writes operand A of a product in flight. The loop must wait
    for its products before its end.
    """
    lines = [line.replace("IGMMA", "HGMMA") for line in kernel.lines]
    for first, last in product_loops(kernel):
        assert any("WARPGROUP.DEPBAR.LE gsb0, 0x0" in line for line in lines[first : last + 1])
        check_straight_line(2 * lines[first : last + 1])


@pytest.mark.parametrize(
    "cases",
    # The epilogue does not depend on the storage of x, so the epilogues alternate between u4 and s8.
    batches(
        ("s8" if i % 2 == 0 else "u4", *rest)
        for i, rest in enumerate(itertools.product((128, 64), ("u4", "s8"), (None, "u4", "s8")))
    ),
)
def test_machine_code(cases):
    made = []
    for x, outputs, y, residual in cases:
        step_bytes = 32 if (x, outputs) == ("u4", 64) else 64
        made.append((x, outputs, y, residual, *compiled(x, y, residual, True, 1, outputs, step_bytes, 3, maxnreg=168)))
    for each in made:
        check_machine_code(*each)


def check_machine_code(x, outputs, y, residual, config, kernel):
    step_bytes = 32 if (x, outputs) == ("u4", 64) else 64
    assert kernel.registers <= 168 and kernel.stack_bytes <= 64
    steps = step_bytes // 32
    assert kernel.count("IGMMA") == steps * config.planes, "one for each 32 bytes of K and plane"
    assert kernel.count("WARPGROUP.DEPBAR") == 1, "not serialized"
    if x == "u4":
        assert kernel.count("LDSM") == steps, "codes come from shared memory 4 matrices at a time"
        check_products_in_flight(kernel)
    assert "UTMALDG.4D.IM2COL" in kernel.opcodes and kernel.count("UBLKCP") > 0
    # A thread stores the words of one pixel at once: 64 or 128 bits.
    stored = 2 * outputs * CODES[y].bits // 8 // 4
    wide = "STG.E.128" if stored % 32 == 0 else "STG.E.64"
    assert kernel.opcodes[wide] == stored // (16 if wide.endswith("128") else 8)
    conversions = sum(n for name, n in kernel.opcodes.items() if name.startswith("F2IP.U8" if y == "u4" else "F2IP.S8"))
    assert conversions == outputs // 4 and kernel.count("SHFL") <= 4, "two codes a conversion, no exchange between lanes"
    if residual:
        assert kernel.count("HADD2.F32") == outputs // 2, "residual codes become floats beside the unit for conversions"
        assert kernel.opcodes["HADD2"] == (outputs // 4 if residual == "s8" else 0), "codes without a sign need no subtraction"


def test_weights_that_stay_are_copied_once():
    _, kernel = compiled("u4", "u4", "u4", True, 1, 128, 32, 3, resident=2, maxnreg=168)
    assert kernel.count("UBLKCP") == 1
    assert not any("UBLKCP" in line for a, b in product_loops(kernel) for line in kernel.lines[a : b + 1])


def test_second_product_compiles_to_two_loops():
    _, kernel = compiled("u4", "u4", None, True, 2, 128, 64, 4, second="s8", maxnreg=255)
    assert kernel.stack_bytes == 0 and len(product_loops(kernel)) == 2 and kernel.count("WARPGROUP.DEPBAR") == 2
    check_products_in_flight(kernel)


def codes_of(storage, *shape):
    low, high = code_range(storage)
    return torch.randint(low, high + 1, shape, dtype=torch.int32, device="cuda")


def layer(c, o, kernel, stride, padding, x, y, residual=None, relu=True, second=None):
    weight = torch.randint(-128, 128, (o, c, kernel, kernel), dtype=torch.int8, device="cuda")
    spread = (c * kernel * kernel) ** 0.5 * 74 * (8 if x == "u4" else 74)
    step = (5.0 if y == "u4" else 60.0) / spread
    scale = step * (torch.rand(o, device="cuda") + 0.5)
    s, b, g = requantize(scale, 3 * torch.randn(o, device="cuda"), 1.0, 1.0, y, 0.7 if residual else None)
    return ConvLayer(weight, s, b, x, y, (stride, stride), (padding, padding), relu, residual, g, second)


def packed(conv, tile, images=None):
    return WgmmaTiles(conv.x, conv.y, tile.outputs, tile.step_bytes, images=images).pack_layer(conv)


def check(conv, codes, tile, residual=None, second=None, images=None):
    """Checks that every code is equal, every byte is written, and a second run gives the same bits."""
    pack = Nhwc64(conv.x).pack if images is None else images.pack
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    prepared = PreparedConv(conv.spec, packed(conv, tile, images), tile, sms, images)
    x = pack(codes)
    added = None if residual is None else Nhwc64(conv.residual).pack(residual)
    other = None if second is None else Nhwc64(conv.second.x).pack(second)
    wanted = conv_reference(codes, conv, residual, second)
    if conv.y not in ACTIVATIONS:
        assert torch.equal(prepared(x, added, other).permute(0, 3, 1, 2), wanted)
        return
    outputs = conv.weight.shape[0]
    out = torch.full(prepared.output_shape(tuple(x.shape)), 0xA5, dtype=torch.uint8, device="cuda")
    prepared(x, added, other, out)
    assert torch.equal(Nhwc64(conv.y).unpack(out, outputs), wanted)
    assert not Nhwc64(conv.y).unpack(out, prepared.packed.weight.shape[0] * tile.outputs)[:, outputs:].any(), "filled up with 0"
    assert torch.equal(prepared(x, added, other), out)
    assert wanted.unique().numel() > 4


SMALL = ConvTile(2, 64, 32, 4, 2)
WIDE = ConvTile(2, 128, 64, 4, 2)


@pytest.mark.parametrize("residual", [None, "u4", "s8"])
@pytest.mark.parametrize(("x", "step_bytes"), [("u4", 32), ("s8", 64)])
def test_strips_read_a_tap_while_one_is_multiplied(x, step_bytes, residual):
    c = StripConv(x, x, residual, True, 2, 64, step_bytes, 9, rows=256)
    signature = {"y": "*i32", "residual": "*i32" if residual else None, "s": "*fp32", "b": "*fp32", "g": "fp32"}
    signature |= dict.fromkeys(("pixels", "row_units", "height", "width", "tiles_across", "tiles_down"), "i32")
    signature |= {"maps": "*i8", "weight": "*i8"}
    pointers = [name for name in ("y", "residual", "maps", "weight", "s", "b") if signature[name]]
    kernel = compile_kernel(strip_conv, signature, c, pointers, c.warps, 90, maxnreg=128)
    assert kernel.registers <= 128 and kernel.stack_bytes <= (16 if TRITON >= (3, 9) else 0)
    # The loop over rows of taps may be unrolled.
    assert kernel.count("IGMMA") in (6, 18) and kernel.count("WARPGROUP.DEPBAR") == kernel.count("IGMMA") // 6, "a row each"
    assert kernel.count("UTMALDG.2D") == 2 and kernel.count("UBLKCP") == 1
    check_operands_in_flight([line.replace("IGMMA", "HGMMA") for line in kernel.lines])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("c", "o", "kernel", "x", "y", "residual", "size", "tile"),
    [
        (64, 64, 3, "u4", "u4", None, (3, 9, 11), ConvTile(2, 64, 32, 9, 2)),
        (60, 50, 3, "s8", "u4", "s8", (3, 56, 50), ConvTile(2, 64, 64, 9, 2)),
        (64, 64, 3, "u4", "s8", None, (65, 14, 15), ConvTile(2, 64, 32, 9, 3)),
        (64, 64, 3, "u4", "u4", "u4", (33, 14, 14), ConvTile(1, 64, 32, 9, 4)),
        (64, 192, 3, "s8", "s8", None, (33, 14, 13), ConvTile(2, 64, 64, 9, 1)),
        (64, 128, 1, "u4", "u4", None, (33, 14, 14), ConvTile(2, 128, 32, 1, 2)),
        (64, 64, 5, "u4", "s8", None, (3, 14, 15), ConvTile(1, 64, 32, 25, 1)),
    ],
)
def test_strips(c, o, kernel, x, y, residual, size, tile):
    torch.manual_seed(6)
    conv = layer(c, o, kernel, 1, kernel // 2, x, y, residual)
    codes = codes_of(x, size[0], c, *size[1:])
    added = codes_of(residual, size[0], o, *size[1:]) if residual else None
    prepared = PreparedStrip(conv.spec, packed(conv, tile), tile, torch.cuda.get_device_properties(0).multi_processor_count)
    pixels, other = Nhwc64(x).pack(codes), None if added is None else Nhwc64(residual).pack(added)
    out = torch.full(prepared.output_shape(tuple(pixels.shape)), 0xA5, dtype=torch.uint8, device="cuda")
    prepared(pixels, other, None, out)
    assert torch.equal(Nhwc64(y).unpack(out, o), conv_reference(codes, conv, added))
    assert torch.equal(prepared(pixels, other), out)


@pytest.mark.gpu
@pytest.mark.parametrize("x", ["u4", "s8"])
def test_images_too_wide_for_strips_take_the_other_kernel(x):
    torch.manual_seed(6)
    conv = layer(64, 64, 3, 1, 1, x, "u4", "u4")
    prepared = prepare_conv(conv, (2, 9, 11))
    assert prepared.choice.kernel == "sm90/conv_strip"
    for size in ((2, 5, 80), (3, 9, 11), (1, 3, 128)):
        codes, added = codes_of(x, size[0], 64, *size[1:]), codes_of("u4", size[0], 64, *size[1:])
        out = prepared(Nhwc64(x).pack(codes), Nhwc64("u4").pack(added))
        assert torch.equal(Nhwc64("u4").unpack(out, 64), conv_reference(codes, conv, added)), size


@pytest.mark.gpu
@pytest.mark.parametrize("x", ["u4", "s8"])
@pytest.mark.parametrize("y", ["u4", "s8", "f32", "f16"])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [(1, 1, 0), (1, 2, 0), (3, 1, 1), (3, 2, 1), (7, 2, 3), (5, 3, 2), (3, 1, 0)]
)
def test_windows(x, y, kernel, stride, padding):
    torch.manual_seed(0)
    check(layer(100, 70, kernel, stride, padding, x, y), codes_of(x, 3, 100, 23, 17), ConvTile(2, 64, 64, 4, 2))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("x", "y", "residual"), [("u4", "u4", "u4"), ("u4", "u4", "s8"), ("s8", "s8", "u4"), ("s8", "u4", "s8")]
)
@pytest.mark.parametrize(
    "tile", [SMALL, WIDE, ConvTile(1, 64, 64, 3, 4), ConvTile(4, 128, 32, 3, 1), ConvTile(2, 128, 64, 3, 2)]
)
def test_residuals_and_tiles(x, y, residual, tile):
    torch.manual_seed(1)
    conv = layer(128, 256, 1, 1, 0, x, y, residual)
    check(conv, codes_of(x, 5, 128, 13, 11), tile, codes_of(residual, 5, 256, 13, 11))


@pytest.mark.gpu
def test_signed_output_without_relu():
    torch.manual_seed(2)
    check(layer(64, 128, 3, 1, 1, "u4", "s8", relu=False), codes_of("u4", 2, 64, 9, 8), SMALL)


@pytest.mark.gpu
@pytest.mark.parametrize(("x", "x2", "y", "stride"), [("u4", "u4", "u4", 1), ("u4", "s8", "u4", 2), ("s8", "s8", "s8", 2)])
def test_second_products(x, x2, y, stride):
    torch.manual_seed(3)
    w2 = torch.randint(-128, 128, (192, 256, 1, 1), dtype=torch.int8, device="cuda")
    s2 = 0.3 * layer(256, 192, 1, 1, 0, x2, y).s
    conv = layer(64, 192, 1, 1, 0, x, y, second=SecondProduct(w2, s2, x2, (stride, stride)))
    check(conv, codes_of(x, 3, 64, 7, 9), SMALL, second=codes_of(x2, 3, 256, 7 * stride, 9 * stride))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("channels", "height", "width", "kernel", "padding"), [(3, 64, 48, 7, 3), (1, 33, 31, 3, 1), (4, 33, 30, 5, 2)]
)
@pytest.mark.parametrize("y", ["u4", "s8"])
def test_stems(channels, height, width, kernel, padding, y):
    torch.manual_seed(4)
    images = StemImages(channels, height, width, (kernel, kernel), (padding, padding))
    conv = layer(channels, 64, kernel, 2, padding, "s8", y)
    check(conv, codes_of("s8", 3, channels, height, width), ConvTile(2, 64, 64, 4, 3), images=images)


def shapes_of_resnets():
    """(channels, outputs, window, stride, input size, whether a residual is added) of ResNet-18's and ResNet-50's layers."""
    found = []
    for block in blocks():
        for shape in (block.first, block.second, block.third, *([block.shortcut] if block.shortcut else [])):
            found.append((shape.channels, shape.outputs, shape.kernel, shape.stride, shape.size, shape.residual))
    for channels, size in ((64, 56), (128, 28), (256, 14), (512, 7)):
        found += [(channels, channels, 3, 1, size, False), (channels, channels, 3, 1, size, True)]
        if channels < 512:
            found += [(channels, 2 * channels, 3, 2, size, False), (channels, 2 * channels, 1, 2, size, False)]
    return list(dict.fromkeys(found))


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["u4", "s8"])
def test_every_shape_of_resnet18_and_50(storage):
    torch.manual_seed(5)
    layout = Nhwc64(storage)
    for c, o, kernel, stride, size, residual in shapes_of_resnets():
        conv = layer(c, o, kernel, stride, kernel // 2, storage, storage, storage if residual else None)
        prepared = prepare_conv(conv, (128, size, size))
        codes = codes_of(storage, 2, c, size, size)
        out = torch.full(prepared.output_shape((2, size, size, 0)), 0xA5, dtype=torch.uint8, device="cuda")
        added = codes_of(storage, 2, o, *out.shape[1:3]) if residual else None
        prepared(layout.pack(codes), None if added is None else layout.pack(added), None, out)
        assert torch.equal(layout.unpack(out, o), conv_reference(codes, conv, added)), (c, o, kernel, stride, size, residual)
