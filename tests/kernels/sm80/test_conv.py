"""The mma.sync convolution kernel: machine code, operands emulated lane by lane, and codes on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional

from lowbit.formats.conv import ACTIVATIONS, ConvLayer, SecondProduct, code_range, requantize
from lowbit.kernels.reference.conv import conv_reference
from lowbit.pack.conv_fragment import FRAGMENTS, MmaFragments, fragment_bits
from lowbit.pack.conv_layout import column_order
from lowbit.pack.nhwc64 import Nhwc64
from lowbit.pack.stem import StemImages
from tests.kernels.sass import TRITON, compile_kernel

SIZES = ["height", "width", "pixel_words", "stride_down", "stride_across", "pad_down", "pad_across", "taps_down", "taps_across"]
SIZES += ["blocks"]
KINDS = [("u4", 4), ("s8", 8), ("u4", 8)]


def fields(words, bits, signed):
    """The bit fields [.., 32 / bits] of int32 words, lowest bits first."""
    values = (words.to(torch.int64)[..., None] >> (bits * torch.arange(32 // bits))) & ((1 << bits) - 1)
    return torch.where(values >= 1 << (bits - 1), values - (1 << bits), values) if signed else values


def operands(pixels, packed, x, bits):
    """(A, B) of each instruction of one step: the words that the kernel loads, unpacked as the kernel unpacks them."""
    a = fields(pixels, 4 if bits == 4 else 8, x == "s8")
    if (x, bits) == ("u4", 8):
        halves = [pixels & 0x0F0F0F0F, (pixels >> 4) & 0x0F0F0F0F]
        return [(fields(half, 8, False), fields(packed[:, i], 8, True)) for i, half in enumerate(halves)]
    return [(a, fields(packed[:, 0], bits, True))]


@pytest.mark.parametrize("y", ["u4", "s8", "f32"])
@pytest.mark.parametrize(("x", "bits"), KINDS)
def test_fragments_emulated(x, bits, y):
    """PTX ISA: lane 4 g + t holds parts of rows g and g + 8 of A and of column g of B. With K = 64 nibbles, these are 8 from 8
    t on and 8 from 32 + 8 t on. With K = 32 bytes, these are 4 from 4 t on and 4 from 16 + 4 t on.
    """
    torch.manual_seed(0)
    low, high = code_range(x)
    weight = torch.randint(-(1 << bits - 1), 1 << bits - 1, (100, 128, 1, 1), dtype=torch.int8)
    codes = torch.randint(low, high + 1, (1, 128, 4, 4), dtype=torch.int32)
    packed = MmaFragments(x, bits, y).pack(weight)
    pixels = Nhwc64(x).pack(codes)[0].reshape(16, -1).view(torch.int32)
    k = 32 * 8 // (4 if bits == 4 else 8)
    out = torch.zeros(2 * 64, 16, dtype=torch.int64)
    for tile in range(2):
        for step in range(packed.shape[1]):
            for instruction in range(packed.shape[3]):
                a, b = torch.zeros(16, k, dtype=torch.int64), torch.zeros(FRAGMENTS, k, 8, dtype=torch.int64)
                for lane in range(32):
                    g, t = divmod(lane, 4)
                    words = slice(8 * step + 2 * t, 8 * step + 2 * t + 2)
                    pairs = operands(pixels[:, words], packed[tile, step, :, :, lane], x, bits)
                    of_a, of_b = pairs[instruction]
                    for half in range(2):
                        at = slice(half * k // 2 + k // 8 * t, half * k // 2 + k // 8 * (t + 1))
                        for row in (g, g + 8):
                            a[row, at] = of_a[row, half]
                        b[:, at, g] = of_b[:, half]
                product = torch.einsum("mk,fkn->fnm", a, b).reshape(64, 16)
                out[64 * tile + torch.tensor(column_order(y, 64))] += product
    wanted = functional.conv2d(codes.double(), weight.double())[0].reshape(100, 16)
    assert torch.equal(out[:100].double(), wanted) and not out[100:].any()


def test_wide_weights_are_refused():
    with pytest.raises(ValueError, match=r"-8\.\.7"):
        MmaFragments("u4", 4, "u4").pack(torch.full((1, 1, 1, 1), 8, dtype=torch.int8))


@pytest.mark.parametrize(
    ("first", "second", "y", "residual", "capability"),
    [
        (("u4", 4), None, "u4", "u4", 80), (("u4", 4), None, "u4", "u4", 86), (("u4", 4), None, "u4", "u4", 89),
        (("u4", 4), ("u4", 4), "u4", None, 80), (("u4", 8), None, "s8", "u4", 80), (("s8", 8), None, "f32", None, 80),
    ],
)  # fmt: skip
def test_machine_code(first, second, y, residual, capability):
    pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")
    from lowbit.kernels.sm80.conv import MmaConv, MmaProduct, mma_conv

    signature = {"y": "*fp32" if y == "f32" else "*i32", "residual": "*i32" if residual else None, "s": "*fp32", "b": "*fp32"}
    signature |= {"g": "fp32", "s2": "*fp32" if second else None}
    signature |= dict.fromkeys(("pixels", "channels", "row_words", "residual_words", "out_height", "out_width"), "i32")
    signature |= {"x": "*i32", "weight": "*i32"} | dict.fromkeys(SIZES, "i32")
    signature |= dict.fromkeys(("x2", "weight2"), "*i32" if second else None) | dict.fromkeys([f"{n}2" for n in SIZES], "i32")
    pointers = [name for name, kind in signature.items() if kind and kind[0] == "*"]
    config = MmaConv(MmaProduct(*first), second and MmaProduct(*second), y, residual, True)
    kernel = compile_kernel(mma_conv, signature, config, pointers, 4, capability)
    products = 2 if second else 1
    if first == ("u4", 4):
        assert kernel.opcodes["IMMA.16864.U4.S4"] == 16 * products, "native, two row blocks x 64 outputs"
    else:
        assert kernel.opcodes["IMMA.16832.S8.S8"] == (32 if first[0] == "u4" else 16)
    assert kernel.count("CALL") == 0 and kernel.stack_bytes == 0 and kernel.count("SHFL") == 0
    if y in ACTIVATIONS:
        assert kernel.opcodes["STG.E.64"] == (4 if y == "u4" else 8), "64 bits, no exchange"
    assert kernel.registers <= ((128 if TRITON >= (3, 9) else 150) if not second else 208), (
        "four blocks an SM, three with Triton 3.6"
    )


def layer(c, o, kernel, stride, padding, x, bits, y, residual=None, second=None):
    """A convolution whose outputs use the whole range of codes; `second` is (storage, bits) of a second, 1 x 1 product of 40
    channels.
    """
    wide = 1 << bits - 1  # symmetric weights: codes of x are positive, so all sums would be negative otherwise
    weight = torch.randint(1 - wide, wide, (o, c, kernel, kernel), dtype=torch.int8, device="cuda")
    weight[:, 0, 0, 0] = -wide
    deviation = (c * kernel * kernel) ** 0.5 * wide * 0.58 * {"u4": 8.8, "s8": 74}[x]
    scale = (5.0 if y == "u4" else 60.0) / deviation * (torch.rand(o, device="cuda") + 0.5)
    s, b, g = requantize(scale, 3 * torch.randn(o, device="cuda"), 1.0, 1.0, y, 0.7 if residual else None)
    product = None
    if second:
        wide = 1 << second[1] - 1
        other = torch.randint(1 - wide, wide, (o, 40, 1, 1), dtype=torch.int8, device="cuda")
        s2, _, _ = requantize(scale * (c * kernel * kernel / 40) ** 0.5, None, 1.0, 1.0, y)
        product = SecondProduct(other, s2, second[0], (stride, stride))
    return ConvLayer(
        weight, s, b, x, y, (stride, stride), (padding, padding), y != "f16", residual, g, product
    )  # fmt: skip


def random_codes(storage, shape):
    low, high = code_range(storage)
    return torch.randint(low, high + 1, shape, dtype=torch.int32, device="cuda")


def prepare(conv, int4, images=None):
    from lowbit.kernels.sm80.conv import PreparedMmaConv

    layout = MmaFragments(conv.x, fragment_bits(conv.spec, int4), conv.y, int4, images)
    return PreparedMmaConv(conv.spec, layout.pack_layer(conv), int4, images)


def check(conv, int4, size=(13, 11)):
    codes = random_codes(conv.x, (3, conv.weight.shape[1], *size))
    outputs, out_size = conv.weight.shape[0], conv.output_size(*size)
    prepared = prepare(conv, int4)
    x = Nhwc64(conv.x).pack(codes)
    added = None if conv.residual is None else random_codes(conv.residual, (3, outputs, *out_size))
    other = None
    if conv.second is not None:
        other = random_codes(conv.second.x, (3, 40, *((n - 1) * conv.stride[0] + 1 for n in out_size)))
    wanted = conv_reference(codes, conv, added, other)
    packed = None if added is None else Nhwc64(conv.residual).pack(added)
    other_packed = None if other is None else Nhwc64(conv.second.x).pack(other)
    dtype = {"f16": torch.float16, "f32": torch.float32}.get(conv.y, torch.uint8)
    out = torch.full(prepared.output_shape(tuple(x.shape)), 0xA5, dtype=dtype, device="cuda")
    for _ in range(2):  # the first call compiles, the second only launches
        prepared(x, packed, other_packed, out)
    got = Nhwc64(conv.y).unpack(out, outputs) if conv.y in ACTIVATIONS else out.permute(0, 3, 1, 2)
    assert torch.equal(got, wanted)
    assert wanted.unique().numel() > 8, "the test's own data"


@pytest.mark.gpu
@pytest.mark.parametrize(("x", "bits"), KINDS)
@pytest.mark.parametrize(("y", "residual"), [("u4", None), ("u4", "s8"), ("s8", "u4"), ("f32", None), ("f16", None)])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(1, 1, 0), (3, 2, 1), (5, 3, 2)])
def test_codes(x, bits, y, residual, kernel, stride, padding):
    torch.manual_seed(1)
    check(layer(100, 70, kernel, stride, padding, x, bits, y, residual), int4=False)


@pytest.mark.gpu
@pytest.mark.parametrize(("y", "residual"), [("u4", None), ("u4", "s8"), ("s8", "u4"), ("f32", None), ("f16", None)])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(1, 1, 0), (3, 2, 1), (5, 3, 2)])
def test_codes_by_int4_tensor_cores(y, residual, kernel, stride, padding):
    torch.manual_seed(1)
    check(layer(100, 70, kernel, stride, padding, "u4", 4, y, residual), int4=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("second", "int4"), [(("u4", 4), False), (("s8", 8), False), (("u4", 4), True), (("s8", 8), True)])
def test_two_products(second, int4):
    torch.manual_seed(2)
    check(layer(100, 70, 3, 2, 1, "u4", 4, "u4", None, second), int4)


@pytest.mark.gpu
@pytest.mark.parametrize(("channels", "kernel", "padding"), [(3, 7, 3), (1, 5, 2), (4, 3, 1)])
def test_stems(channels, kernel, padding):
    torch.manual_seed(3)
    conv, size = layer(channels, 70, kernel, 2, padding, "s8", 8, "u4"), (29, 34)
    images = StemImages(channels, *size, (kernel, kernel), (padding, padding))
    codes = random_codes("s8", (3, channels, *size))
    y = prepare(conv, False, images)(images.pack(codes))
    assert torch.equal(Nhwc64("u4").unpack(y, 70), conv_reference(codes, conv))
