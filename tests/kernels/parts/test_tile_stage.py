"""Stages of x and weights: what the copies of all threads bring, and what lanes read of it, in NumPy on packed weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.formats import number_format
from lowbit.hardware.mma import MMA_M16N8K16_F16
from lowbit.kernels.parts.decode import Decode
from lowbit.kernels.parts.tile_stage import TileStage
from lowbit.kernels.sm80.wide_mixed_gemm import x_at, x_piece
from lowbit.pack.fragment import FragmentOrder, word_places
from tests.kernels.parts.plain import check_operands, operands, plain
from tests.kernels.parts.threads import run

FORMATS = ["int2", "int3", "int4", "int5", "int6", "int7", "int8", "fp6_e3m2"]
START = 4096
"""Where shared memory is said to begin."""


def stage(fmt="int4", tokens=64, strips=4, stages=3, warps=4, group=128, zero="none"):
    return TileStage(Decode(fmt, "fp16", group, zero, "fp16"), tokens, strips, stages, warps)


def x_seen(made, shared, slot):
    """x [tokens, 64 k] of a slot, as the swizzled views of the kernel have it."""
    layout, halves = made.x_layout, shared.view(np.uint16)[slot * made.x_bytes // 2 :]
    token, k = np.arange(made.tokens)[:, None], np.arange(64)[None, :]
    inside = k % 16
    swizzled = inside // layout.vec ^ token // layout.per_phase % layout.max_phase
    return halves[k // 16 * (made.tokens * 16) + token * 16 + swizzled * layout.vec + inside % layout.vec]


@pytest.mark.parametrize(("tokens", "warps", "m", "k"), [(64, 4, 64, 128), (128, 8, 77, 72), (256, 8, 200, 192), (64, 8, 1, 8)])
def test_x_comes_whole_and_ends_in_zeros(tokens, warps, m, k):
    made, slot, iteration = stage(tokens=tokens, warps=warps), 2, (k - 1) // 64
    x = np.arange(1, m * k + 1, dtype=np.uint32).astype(np.uint16).reshape(m, k)
    shared = np.full(made.bytes, 255, dtype=np.uint8)
    thread = np.arange(made.threads)
    token, piece = plain(x_piece)(thread)
    at = plain(x_at)(token, piece, made)
    ks = k - 8 * piece - 64 * iteration
    memory = np.concatenate([x.reshape(-1).view(np.uint8), np.full(1 << 20, 255, dtype=np.uint8)])
    source, step = 2 * (token * k + 8 * piece + 64 * iteration), np.full(made.threads, 8 * warps * k)
    run(made.copy_x, [START + slot * made.x_bytes + at, source, step, m - token, ks], 1, shared, START, memory)
    expected = np.zeros((tokens, 64), dtype=np.uint16)
    part = x[:, 64 * iteration :]
    expected[:m, : part.shape[1]] = part
    assert np.array_equal(x_seen(made, shared, slot), expected)
    others = np.delete(shared, np.s_[slot * made.x_bytes : (slot + 1) * made.x_bytes])
    assert (others == 255).all(), "nothing else is written"


def test_ldmatrix_meets_no_bank_twice():
    """8 tokens of a piece of 8 k lie in 8 different groups of 4 banks."""
    made = stage()
    for first in range(0, made.tokens, 8):
        for piece in range(8):
            assert len(set(plain(x_at)(first + np.arange(8), piece, made) % 128 // 16)) == 8
    for quarter in range(0, 32, 8):  # and so do those that 8 lanes copy at a time
        assert len(set(plain(x_at)(*plain(x_piece)(quarter + np.arange(8)), made) % 128 // 16)) == 8


@pytest.mark.parametrize(("strips", "warps"), [(4, 4), (8, 8), (16, 8)])
@pytest.mark.parametrize("fmt", FORMATS)
def test_lanes_read_their_words(fmt, strips, warps):
    made, slot, tile, tiles = stage(fmt, strips=strips, warps=warps), 1, 1, 3
    number = number_format(fmt)
    codes = torch.randint(0, 1 << number.bits, (16 * strips, 64 * tiles), dtype=torch.uint8)
    (plane,) = FragmentOrder(MMA_M16N8K16_F16, number).pack(codes, number.bits)
    memory, shared = plane.numpy().reshape(-1).view(np.uint8), np.full(made.bytes, 255, dtype=np.uint8)
    thread, row = np.arange(made.threads), 128 * number.bits * tiles
    at = START + made.w_start + slot * made.w_bytes
    for p in range(len(made.planes)):
        pieces = made.pieces(p)
        source = thread // pieces * row + thread % pieces * 16 + tile * 128 * number.bits
        call = at + 16 * thread, source, np.full(made.threads, row), thread
        run(made.copy_codes(p), [*call, np.ones(made.threads)], 1, shared, START, memory)
        run(made.copy_codes(p), [*call, np.zeros(made.threads)], 1, shared, START, np.zeros_like(memory))  # copies nothing
    places = word_places(number.bits).numpy()
    for behind in (0, 2):
        own = thread // 32 % 2
        check_operands(made.read(behind), made.read_constraints)
        found = run(made.read(behind), [np.full(made.threads, at), own, thread % 32], len(made.read_types), shared, START)
        words = np.stack(found[: number.bits], axis=1).view(np.int32)
        of_tile = plane.numpy()[:, tile]
        assert np.array_equal(words, of_tile[own + behind][np.arange(made.threads)[:, None], places[thread % 32]])


@pytest.mark.parametrize(("group", "zero"), [(128, "none"), (64, "integer"), (32, "float"), (16, "none"), (16, "float")])
def test_lanes_read_the_scales_of_their_rows(group, zero):
    made = stage(group=group, zero=zero, strips=8)
    tile, slot, pair = 3, 0, 2 if zero == "none" else 4
    groups = 4 * (128 // group)
    scale = np.arange(8 * groups * 8 * pair, dtype=np.uint16).reshape(8, groups, 8, pair)
    memory, shared = scale.reshape(-1).view(np.uint8), np.full(made.bytes, 255, dtype=np.uint8)
    thread, row = np.arange(made.threads), groups * 16 * pair
    at, pieces = START + made.w_start + slot * made.w_bytes, made.scale_pieces
    source = thread // pieces * row + thread % pieces * 16 + tile * 64 // group * (16 * pair)
    exists = np.ones(made.threads)
    run(made.copy_scales, [at + 16 * thread, source, np.full(made.threads, row), thread, exists], 1, shared, START, memory)
    own, lane = thread // 32, thread % 32
    found = run(made.read(4), [np.full(made.threads, at), own, lane], len(made.read_types), shared, START)
    words = np.stack(found[made.decode.bits :], axis=1).astype(np.uint32).view(np.uint16).reshape(made.threads, -1, pair)
    first = tile * 64 // group
    assert np.array_equal(words, scale[own + 4, first : first + made.decode.groups, :][np.arange(made.threads), :, lane // 4])


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_stage_is_its_parts(fmt):
    made = stage(fmt, group=32, zero="float")
    assert made.w_bytes == 4 * (128 * made.decode.bits + 128) and made.scales_at == 4 * 128 * made.decode.bits
    for text in (made.copy_x, made.copy_scales, *(made.copy_codes(p) for p in range(len(made.planes)))):
        assert operands(text) <= set(range(6))
