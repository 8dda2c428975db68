"""The stem with fused max-pool: machine code without a GPU, and codes bit-equal to both references on one."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.hardware.machine import typical_machine
from lowbit.kernels.reference.conv import conv_reference, max_pool_reference
from lowbit.kernels.sm90.stem_pool import BLOCKS, PreparedStemPool, StemPool, stem_pool
from lowbit.ops.conv import STEM_POOL, prepare_stem
from lowbit.pack.nhwc64 import Nhwc64
from lowbit.pack.stem import StemImages
from lowbit.pack.stem_fragment import StemFragments
from tests.kernels.sass import compile_kernel
from tests.kernels.sm90.test_conv import codes_of, layer


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("y", ["u4", "s8"])
def test_sums_are_pooled_before_they_are_requantized(y, odd):
    config = StemPool(y, True, 4, odd, odd)
    sizes = ("pooled_height", "pooled_width", "height", "width")
    integers = ("row_bytes", *sizes, "before", "tiles", "tiles_beside", "tiles_across")
    signature = {"y": "*u8", "s": "*fp32", "b": "*fp32"} | dict.fromkeys(integers, "i32") | {"maps": "*i8", "weight": "*i8"}
    kernel = compile_kernel(stem_pool, signature, config, ["y", "s", "b", "maps", "weight"], 4, 90, maxnreg=255)
    assert kernel.registers <= 255 and kernel.stack_bytes == 0
    assert BLOCKS * (kernel.shared_bytes + 1024) <= typical_machine(90).arch.shared_per_sm_bytes
    assert kernel.count("IGMMA") == 16 and kernel.count("WARPGROUP.DEPBAR") == 1, "two rows at once, not serialized"
    assert kernel.count("LDSM") == 0, "operands are read where they lie"
    assert kernel.opcodes["VIMNMX3"] == 56 + 28 and kernel.count("SHFL") == 28, "three at once, down and across"
    assert kernel.count("I2FP") == 28 and kernel.count("STS.U") == 14, "a conversion for each pooled sum"
    first = next(i for i, line in enumerate(kernel.lines) if "IGMMA" in line)
    assert not any("LDG" in line for line in kernel.lines[first:]), "weights and constants are loaded once, before the loop"


SHAPES = [  # images, channels, height, width, window, outputs
    (2, 3, 64, 48, 7, 64),
    (5, 1, 33, 31, 3, 64),
    (3, 4, 33, 30, 5, 100),
    (7, 3, 20, 224, 7, 64),
    (2, 3, 10, 230, 7, 64),  # one pooled pixel more than a tile; an odd number of columns
    (1, 3, 12, 448, 7, 128),
]


@pytest.mark.gpu
@pytest.mark.parametrize("y", ["u4", "s8"])
@pytest.mark.parametrize("sms", [1, 3, 132])
def test_codes(y, sms):
    torch.manual_seed(8)
    for n, channels, height, width, kernel, outputs in SHAPES:
        images = StemImages(channels, height, width, (kernel, kernel), (kernel // 2, kernel // 2))
        conv = layer(channels, outputs, kernel, 2, kernel // 2, "s8", y)
        codes = codes_of("s8", n, channels, height, width)
        prepared = PreparedStemPool(conv.spec, StemFragments(images).pack_layer(conv), images, sms)
        x = images.pack(codes)
        out = torch.full(prepared.output_shape(tuple(x.shape)), 0xA5, dtype=torch.uint8, device="cuda")
        prepared(x, None, None, out)
        wanted = max_pool_reference(conv_reference(codes, conv), *STEM_POOL)
        assert torch.equal(Nhwc64(y).unpack(out, outputs), wanted) and wanted.unique().numel() > 4, (n, height, width)
        assert torch.equal(prepared(x), out)


@pytest.mark.gpu
def test_a_prepared_stem_has_it_inside():
    torch.manual_seed(9)
    conv, codes = layer(3, 64, 7, 2, 3, "s8", "u4"), codes_of("s8", 3, 3, 64, 64)
    stem = prepare_stem(conv, (3, 64, 64), pooled=True)
    wanted = max_pool_reference(conv_reference(codes, conv), *STEM_POOL)
    assert torch.equal(Nhwc64("u4").unpack(stem(stem.images.pack(codes)), 64), wanted)
