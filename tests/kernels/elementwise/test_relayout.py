"""Conversion of images and features to packed codes and back. The machine code is tested without a GPU. On a GPU, codes equal
the reference."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are Triton's")

from lowbit.formats.conv import code_range
from lowbit.kernels.elementwise.relayout import _planes, pack, pack_kernel, pack_stem, stem_kernel, unpack, unpack_kernel
from lowbit.kernels.reference.conv import quantize_reference
from lowbit.pack.nhwc64 import Nhwc64
from lowbit.pack.stem import StemImages
from tests.kernels.sass import compile_triton

SIZES = ("channels", "pixels", "row_bytes", "image_stride", "channel_stride")


@pytest.mark.parametrize(("four", "words"), [(True, 1), (False, 2)])
def test_both_sides_move_16_bytes_at_a_time(four, words):
    """A block of 128 threads converts 64 pixels of 64 channels. A thread makes 8 loads of 4 floats along a row of the image,
    and stores 16 or 32 bytes of codes."""
    signature = {"y": "*u8", "x": "*fp32", "gain": "*fp32", "shift": "*fp32"} | dict.fromkeys(SIZES, "i32")
    constants = {"pixel_stride": 1, "LOW": 0.0, "HIGH": 15.0, "FOUR": four, "PIXELS": 64}
    kernel = compile_triton(pack_kernel, signature, constants, tuple(signature), 4, 90)
    assert kernel.count("LDG.E.128") >= 8 and kernel.count("STG.E.128") == words and kernel.stack_bytes == 0
    signature = {"y": "*fp16", "x": "*u8", "scale": "fp32"} | dict.fromkeys(SIZES, "i32")
    constants = {"pixel_stride": 1, "FOUR": four, "PIXELS": 64}
    kernel = compile_triton(unpack_kernel, signature, constants, tuple(n for n in signature if n != "scale"), 4, 90)
    assert kernel.count("LDG.E.128") == words and kernel.count("STG.E.128") == 4 and kernel.stack_bytes == 0


def test_a_stem_reads_pairs_and_writes_pixels():
    names = ("total", "rows", "columns", "before", "height", "width", "image_stride", "channel_stride", "row_stride")
    signature = {"y": "*i32", "x": "*fp32", "gain": "*fp32", "shift": "*fp32"} | dict.fromkeys(names, "i32")
    aligned = tuple(name for name in signature if name not in ("rows", "columns", "before"))
    constants = {"pixel_stride": 1, "CHANNELS": 3, "PIXELS": 256}
    kernel = compile_triton(stem_kernel, signature, constants, aligned, 4, 90)
    assert kernel.count("LDG.E.64") == 2 * 2 * 3 and kernel.count("STG.E.128") == 2 and kernel.stack_bytes == 0


@pytest.mark.parametrize("shape", [(3, 5, 4, 6), (2, 5, 1, 6), (2, 5, 4, 1), (4, 5, 1, 1), (1, 5, 2, 2)])
def test_planes_hold_every_value_once(shape):
    n, c, h, w = shape
    plain = torch.arange(n * c * h * w).reshape(shape)
    crop = torch.arange(n * c * (h + 1) * (w + 2)).reshape(n, c, h + 1, w + 2)[:, :, :h, :w]
    part = torch.arange(n * (c + 3) * h * w).reshape(n, h, w, c + 3).permute(0, 3, 1, 2)[:, :c]
    for x in (plain, plain.contiguous(memory_format=torch.channels_last), crop, part):
        images, pixels, (image, channel, pixel), y = _planes(x)
        got = y.as_strided((images, pixels, c), (image, pixel, channel)).reshape(n, h, w, c)
        assert torch.equal(got, x.permute(0, 2, 3, 1))
    assert _planes(part)[0] == 1  # NHWC: images are adjacent in memory


def values(shape, dtype, nhwc):
    """Values that include ties, values beyond the range of codes, and three that are not finite."""
    x = torch.randint(0, 256, shape, device="cuda") if dtype == torch.uint8 else torch.randn(shape, device="cuda") * 12
    x = x.mul(8).round().div(8).to(dtype)
    if dtype != torch.uint8:
        x.view(-1)[:3] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    return x.contiguous(memory_format=torch.channels_last) if nhwc else x


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["u4", "s8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("nhwc", [True, False])
@pytest.mark.parametrize("shape", [(3, 100, 15, 14), (2, 64, 16, 16), (5, 70, 1, 1), (2, 3, 1, 9), (2, 8, 9, 1)])
def test_packing(storage, dtype, nhwc, shape):
    torch.manual_seed(0)
    x = values(shape, dtype, nhwc)
    gain = torch.rand(shape[1], device="cuda") * 4
    gain[0], shift = 2.0, torch.randn(shape[1], device="cuda")
    shift[0] = 0.0
    wanted = quantize_reference(x, gain, shift, storage)
    layout = Nhwc64(storage)
    out = torch.full(layout.shape(shape), 0xA5, dtype=torch.uint8, device="cuda")
    assert torch.equal(pack(x, gain, shift, storage, out), layout.pack(wanted))
    assert wanted.unique().numel() > 2
    crop = x[:, :, :, : max(1, shape[3] // 2)]  # rows that are not adjacent in memory
    assert torch.equal(pack(crop, gain, shift, storage), layout.pack(wanted[:, :, :, : crop.shape[3]]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize("nhwc", [True, False])
@pytest.mark.parametrize(
    ("channels", "size", "kernel", "padding"), [(3, (32, 48), 7, 3), (1, (29, 27), 5, 2), (4, (31, 64), 3, 1)]
)
def test_packing_a_stem(dtype, nhwc, channels, size, kernel, padding):
    torch.manual_seed(0)
    images = StemImages(channels, *size, (kernel, kernel), (padding, padding))
    x = values((3, channels, *size), dtype, nhwc)
    gain, shift = torch.rand(channels, device="cuda") * 4, torch.randn(channels, device="cuda")
    wanted = images.pack(quantize_reference(x, gain, shift, "s8"))
    assert torch.equal(pack_stem(x, gain, shift, images, torch.full_like(wanted, 0xA5)), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["u4", "s8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32])
@pytest.mark.parametrize("nhwc", [True, False])
@pytest.mark.parametrize("shape", [(3, 100, 15, 14), (5, 70, 1, 1)])
def test_unpacking(storage, dtype, nhwc, shape):
    torch.manual_seed(0)
    low, high = code_range(storage)
    codes = torch.randint(low, high + 1, shape, dtype=torch.int32, device="cuda")
    format_ = torch.channels_last if nhwc else torch.contiguous_format
    out = torch.full(shape, 77, dtype=dtype, device="cuda").contiguous(memory_format=format_)
    wanted = codes if dtype == torch.int32 else (codes.float() * 0.37).to(dtype)
    assert torch.equal(unpack(Nhwc64(storage).pack(codes), storage, 0.37, out), wanted)
