"""Stages of x and weights: the copies of all threads and the reads of all lanes, run in NumPy on packed weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.formats import number_format
from lowbit.hardware.mma import MMA_M16N8K16_F16
from lowbit.kernels.parts.dequantize import Dequantizer
from lowbit.kernels.parts.tile_stage import TileStage, x_at, x_vector
from lowbit.pack.fragment import FragmentOrder, word_places
from tests.kernels.parts.plain import check_operands, operands, plain
from tests.kernels.parts.threads import run

FORMATS = ["int2", "int3", "int4", "int5", "int6", "int7", "int8", "fp6_e3m2"]
START = 4096
"""Assumed start address of shared memory."""


def stage(fmt="int4", tokens=64, row_blocks=4, stages=3, warps=4, group=128, zero="none", slices=1):
    return TileStage(Dequantizer(fmt, "fp16", group, zero, "fp16"), tokens, row_blocks, stages, warps, slices)


def x_seen(made, shared, slot):
    """x [tokens, 64 * slices] of a slot, read through the kernel's swizzled layout: 8 tokens of each slice alternate."""
    layout, halves = made.x_layout, shared.view(np.uint16)[slot * made.x_bytes // 2 :]
    token, k = np.arange(made.tokens)[:, None], np.arange(64 * made.slices)[None, :]
    row, inside = (token // 8 * made.slices + k // 64) * 8 + token % 8, k % 16
    swizzled = inside // layout.vec ^ row // layout.per_phase % layout.max_phase
    block = k % 64 // 16 * (made.tokens * made.slices * 16)
    return halves[block + row * 16 + swizzled * layout.vec + inside % layout.vec]


@pytest.mark.parametrize(
    ("tokens", "warps", "m", "k", "slices"),
    [
        (64, 4, 64, 128, 1),
        (128, 8, 77, 72, 1),
        (256, 8, 200, 192, 1),
        (64, 8, 1, 8, 1),
        (64, 8, 50, 200, 2),
        (32, 8, 32, 712, 4),
    ],
)
def test_x_comes_whole_and_ends_in_zeros(tokens, warps, m, k, slices):
    of_stage = 64 * slices
    made, slot, iteration = stage(tokens=tokens, warps=warps, slices=slices), 2, (k - 1) // of_stage
    x = np.arange(1, m * k + 1, dtype=np.uint32).astype(np.uint16).reshape(m, k)
    shared = np.full(made.bytes, 255, dtype=np.uint8)
    thread = np.arange(made.threads)
    token, vector = plain(x_vector)(thread)
    at = plain(x_at)(token, vector, made)
    ks = k - 8 * vector - of_stage * iteration
    memory = np.concatenate([x.reshape(-1).view(np.uint8), np.full(1 << 20, 255, dtype=np.uint8)])
    source, step = 2 * (token * k + 8 * vector + of_stage * iteration), np.full(made.threads, 8 * warps * k)
    for turn in range(made.x_copies):
        run(made.copy_x(turn), [START + slot * made.x_bytes + at, source, step, m - token, ks], 1, shared, START, memory)
    expected = np.zeros((tokens, of_stage), dtype=np.uint16)
    part = x[:, of_stage * iteration :]
    expected[:m, : part.shape[1]] = part
    assert np.array_equal(x_seen(made, shared, slot), expected)
    others = np.delete(shared, np.s_[slot * made.x_bytes : (slot + 1) * made.x_bytes])
    assert (others == 255).all(), "nothing else is written"


@pytest.mark.parametrize(("tokens", "warps"), [(16, 8), (48, 8), (64, 1)])
def test_tokens_that_its_threads_would_leave_out_are_refused(tokens, warps):
    with pytest.raises(ValueError, match=f"a tile of {tokens} is no multiple"):
        stage(tokens=tokens, warps=warps)


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_ldmatrix_meets_no_bank_twice(slices):
    """The 8 rows that ldmatrix reads at a time (8 tokens of 16 bytes) are in 8 different groups of 4 banks."""
    made = stage(slices=slices)
    for first in range(0, made.tokens, 8):
        for vector in range(8):
            assert len(set(plain(x_at)(first + np.arange(8), vector, made) % 128 // 16)) == 8
    for quarter in range(0, 32, 8):  # also for the vectors that 8 lanes copy at a time
        assert len(set(plain(x_at)(*plain(x_vector)(quarter + np.arange(8)), made) % 128 // 16)) == 8


@pytest.mark.parametrize(("row_blocks", "warps", "slices"), [(4, 4, 1), (8, 8, 1), (16, 8, 1), (4, 8, 2)])
@pytest.mark.parametrize("fmt", FORMATS)
def test_lanes_read_their_words(fmt, row_blocks, warps, slices):
    made, slot, tiles = stage(fmt, row_blocks=row_blocks, warps=warps, slices=slices), 1, 3 * slices
    number = number_format(fmt)
    codes = torch.randint(0, 1 << number.bits, (16 * row_blocks, 64 * tiles), dtype=torch.uint8)
    (plane,) = FragmentOrder(MMA_M16N8K16_F16, number).pack(codes, number.bits)
    memory, shared = plane.numpy().reshape(-1).view(np.uint8), np.full(made.bytes, 255, dtype=np.uint8)
    thread, row = np.arange(made.threads), 128 * number.bits * tiles
    at = START + made.w_start + slot * made.w_bytes

    def fill(exist):
        for p in range(len(made.planes)):
            vectors = made.vectors(p)
            source = thread // vectors * row + thread % vectors * 16 + slices * 128 * number.bits
            for turn in range(made.code_copies(p)):
                call = [at + 16 * thread, source, np.full(made.threads, row), thread, np.full(made.threads, exist)]
                run(made.copy_codes(turn, p), call, 1, shared, START, memory)

    places = word_places(number.bits).numpy()
    own, lane = thread // 32 % 2, thread % 32
    for exist in (slices, slices - 1):  # with one slice fewer, the last slice lies beyond K and must be zeros
        fill(exist)
        for of_slice in range(slices):
            start = np.full(made.threads, at + of_slice * made.slice_bytes)
            for behind in (0, 2):
                check_operands(made.read(behind), made.read_constraints)
                found = run(made.read(behind), [start, own, lane], len(made.read_types), shared, START)
                words = np.stack(found[: number.bits], axis=1).view(np.int32)
                of_tile = plane.numpy()[:, slices + of_slice] * (of_slice < exist)
                assert np.array_equal(words, of_tile[own + behind][np.arange(made.threads)[:, None], places[lane]])


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize(("group", "zero"), [(128, "none"), (64, "integer"), (32, "float"), (16, "none"), (16, "float")])
def test_lanes_read_the_scales_of_their_rows(group, zero, slices):
    made = stage(group=group, zero=zero, row_blocks=8, slices=slices)
    iteration, slot, pair = 3, 0, 2 if zero == "none" else 4
    groups = 8 * (128 // group)
    scale = np.arange(8 * groups * 8 * pair, dtype=np.uint16).reshape(8, groups, 8, pair)
    memory, shared = scale.reshape(-1).view(np.uint8), np.full(made.bytes, 255, dtype=np.uint8)
    thread, row = np.arange(made.threads), groups * 16 * pair
    at, vectors = START + made.w_start + slot * made.w_bytes, made.scale_vectors
    source = thread // vectors * row + thread % vectors * 16 + iteration * 64 * slices // group * (16 * pair)
    exist = np.full(made.threads, slices)
    for turn in range(made.scale_copies):
        call = [at + 16 * thread, source, np.full(made.threads, row), thread, exist]
        run(made.copy_scales(turn), call, 1, shared, START, memory)
    own, lane = thread // 32, thread % 32
    for of_slice in range(slices):
        start = np.full(made.threads, at + of_slice * made.slice_bytes)
        found = run(made.read(4), [start, own, lane], len(made.read_types), shared, START)
        words = (
            np.stack(found[made.dequantizer.bits :], axis=1).astype(np.uint32).view(np.uint16).reshape(made.threads, -1, pair)
        )
        first = (iteration * slices + of_slice) * 64 // group
        expected = scale[own + 4, first : first + made.dequantizer.groups, :][np.arange(made.threads), :, lane // 4]
        assert np.array_equal(words, expected)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_stage_is_its_parts(fmt):
    made = stage(fmt, group=32, zero="float")
    assert made.w_bytes == 4 * (128 * made.dequantizer.bits + 128) and made.scales_at == 4 * 128 * made.dequantizer.bits
    for text in (made.copy_x(0), made.copy_scales(0), *(made.copy_codes(0, p) for p in range(len(made.planes)))):
        assert operands(text) <= set(range(6))
