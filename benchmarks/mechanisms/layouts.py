"""Convolutions: the cost of padding channels to 64, and the cost of reading 4-bit codes by channel layout.

Layouts are NCHW (two neighbouring pixels of a channel in a byte) and NCHWx (x channels of a pixel adjacent; x = 4, 32, 64). The
kernel reads like a 1 x 1 convolution, in tiles of 64 pixels x 64 channels, and sums each pixel's channels without multiplying.
The library uses one layout, NHWC64, with the blocks of NCHW64.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.conv import graph_of, replay_ms
from benchmarks.mechanisms.trial import Row, Trial, blank
from benchmarks.protocol import capture
from benchmarks.tiles import REPLAYS
from lowbit.formats.conv import ConvLayer, code_range, requantize
from lowbit.kernels.parts.launch import Launcher
from lowbit.kernels.reference.conv import conv_reference
from lowbit.ops.conv import Conv, prepare_conv
from lowbit.pack.nhwc64 import Nhwc64
from lowbit.tune.timing import WrongResult, copies_needed, l2_bytes

IMAGES, SIZE = 128, 56
CHANNELS = (56, 64, 112, 128)
BLOCKS = (1, 4, 32, 64)
READ_CHANNELS, READ_SIZE = 256, 28
TILE = 64


@triton.jit
def sum_channels(y, x, pixels, channels, BLOCK: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """y int32 [images, channels / TILE, pixels] = sums over TILE channels of x. x has 4-bit codes, two to a byte (uint8), in
    blocks of BLOCK channels."""
    image = tl.program_id(2).to(tl.int64)
    part = tl.program_id(1)
    out = y + (image * tl.num_programs(1) + part) * pixels
    if BLOCK == 1:
        channel = part * TILE + tl.arange(0, TILE)[:, None]
        pair = tl.program_id(0) * (TILE // 2) + tl.arange(0, TILE // 2)
        there = pair * 2 < pixels
        both = tl.load(x + (image * channels + channel) * (pixels // 2) + pair[None, :], mask=there[None, :], other=0)
        tl.store(out + 2 * pair, tl.sum((both & 15).to(tl.int32), axis=0), mask=there)
        tl.store(out + 2 * pair + 1, tl.sum((both >> 4).to(tl.int32), axis=0), mask=there)
    else:
        pixel = tl.program_id(0) * TILE + tl.arange(0, TILE)
        byte = part * (TILE // 2) + tl.arange(0, TILE // 2)[None, :]
        block = image * (channels // BLOCK) + byte // (BLOCK // 2)
        at = x + (block * pixels + pixel[:, None]) * (BLOCK // 2) + byte % (BLOCK // 2)
        both = tl.load(at, mask=(pixel < pixels)[:, None], other=0)
        tl.store(out + pixel, tl.sum(((both & 15) + (both >> 4)).to(tl.int32), axis=1), mask=pixel < pixels)


def arranged(codes: Tensor, block: int) -> Tensor:
    """Packs 4-bit codes, given as uint8 [N, C, P], two to a byte in blocks of `block` channels. A block of 1 means NCHW."""
    n, c, p = codes.shape
    pairs = codes.view(n, c, p // 2, 2) if block == 1 else codes.view(n, c // block, block // 2, 2, p).permute(0, 1, 4, 2, 3)
    return (pairs[..., 0] | pairs[..., 1] << 4).contiguous()


def trials() -> Iterator[Trial]:
    """Yields the trials of padded channels, then those of reading by layout."""
    for storage in ("u4", "s8"):
        for channels in CHANNELS:
            case = f"{storage}, 3 x 3, {SIZE} x {SIZE}, batch {IMAGES}"
            row = blank("convolution", case, f"{channels} channels", dtype=storage)
            once = functools.partial(_run_once, storage, channels)
            yield Trial(row, once, functools.partial(_measured_conv, storage, channels))
    for block in BLOCKS:
        case = f"reading {READ_CHANNELS} channels, {READ_SIZE} x {READ_SIZE}, batch {IMAGES}"
        row = blank("convolution", case, "NCHW" if block == 1 else f"NCHW{block}", dtype="u4")
        yield Trial(row, functools.partial(_read_once, block), functools.partial(_measured_read, block))


@functools.lru_cache(maxsize=8)
def _conv(storage: str, channels: int) -> Conv:
    generator = torch.Generator("cuda").manual_seed(channels)
    weight = torch.randint(-8, 8, (channels, channels, 3, 3), dtype=torch.int8, device="cuda", generator=generator)
    spread = (9 * channels) ** 0.5 * 4.6 * (4.6 if storage == "u4" else 74)
    scale = torch.full((channels,), (5.0 if storage == "u4" else 60.0) / spread, device="cuda")
    s, b, _ = requantize(scale, None, 1.0, 1.0, storage)
    return prepare_conv(ConvLayer(weight, s, b, storage, storage, (1, 1), (1, 1)), (IMAGES, SIZE, SIZE))


def _codes(storage: str, images: int, channels: int) -> Tensor:
    low, high = code_range(storage)
    generator = torch.Generator("cuda").manual_seed(images)
    return torch.randint(low, high + 1, (images, channels, SIZE, SIZE), dtype=torch.int32, device="cuda", generator=generator)


def _run_once(storage: str, channels: int) -> None:
    x = Nhwc64(storage).pack(_codes(storage, 1, channels))
    _conv(storage, channels)(x)


def _measured_conv(storage: str, channels: int) -> Row:
    """Returns a row with tera-operations per second: those of the real channels only, and those of the padded channels too."""
    conv = _conv(storage, channels)
    codes = _codes(storage, 2, channels)
    if not torch.equal(Nhwc64(storage).unpack(conv(Nhwc64(storage).pack(codes)), channels), conv_reference(codes, conv.layer)):
        raise WrongResult(f"codes of {channels} channels differ from the reference")
    x = Nhwc64(storage).pack(_codes(storage, IMAGES, channels))
    outputs = [torch.empty(conv.output_shape(tuple(x.shape)), dtype=torch.uint8, device="cuda") for _ in range(4)]
    graph = graph_of(lambda: [conv(x, out=out) for out in outputs])
    us = 1e3 * replay_ms(graph.replay) / len(outputs)
    operations = 2 * 9 * channels**2 * IMAGES * SIZE**2
    full = 2 * 9 * (-(-channels // 64) * 64) ** 2 * IMAGES * SIZE**2
    return {"us": us, "figures": {"tops_asked": operations / us / 1e6, "tops_filled_up": full / us / 1e6}, "rel_err": 0.0}


@functools.lru_cache(maxsize=1)
def _codes_to_read() -> Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    shape = (IMAGES, READ_CHANNELS, READ_SIZE**2)
    return torch.randint(0, 16, shape, dtype=torch.uint8, device="cuda", generator=generator)


class _Reader:
    """`sum_channels` for one layout."""

    def __init__(self, block: int) -> None:
        pixels, self.parts = READ_SIZE**2, READ_CHANNELS // TILE
        self.block, self.pixels = block, pixels
        self.launch = Launcher(sum_channels, (-(-pixels // TILE), self.parts, IMAGES), 4)

    def __call__(self, x: Tensor) -> Tensor:
        y = torch.empty(IMAGES, self.parts, self.pixels, dtype=torch.int32, device=x.device)
        self.launch(y, x, self.pixels, READ_CHANNELS, self.block, TILE)
        return y


@functools.lru_cache(maxsize=8)
def _reader(block: int) -> _Reader:
    return _Reader(block)


def _read_once(block: int) -> None:
    _reader(block)(arranged(_codes_to_read(), block))


def _measured_read(block: int) -> Row:
    codes, reader = _codes_to_read(), _reader(block)
    x = arranged(codes, block)
    wanted = codes.view(IMAGES, READ_CHANNELS // TILE, TILE, -1).sum(2, dtype=torch.int32)
    copies = [x, *(x.clone() for _ in range(copies_needed(x.nbytes, l2_bytes()) - 1))]
    graph = capture([functools.partial(reader, each) for each in copies])
    us = statistics.median(graph.times_us(REPLAYS))
    if not all(torch.equal(y, wanted) for y in graph.poisoned_outputs()):
        raise WrongResult(f"sums of channels in blocks of {block} are wrong")
    return {"us": us, "figures": {"gb_per_s": x.nbytes / us / 1e3}, "rel_err": 0.0}
