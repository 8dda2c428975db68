"""The choice of a convolution's kernel and tile: it needs no Triton, gives reasons and costs, and picks the tiles measured for
ResNets.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.resnet50 import blocks
from lowbit import kernels
from lowbit.formats.conv import ConvSpec, ProductSpec
from lowbit.hardware.machine import MACHINES, typical_machine
from lowbit.kernels.choose.conv import (
    STEM_TILE,
    ConvTile,
    block_refusals,
    block_tile,
    choose_conv,
    conv_candidates,
    deep_stages,
    deep_tile,
    resident_tiles,
)
from lowbit.pack.conv_fragment import MmaFragments
from lowbit.pack.conv_weight import WgmmaTiles
from lowbit.pack.stem import StemImages
from lowbit.pack.stem_fragment import StemFragments

H200, A100 = typical_machine(90), typical_machine(80)


def conv(channels, outputs, kernel=1, stride=1, x="u4", y=None, residual=False, second=None, w="s8"):
    """A ConvSpec; `second` gives the channels and the stride of a second, 1 x 1 product (a residual branch)."""
    y, pads = y or x, (kernel // 2, kernel // 2)
    product = None if second is None else ProductSpec(x, w, second[0], (1, 1), (second[1], second[1]), (0, 0))
    window = (kernel, kernel), (stride, stride), pads
    return ConvSpec(x, w, channels, *window, outputs, y, True, y if residual else None, product)


def test_a_laptop_without_triton_can_choose():
    code = "import sys; sys.modules['triton'] = None; from lowbit.kernels.choose import conv as c; import lowbit.vision.kernels"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


TILES = {
    "A": ("conv", (1, 64, 64, 3, 4)), "B": ("conv", (1, 64, 64, 4, 4)), "C": ("conv", (1, 64, 128, 3, 4)),
    "D": ("conv", (1, 64, 128, 4, 3)), "E": ("conv", (1, 128, 32, 3, 3)), "F": ("conv", (1, 128, 64, 3, 3)),
    "G": ("conv", (2, 64, 32, 4, 2)), "H": ("conv", (2, 64, 64, 4, 2)), "I": ("conv", (2, 128, 32, 4, 1)),
    "J": ("conv_deep", (1, 128, 64, 0, 1)), "K": ("conv_deep", (1, 128, 64, 0, 2)), "L": ("conv_deep", (1, 128, 128, 0, 1)),
    "M": ("conv_deep", (1, 128, 128, 0, 2)), "N": ("conv_deep", (3, 128, 64, 0, 1)), "O": ("conv_deep", (3, 128, 128, 0, 1)),
    "P": ("conv_strip", (2, 64, 32, 9, 2)), "Q": ("conv_strip", (2, 64, 64, 9, 2)),
}  # fmt: skip

MEASURED = """
64 64 1 1 56 -        GGG AAA    64 64 3 1 56 -        PPP QQQ    64 256 1 1 56 -       EEE BBB    64 256 1 1 56 64/1    III FFF
256 64 1 1 56 -       HHH CCC    64 256 1 1 56 +       EEE FFF    256 128 1 1 56 -      JNN LOO    128 128 3 2 56 -      JKN LMO
128 512 1 1 28 -      JNN LOO    128 512 1 1 28 256/2  JNN LOO    256 512 1 2 56 -      JNN LOO    512 128 1 1 28 -      JKN LMO
128 128 3 1 28 -      JKN LMO    128 512 1 1 28 +      JNN LOO    512 256 1 1 28 -      JNN LOO    256 256 3 2 28 -      JJN LLO
256 1024 1 1 14 -     JKN LMO    256 1024 1 1 14 512/2 JKN LMO    512 1024 1 2 28 -     JKN LMO    1024 256 1 1 14 -     JJN LLO
256 256 3 1 14 -      JJN LLO    256 1024 1 1 14 +     JKN LMO    1024 512 1 1 14 -     JKN LMO    512 512 3 2 14 -      JJN LLO
512 2048 1 1 7 -      JKN LMO    512 2048 1 1 7 1024/2 JKN LMO    1024 2048 1 2 14 -    JKN LMO    2048 512 1 1 7 -      JJN LLO
512 512 3 1 7 -       JJN LLO    512 2048 1 1 7 +      JKN LMO    64 64 3 1 56 +        PPP QQQ    64 128 3 2 56 -       EEE BBB
64 128 1 2 56 -       EEE BBB    128 128 3 1 28 64/2   III FFF    128 128 3 1 28 +      JKN LMO    128 256 3 2 28 -      JJN LLO
128 256 1 2 28 -      JJN LLO    256 256 3 1 14 128/2  JJN LLO    256 256 3 1 14 +      JJN LLO    256 512 3 2 14 -      JJN LLO
256 512 1 2 14 -      JJN LLO    512 512 3 1 7 256/2   JJN LLO    512 512 3 1 7 +       JJN LLO
"""
"""Columns: channels, outputs, window, stride, size, and what is added: "+" a residual, "C/S" a second product of C channels
with stride S. Then the keys of the fastest tiles for batches 1, 16 and 128, in u4 and in s8. All layers of ResNet-18 and
ResNet-50, measured on an H200 (2026-11-21).
"""


def rows():
    words = MEASURED.split()
    for i in range(0, len(words), 8):
        channels, outputs, kernel, stride, size = map(int, words[i : i + 5])
        added, *chosen = words[i + 5 : i + 8]
        second = tuple(map(int, added.split("/"))) if "/" in added else None
        for x, tiles in zip(("u4", "s8"), chosen, strict=True):
            yield conv(channels, outputs, kernel, stride, x, residual=added == "+", second=second), size, tiles


def test_the_layers_of_resnets_have_their_measured_tiles():
    found = set()
    for spec, size, tiles in rows():
        for batch, letter in zip((1, 16, 128), tiles, strict=True):
            choice, (kernel, tile) = choose_conv(spec, (batch, size, size), H200), TILES[letter]
            assert (choice.kernel, choice.tile) == (f"sm90/{kernel}", ConvTile(*tile)), (spec, size, batch)
            assert choice.layout == WgmmaTiles(spec.x, spec.y, tile[1], tile[2], taps_first=kernel == "conv_deep")
        found.add((spec.channels, spec.outputs, spec.kernel[0], spec.stride[0], size))
    wanted = {(s.channels, s.outputs, s.kernel, s.stride, s.size) for b in blocks() for s in (b.first, b.second, b.third)}
    assert wanted <= found
    for x, letter in (("u4", "F"), ("s8", "D")):
        for batch in (1, 16, 128):
            classifier = choose_conv(conv(2048, 1000, x=x, y="f32"), (batch, 1, 1), H200)
            assert classifier.kernel == "sm90/conv" and classifier.tile == ConvTile(*TILES[letter][1])


def test_machines_without_wgmma_have_one_tile():
    for machine in MACHINES:
        if "wgmma" in machine.arch.features:
            continue
        for x, w in (("u4", "s4"), ("u4", "s8"), ("s8", "s4")):
            choice = choose_conv(conv(64, 64, 3, x=x, w=w), (16, 56, 56), machine)
            int4 = "mma_s4" in machine.arch.features
            bits = 4 if int4 and (x, w) == ("u4", "s4") else 8
            assert choice.kernel == "sm80/conv" and choice.layout == MmaFragments(x, bits, x, int4)
            assert ("INT4 tensor cores" in choice.why) == (bits == 4)


def test_every_candidate_has_a_reason_and_a_cost():
    spec = conv(256, 256, 3)
    rows = conv_candidates(spec, (128, 14, 14), H200)
    lines = [str(row) for row in rows]
    assert [bool(row.reasons) for row in rows] == [False, False, False, True, True]
    assert lines[0].startswith("sm90/conv_deep 192 pixels x 128 outputs") and "6 turns" in lines[0]
    assert "64 pixels x 128 outputs" in lines[1] and "7.2 turns" in lines[1] and "sm90/conv 64 pixels" in lines[2]
    assert "256 channels and 256 outputs, not 64" in lines[3]
    (cpu,) = conv_candidates(spec, (1, 14, 14), None)
    assert cpu.kernel == "reference/conv" and "no GPU" in cpu.why


def test_what_no_kernel_takes_is_refused_with_all_reasons():
    with pytest.raises(ValueError, match=r"strides are 8 at most, got \(9, 9\)") as caught:
        choose_conv(conv(64, 64, 3, stride=9), (1, 99, 99), H200)
    assert all(name in str(caught.value) for name in ("sm90/conv ", "sm90/conv_deep", "sm90/conv_strip"))
    assert choose_conv(conv(64, 64, 3, stride=9), (1, 99, 99), A100).kernel == "sm80/conv"


@pytest.mark.parametrize("x", ["u4", "s8"])
@pytest.mark.parametrize("second", [None, (192, 2)], ids=["", "shortcut"])
def test_chosen_weights_have_a_layout_whatever_the_channels(x, second):
    """EfficientNet-lite0 has 672 > 112 channels with a residual: 11 blocks of 64, no whole steps of 128 bytes."""
    for channels in range(64, 1025, 64):
        for outputs in (64, 112, 128, 192, 320, 704, 1000):
            for kernel, residual, size in ((1, False, 14), (1, True, 14), (3, False, 7), (3, True, 56)):
                if residual and second:
                    continue
                spec = conv(channels, outputs, kernel, x=x, residual=residual, second=second)
                for row in conv_candidates(spec, (128, size, size), H200):
                    if not row.reasons:
                        assert row.layout.refusals((outputs, channels, kernel, kernel)) == (), (spec, row)
                        if second:
                            assert row.layout.of_second(spec.second).refusals((outputs, second[0], 1, 1)) == (), (spec, row)


def test_stems():
    images = StemImages(3, 224, 224, (7, 7), (3, 3))
    spec = conv(3, 64, 7, 2, "s8", "u4")
    plain, pooled = (choose_conv(spec, (1, 224, 224), H200, images, inside) for inside in (False, True))
    assert (plain.kernel, plain.tile) == ("sm90/conv", STEM_TILE)
    assert plain.layout == WgmmaTiles("s8", "u4", 64, 64, images=images)
    assert pooled.kernel == "sm90/stem_pool" and pooled.layout == StemFragments(images)
    with pytest.raises(ValueError, match="no max-pool inside"):
        choose_conv(spec, (1, 224, 224), A100, images, pooled=True)


@pytest.mark.parametrize("y", ["u4", "s8"])
@pytest.mark.parametrize(("x", "kernel"), [("u4", 3), ("s8", 3), ("u4", 5)])
def test_images_too_wide_for_strips_need_no_other_weights(x, y, kernel):
    spec = conv(64, 64, kernel, x=x, y=y, residual=True)
    narrow, wide = choose_conv(spec, (2, 9, 9), H200), choose_conv(spec, (2, 9, 100), H200)
    assert narrow.kernel == "sm90/conv_strip" and wide.kernel == "sm90/conv" and narrow.layout == wide.layout


def test_why_there_are_no_strips():
    def reasons(spec, width):
        rows = conv_candidates(spec, (2, 9, width), H200)
        return " ".join(next(row.reasons for row in rows if row.kernel == "sm90/conv_strip"))

    assert "has 352 pixels, at most 256 are copied at once" in reasons(conv(64, 64, 3), 100)
    assert "do not fit an SM" in reasons(conv(64, 64, 5, x="s8"), 9)


@pytest.mark.parametrize("x", ["u4", "s8"])
@pytest.mark.parametrize("width", [7, 14, 28, 56])
def test_weights_stay_where_there_is_room(x, width):
    spec = conv(128, 128, x=x)
    tile = deep_tile(spec, 3, 1)
    few, many = deep_stages(spec, tile, width), deep_stages(conv(2048, 128, x=x), tile, width)
    assert few.resident == few.stages * (2 if x == "u4" else 1) and few.resident and not many.resident
    assert resident_tiles(spec.products, ConvTile(1, 128, 32, 3, 1)) == 4, "128 channels, 32 int8 weights of each a piece"
    assert resident_tiles(conv(512, 64, 3, x=x).products, ConvTile(2, 64, 32, 4, 4)) == 0


def test_blocks_fit():
    for storage in ("u4", "s8"):
        for following, shortcut in ((64, False), (64, True), (128, False)):
            tile = block_tile(storage, 56, following, shortcut)
            assert tile.warpgroups * tile.blocks == 4 and tile.blocks * (tile.shared_bytes + 1024) <= 228 * 1024
    second, third, last = conv(64, 64, 3), conv(64, 256, residual=True), conv(256, 64)
    assert block_refusals(second, third, last, (1, 56, 56), H200) == ()
    assert "for sm_90" in block_refusals(second, third, last, (1, 56, 56), A100)[0]
    assert "100 pixels wide" in block_refusals(second, third, last, (1, 56, 100), H200)[0]
    assert "one storage" in block_refusals(second, third, dataclasses.replace(last, x="s8"), (1, 9, 9), H200)[0]
    assert (
        "second convolution has 64 groups"
        in block_refusals(dataclasses.replace(second, groups=64), third, last, (1, 9, 9), H200)[0]
    )


def test_kernels_are_named_by_their_files():
    spec, images = conv(64, 64, 3), StemImages(3, 64, 64, (7, 7), (3, 3))
    rows = [row for machine in (H200, A100, None) for row in conv_candidates(spec, (1, 9, 9), machine)]
    rows += conv_candidates(conv(3, 64, 7, 2, "s8"), (1, 64, 64), H200, images)
    assert {row.kernel for row in rows} > {"sm80/conv", "sm90/conv", "sm90/stem_pool"}
    for row in rows:
        assert (Path(kernels.__file__).parent / f"{row.kernel}.py").is_file(), row.kernel
