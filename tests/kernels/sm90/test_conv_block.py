"""Whole bottleneck blocks in one kernel: machine code without a GPU, and codes bit-equal to the layers' references on one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")


from lowbit.formats.conv import SecondProduct
from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose.conv import block_tile
from lowbit.kernels.reference.conv import conv_reference
from lowbit.kernels.sm90.conv_block import BlockConv, block_conv
from lowbit.ops.conv_block import block_launcher, prepare_block
from lowbit.pack.nhwc64 import Nhwc64
from tests.kernels.sass import TRITON, compile_kernel
from tests.kernels.sm90.test_compile import check_straight_line
from tests.kernels.sm90.test_conv import codes_of, layer


def layers(storage, shortcut, following):
    product = None
    if shortcut:
        other = layer(64, 256, 1, 1, 0, storage, storage)
        product = SecondProduct(other.weight, 0.7 * other.s, storage)
    third = layer(64, 256, 1, 1, 0, storage, storage, None if shortcut else storage, second=product)
    return layer(64, 64, 3, 1, 1, storage, storage), third, layer(256, following, 1, 1, 0, storage, storage)


KINDS = [(False, 64), (True, 64), (False, 128)]  # as in ResNet-50: (shortcut convolution, outputs of the next convolution)
BLOCKS = [(storage, *kind) for storage in ("u4", "s8") for kind in KINDS]


@pytest.mark.parametrize(("storage", "shortcut", "following"), BLOCKS)
def test_codes_stay_in_registers(storage, shortcut, following):
    config = BlockConv(**vars(block_tile(storage, 56, following, shortcut)))
    pointers = ["y", "z", "added", "maps", "weight"]
    signature = {"y": "*i32", "z": "*i32", "added": "*i32", "g": "fp32"}
    signature |= dict.fromkeys(("pixels", "height", "width", "tiles", "step"), "i32")
    assert config.warpgroups * config.blocks == 4, "as many warps as registers allow"
    signature |= {"maps": "*i8", "weight": "*i8"}
    kernel = compile_kernel(block_conv, signature, config, pointers, config.warps, 90, maxnreg=128)
    assert kernel.registers <= 128 and kernel.stack_bytes <= (160 if TRITON >= (3, 9) else 96)
    chunks, halves = config.chunks, following // 64
    products = 18 + (1 + shortcut) * chunks * 2 + halves * 8
    assert kernel.count("IGMMA") == products, "taps, the third convolution, the next one"
    assert kernel.count("WARPGROUP.DEPBAR") == 3 + chunks + halves, "a wait for each row of taps and each piece: not serialized"
    assert kernel.count("SHFL") == 0 and kernel.count("LDSM") == 9 * (1 if storage == "u4" else 2)
    assert kernel.count("STG.E.128") + kernel.count("STG.E.64") == kernel.count("STG"), "whole words of 8 and 16 bytes"
    lines = [line.replace("IGMMA", "HGMMA") for line in kernel.lines]
    last = max(i for i, line in enumerate(lines) if "WARPGROUP.DEPBAR" in line)
    check_straight_line(lines[: last + 1])


SIZES = [(3, 56, 56), (13, 56, 56), (2, 9, 11), (161, 14, 15), (1, 2, 1), (9, 61, 63)]


@pytest.mark.gpu
@pytest.mark.parametrize(("storage", "shortcut", "following"), BLOCKS)
def test_codes(storage, shortcut, following):
    torch.manual_seed(7)
    second, third, last = layers(storage, shortcut, following)
    layout = Nhwc64(storage)
    for size in SIZES:
        x = codes_of(storage, size[0], 64, *size[1:])
        added = codes_of(storage, size[0], 64 if shortcut else 256, *size[1:])
        whole = prepare_block(second, third, last, size)
        packed = layout.pack(x).contiguous()
        shapes = whole.output_shapes(tuple(packed.shape))
        out = tuple(torch.full(shape, 0xA5, dtype=torch.uint8, device="cuda") for shape in shapes)
        whole(packed, layout.pack(added).contiguous(), out)
        middle = conv_reference(x, second)
        y = conv_reference(middle, third, None if shortcut else added, added if shortcut else None)
        z = conv_reference(y, last)
        assert torch.equal(layout.unpack(out[0], 256), y) and torch.equal(layout.unpack(out[1], following), z), size
        assert y.unique().numel() > 4 and z.unique().numel() > 4
        again = whole(packed, layout.pack(added).contiguous())
        assert torch.equal(again[0], out[0]) and torch.equal(again[1], out[1])


@pytest.mark.gpu
@pytest.mark.parametrize("sms", [1, 3])
def test_few_blocks_walk_over_many_tiles(sms):
    torch.manual_seed(8)
    second, third, last = layers("u4", False, 64)
    x, added = codes_of("u4", 5, 64, 17, 23), codes_of("u4", 5, 256, 17, 23)
    out = tuple(torch.empty(5, 17, 23, size, dtype=torch.uint8, device="cuda") for size in (128, 32))
    few = dataclasses.replace(typical_machine(90), sm_count=sms)
    y, z = block_launcher(second, third, last, few)(Nhwc64("u4").pack(x), Nhwc64("u4").pack(added), out)
    wanted = conv_reference(conv_reference(x, second), third, added)
    assert torch.equal(Nhwc64("u4").unpack(y, 256), wanted)
    assert torch.equal(Nhwc64("u4").unpack(z, 64), conv_reference(wanted, last))
