"""Tests what a block for 8-bit x copies, and which scales its sums over 128 k get. The device functions run in torch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts import byte_block
from lowbit.kernels.parts.byte_dequantize import ByteDequantizer
from tests.kernels.parts.plain import Pointer, plain


def load(pointer, mask=None, other=0):
    """Loads the elements that the mask allows, all of which must be in the tensor."""
    index, mask = torch.broadcast_tensors(pointer.index, torch.as_tensor(True if mask is None else mask))
    assert bool(((index >= 0) & (index < len(pointer.memory)))[mask].all())
    return torch.where(mask, pointer.memory[index.clamp(0, len(pointer.memory) - 1)], other)


def copy_ahead(stage, pointer, mask):
    stage.append(load(pointer, mask))


GL = SimpleNamespace(
    arange=lambda first, end, layout: torch.arange(first, end), SliceLayout=lambda dim, layout: None, int64=torch.int64,
    minimum=lambda values, most: values.clamp(max=most), load=load, float32=torch.float32,
    full=lambda shape, value, kind, layout: torch.full(shape, value),
)  # fmt: skip


@pytest.mark.parametrize(("rows", "k"), [(64, 0), (50, 128), (3, 256)])
def test_rows_that_do_not_exist_are_zeros(rows, k):
    w = torch.randint(1, 100, (rows, 304))
    stage = []
    config = SimpleNamespace(copy_layout=None)
    plain(byte_block.copy_rows, gl=GL, BLOCK=128, copy_ahead=copy_ahead)(
        Pointer(w.flatten()), 304, stage, k, rows, 304, 64, config
    )
    expected = torch.zeros(64, 128, dtype=w.dtype)
    expected[:rows, : 304 - k] = w[:, k : k + 128]
    assert torch.equal(stage[0], expected)


@pytest.mark.parametrize("fmt", ["int4", "int5", "fp6_e3m2"])
def test_words_are_those_of_the_row_blocks(fmt):
    """The words of each plane are copied in the order in which a lane reads them. A row block beyond the last is replaced by
    the last, and tiles beyond K by zeros."""
    dequantizer = ByteDequantizer(fmt, "s8" if fmt.startswith("int") else "e4m3")
    w = torch.randint(1, 1 << 20, (6, 5, 32 * dequantizer.bits))
    config = SimpleNamespace(warps=4, dequantizer=dequantizer, words_layout=lambda plane: None)
    source = SimpleNamespace(w=Pointer(w.flatten()), first_row_block=4, row_blocks=6, tiles=5)
    copy = plain(byte_block.copy_words, gl=GL, ptx=lambda write, *numbers: write(*numbers), copy_ahead=copy_ahead, WORD_TILES=2)
    for plane in range(dequantizer.planes):
        first, words = dequantizer.plane_start(plane), 32 * dequantizer.plane_words(plane)
        for group in range(3):
            stage = []
            copy(source, SimpleNamespace(index=lambda slot, stage=stage: stage), 0, group, plane, config)
            nothing, both = torch.zeros(4, words).long(), (2 * group, 2 * group + 1)
            tiles = [w[[4, 5, 5, 5], t, first : first + words] if t < 5 else nothing for t in both]
            assert torch.equal(stage[0], torch.cat(tiles, 1))


@pytest.mark.parametrize("kind", ["grouped", "blocks"])
def test_scales_of_128_k(kind):
    tokens, channels, m, n, groups = torch.arange(8), torch.arange(120, 184), 5, 150, 3
    of_x, of_groups, of_blocks = torch.rand(m, groups), torch.rand(groups, 160), torch.rand(2, groups)
    blocks = kind == "blocks"
    config = SimpleNamespace(
        rows=64, columns=8, accumulator=None, x_scale="block" if blocks else "token", grouped=not blocks, block_scale=blocks
    )
    scale = Pointer((of_blocks if blocks else of_groups).flatten())
    found = plain(byte_block.block_scale_of, gl=GL)(
        Pointer(of_x.flatten()), scale, 1, groups, 160, tokens, channels, m, n, config
    )
    of_w = of_blocks[channels.clamp(max=n - 1) // 128, 1] if blocks else of_groups[1, channels.clamp(max=159)]
    expected = of_w[:, None] * (of_x[tokens.clamp(max=m - 1), 1] if blocks else torch.ones(8))[None, :]
    assert torch.allclose(found[:30, :5], expected[:30, :5]) and not found[30:].any()
    assert bool((found[:, 5:] == 0).all()) == blocks
