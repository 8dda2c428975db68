"""What convolution kernels are compiled for: Triton tells two configurations apart by `str`, which has to say everything."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit import kernels
from lowbit.kernels.choose.conv import block_tile
from lowbit.kernels.parts.conv_tile import WgmmaConv
from lowbit.kernels.sm80.conv import MmaConv, MmaProduct
from lowbit.kernels.sm90.conv_block import BlockConv
from lowbit.kernels.sm90.conv_deep import DeepConv
from lowbit.kernels.sm90.conv_strip import StripConv
from lowbit.kernels.sm90.stem_pool import StemPool

CONFIGS = [
    WgmmaConv("u4", "s8", "u4", True, 2, 64, 32, 4),
    StripConv("u4", "s8", None, True, 2, 64, 32, 9, rows=256),
    DeepConv("u4", "s8", None, True, 2, 128, 64, 4),
    BlockConv(**vars(block_tile("u4", 56, 64, False))),
    StemPool("u4", True, 4, False, False),
    MmaConv(MmaProduct("u4", 4), None, "s8", None, True),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_every_field_is_told(config):
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        other = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else "other"
        assert str(dataclasses.replace(config, **{field.name: other})) != str(config), field.name


@pytest.mark.parametrize(
    "name", ["sm80/conv", "sm90/conv", "sm90/conv_strip", "sm90/conv_deep", "sm90/conv_block", "sm90/stem_pool"]
)
def test_kernels_are_siblings(name):
    """A kernel imports parts and descriptors, no other kernel; what packs weights comes before it."""
    text = (Path(kernels.__file__).parent / f"{name}.py").read_text()
    imported = set(re.findall(r"^from (lowbit\.\S+) import", text, re.MULTILINE))
    assert not {m for m in imported if ".sm" in m} - {"lowbit.kernels.sm90.tensor_map"}
    assert ".pack(" not in text and "pack_layer" not in text
