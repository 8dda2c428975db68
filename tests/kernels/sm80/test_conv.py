"""The INT4 kernel of sm_80 to 89: its machine code, its operands emulated lane by lane, its codes on an NVIDIA GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional

from lowbit.kernels.conv_reference import CODE_RANGE, ConvLayer, SecondProduct, conv_reference, requantize
from lowbit.pack.conv_fragment import pack_conv_fragments
from lowbit.pack.conv_weight import column_order
from lowbit.pack.nhwc64 import Nhwc64
from tests.kernels.sass import compile_kernel

INTEGERS = ["pixels", "height", "width", "pixel_words", "row_words", "residual_words", "stride_down", "stride_across"]
INTEGERS += ["pad_down", "pad_across", "out_height", "out_width", "taps_down", "taps_across", "blocks"]


def nibbles(words):
    """Signed and unsigned 4-bit values [.., 8] of int32 words."""
    unsigned = (words.to(torch.int64)[..., None] >> (4 * torch.arange(8))) & 15
    return torch.where(unsigned > 7, unsigned - 16, unsigned), unsigned


@pytest.mark.parametrize("y", ["u4", "s8"])
def test_fragments_emulated(y):
    """PTX ISA, m16n8k64: lane 4 g + t holds k 8 t on and 32 + 8 t on, of rows g (and g + 8) of A and of column g of B."""
    torch.manual_seed(0)
    weight = torch.randint(-8, 8, (100, 128, 1, 1), dtype=torch.int8)
    codes = torch.randint(0, 16, (1, 128, 4, 4), dtype=torch.int32)
    packed = pack_conv_fragments(weight, y)
    pixels = Nhwc64("u4").pack(codes)[0].reshape(16, -1).view(torch.int32)
    out = torch.zeros(2 * 64, 16, dtype=torch.int64)
    for tile in range(2):
        for step in range(2):
            a, b = torch.zeros(16, 64, dtype=torch.int64), torch.zeros(8, 64, 8, dtype=torch.int64)
            for lane in range(32):
                g, t = divmod(lane, 4)
                for word in range(2):
                    k = slice(32 * word + 8 * t, 32 * word + 8 * t + 8)
                    for row in (g, g + 8):
                        a[row, k] = nibbles(pixels[row, 8 * step + 2 * t + word])[1]
                    b[:, k, g] = nibbles(packed[tile, step, lane].reshape(8, 2)[:, word])[0]
            product = torch.einsum("mk,fkn->fnm", a, b).reshape(64, 16)
            out[64 * tile + torch.tensor(column_order(y, 64))] += product
    wanted = functional.conv2d(codes.double(), weight.double())[0].reshape(100, 16)
    assert torch.equal(out[:100].double(), wanted) and not out[100:].any()


def test_wide_weights_are_refused():
    with pytest.raises(ValueError, match=r"-8\.\.7"):
        pack_conv_fragments(torch.full((1, 1, 1, 1), 8, dtype=torch.int8), "u4")


@pytest.mark.parametrize("capability", [80, 86, 89])
@pytest.mark.parametrize(("y", "residual"), [("u4", None), ("u4", "u4"), ("s8", "s8")])
def test_machine_code(capability, y, residual):
    pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")
    from lowbit.kernels.sm80.conv import MmaConv, mma_conv

    signature = {"y": "*i32", "residual": "*i32" if residual else None, "x": "*i32", "weight": "*i32"}
    signature |= {"s": "*fp32", "b": "*fp32", "g": "fp32"} | dict.fromkeys(INTEGERS, "i32")
    pointers = [name for name in ("y", "residual", "x", "weight", "s", "b") if signature[name]]
    kernel = compile_kernel(mma_conv, signature, MmaConv(y, residual, True), pointers, 4, capability)
    assert kernel.opcodes["IMMA.16864.U4.S4"] == 16 and kernel.count("CALL") == 0, "native, two strips x 64 outputs"
    assert kernel.stack_bytes == 0
    assert kernel.opcodes["STG.E.64"] == (4 if y == "u4" else 8) and kernel.count("SHFL") == 0, "64 bits, no exchange"


def layer(c, o, kernel, stride, padding, y, residual=None):
    weight = torch.randint(-8, 8, (o, c, kernel, kernel), dtype=torch.int8, device="cuda")
    scale = (5.0 if y == "u4" else 60.0) / ((c * kernel * kernel) ** 0.5 * 37) * (torch.rand(o, device="cuda") + 0.5)
    s, b, g = requantize(scale, 3 * torch.randn(o, device="cuda"), 1.0, 1.0, y, 0.7 if residual else None)
    return ConvLayer(weight, s, b, "u4", y, (stride, stride), (padding, padding), True, residual, g)


@pytest.mark.gpu
@pytest.mark.parametrize(("y", "residual"), [("u4", None), ("u4", "u4"), ("u4", "s8"), ("s8", "s8"), ("s8", "u4")])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(1, 1, 0), (3, 1, 1), (3, 2, 1), (5, 3, 2)])
def test_codes(y, residual, kernel, stride, padding):
    """On GPUs without INT4 tensor cores as well, where ptxas puts a subroutine in the instruction's place."""
    from lowbit.kernels.sm80.conv import PreparedMmaConv

    torch.manual_seed(1)
    conv = layer(100, 70, kernel, stride, padding, y, residual)
    codes = torch.randint(0, 16, (3, 100, 13, 11), dtype=torch.int32, device="cuda")
    prepared, x, added, packed = PreparedMmaConv(conv), Nhwc64("u4").pack(codes), None, None
    if residual:
        low, high = CODE_RANGE[residual]
        added = torch.randint(low, high + 1, (3, 70, *conv.output_size(13, 11)), dtype=torch.int32, device="cuda")
        packed = Nhwc64(residual).pack(added)
    out = torch.full(prepared.output_shape(tuple(x.shape)), 0xA5, dtype=torch.uint8, device="cuda")
    prepared(x, packed, None, out)
    assert torch.equal(Nhwc64(y).unpack(out, 70), conv_reference(codes, conv, added))


def test_other_layers_are_refused():
    pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")
    from lowbit.kernels.sm80.conv import mma_refusals

    weight = torch.full((2, 2, 1, 1), 9, dtype=torch.int8)
    second = SecondProduct(weight, torch.ones(2), "u4")
    reasons = " ".join(mma_refusals(ConvLayer(weight, torch.ones(2), torch.zeros(2), "s8", "f32", second=second)))
    assert "s8, not u4" in reasons and "f32" in reasons and "second" in reasons and "more than 4 bits" in reasons
