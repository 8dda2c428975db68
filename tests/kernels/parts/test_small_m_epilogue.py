"""The epilogue of the small-M kernel: its device code runs in NumPy on all threads of all blocks. Every output must be right
and written once.
"""

from __future__ import annotations

import itertools
import math
import types

import numpy as np
import pytest
import torch

from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose.fused_gemm import chain_candidates
from lowbit.kernels.choose.small_m import ring_tiles
from lowbit.kernels.choose.tiles import DENSE_BITS, GemmShape, RingTile

pytest.importorskip("triton.experimental.gluon", reason="kernels are written in Gluon, part of Triton")

from lowbit.kernels.parts import epilogue as epilogue_part
from lowbit.kernels.parts import small_m_epilogue
from lowbit.kernels.parts.epilogue import Epilogue
from lowbit.kernels.parts.k_block import KBlock
from lowbit.kernels.parts.ring import Ring
from lowbit.kernels.sm80.small_m_gemm import RingGemm
from tests.kernels.parts.blocks import Block, Memory, lanes
from tests.kernels.parts.plain import check_operands


def config_of(tile, epilogue):
    ring = Ring(KBlock("int4", "fp16", tile.tokens, 128, "none", "fp16"), tile.row_blocks, tile.rounds, False)
    return RingGemm(ring, tile.warps_n, tile.warps_k, tile.splits, epilogue, True)


def accumulators(config, products, first_row_block, split, thread):
    """Each thread's accumulators of m16n8k16 (PTX ISA) after the main loop, taken from `products` [slices, rows, tokens]."""
    found, lane, warp = [], thread % 32, thread // 32
    per_row_block = config.ring.k_block.accumulators
    slice_k = split * config.warps_k + warp % config.warps_k
    for element in range(config.accumulators):
        row_block = first_row_block + warp // config.warps_k * config.ring.row_blocks + element // per_row_block
        inside = element % per_row_block
        row, token = 16 * row_block + lane // 4 + 8 * (inside // 2 % 2), 8 * (inside // 4) + 2 * (lane % 4) + inside % 2
        found.append(products[slice_k, row, token])
    return tuple(lanes(one) for one in found)


def launch(tile, epilogue, m, n, rng, **given):
    """Runs all blocks of a GEMM on random partial products, and returns these products too."""
    config, row_blocks = config_of(tile, epilogue), -(-n // 16)
    grid = -(-row_blocks // tile.tile_row_blocks), 1, tile.splits
    products = np.full(
        (config.slices, 16 * row_blocks, tile.tokens), np.nan, dtype=np.float32
    )  # absent rows and tokens are poisoned
    products[:, :n, :m] = rng.standard_normal((config.slices, n, m))
    partial = Memory(np.full(grid[0] * tile.splits * config.outputs * config.threads, np.nan, dtype=np.float32))
    arrived = Memory(np.zeros(grid[0], dtype=np.int32))
    places = [(i, split) for i in range(grid[0]) for split in rng.permutation(tile.splits)]
    for i, split in places:
        block = Block(config, grid, (i, 0, int(split)), epilogue_part, small_m_epilogue)
        d, thread = block.device, block.thread
        first = min(i * tile.tile_row_blocks, row_blocks - tile.tile_row_blocks)
        at = types.SimpleNamespace(
            lane=thread & 31,
            warp=thread >> 5,
            first_row_block=first,
            first_token=0,
            own_row=i * tile.tile_row_blocks * 16,
            M=m,
            N=n,
        )
        rms = (
            d["rms_factors"](given["squares"], at, given["inverse_width"], given["eps"], given["x_factor"], config)
            if epilogue.norm_parts
            else ()
        )
        channels = {name: given.get(name) for name in ("channel_scale", "bias", "gamma")}
        channels = {name: memory and d["load_rows"](memory, at, config) for name, memory in channels.items()}
        old = d["load_h"](given["h"], at, config) if epilogue.residual and config.h_early else ()
        epilogue_args = types.SimpleNamespace(
            factor=0.5, channel_scale=channels["channel_scale"], rms=rms, bias=channels["bias"]
        )
        residual = types.SimpleNamespace(
            h=given.get("h"), gamma=channels["gamma"], squares=given.get("squares"), x_factor=given.get("x_factor"), old=old
        )
        acc = accumulators(config, products, first, int(split), np.arange(config.threads))
        last, sums = True, d["reduce_slices"](block.tile(), acc, at.lane, at.warp, config)
        if tile.splits > 1:
            last, sums = d["reduce_splits"](partial, arrived, sums, thread, config)
        if last:
            d["apply_epilogue"](given["y"], sums, epilogue_args, residual, at, config)
    assert not arrived.values.any(), "counters are zero again"
    return products[:, :n, :m].sum(0, dtype=np.float64).T


TILES = [
    RingTile(8, 1, 1, 1, 8, 1), RingTile(8, 3, 2, 1, 8, 1), RingTile(8, 7, 1, 1, 8, 1), RingTile(8, 2, 1, 1, 16, 1),
    RingTile(8, 3, 1, 2, 4, 2), RingTile(8, 5, 1, 2, 4, 1), RingTile(16, 2, 2, 1, 16, 1), RingTile(16, 7, 1, 2, 4, 1),
    RingTile(16, 8, 1, 1, 8, 4), RingTile(16, 5, 1, 1, 8, 2), RingTile(16, 1, 1, 1, 8, 1),
]  # fmt: skip


def shapes(tile):
    """(m, n) pairs: n of whole blocks, and n where the last two blocks overlap; m of one, some, all but one and all tokens."""
    rows, tokens = 16 * tile.tile_row_blocks, tile.tokens
    return [(tokens, 2 * rows), (tokens - 1, rows + 16), (tokens // 2 + 1, 2 * rows + 16), (1, rows)]


def half(rng, *shape):
    return rng.standard_normal(shape).astype(np.float16)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_norm(tile, bias):
    rng = np.random.default_rng(0)
    for m, n in [*shapes(tile), (2, 16 * tile.tile_row_blocks - 5)]:
        for parts in (1, 9, 128) if bias else (9,):
            squares, channel = rng.random((parts, m), dtype=np.float32), rng.random(n, dtype=np.float32)
            of_bias, y = half(rng, n), Memory(np.full((m, n), np.nan, dtype=np.float16))
            sums = launch(
                tile, Epilogue(True, bias, parts), m, n, rng, y=y, squares=Memory(squares), channel_scale=Memory(channel),
                bias=Memory(of_bias), inverse_width=1 / 64, eps=1e-3, x_factor=0.25,
            )  # fmt: skip
            rms = np.sqrt(squares.astype(np.float64).sum(0) / 64 + 1e-3)[:, None]
            expected = 0.5 * sums * channel / (rms * 0.25) + (of_bias if bias else 0)
            np.testing.assert_allclose(y.values, expected, rtol=2e-3, atol=1e-3)
            own = np.zeros(n, dtype=bool)  # both of two overlapping blocks store their common rows, with equal values
            own[: n // (16 * tile.tile_row_blocks) * 16 * tile.tile_row_blocks] = True
            assert (y.written.reshape(m, n) >= 1).all() and (y.written.max() == 1 or not own.all())


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
def test_gates_and_what_they_gate_are_in_one_lane(tile, gate):
    rng = np.random.default_rng(1)
    for m, n in shapes(tile):
        squares, y = rng.random((3, m), dtype=np.float32), Memory(np.full((m, n // 2), np.nan, dtype=np.float16))
        bias = half(rng, n)
        sums = launch(
            tile, Epilogue(False, True, 3, gate), m, n, rng, y=y, squares=Memory(squares), bias=Memory(bias),
            inverse_width=1 / 64, eps=1e-3, x_factor=2.0,
        )  # fmt: skip
        rms = np.sqrt(squares.astype(np.float64).sum(0) / 64 + 1e-3)[:, None]
        both = torch.from_numpy(0.5 * sums / (rms * 2.0) + bias).unflatten(1, (-1, 2, 8))
        gates, ups = both[:, :, 0].flatten(1), both[:, :, 1].flatten(1)
        act = torch.nn.functional.silu if gate == "silu" else lambda g: torch.nn.functional.gelu(g, approximate="tanh")
        np.testing.assert_allclose(y.values, (act(gates) * ups).numpy(), rtol=4e-3, atol=2e-3)
        assert (y.written >= 1).all() and y.written.max() <= 2


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_residual(tile, bias):
    rng = np.random.default_rng(2)
    for m, n in [*shapes(tile), (tile.tokens - 1, 3 * 16 * tile.tile_row_blocks - 21)]:
        h, gamma, of_bias = half(rng, m, n), half(rng, n), half(rng, n)
        parts = math.ceil(math.ceil(n / 16) / tile.tile_row_blocks)
        memory, following, squares = (
            Memory(h.copy()),
            Memory(np.full((m, n), np.nan, np.float16)),
            Memory(np.full((parts, m), np.nan, np.float32)),
        )
        sums = launch(
            tile, Epilogue(False, bias, h_type="fp16"), m, n, rng, y=following, h=memory, gamma=Memory(gamma), squares=squares,
            bias=Memory(of_bias), x_factor=0.25,
        )  # fmt: skip
        expected = h + 0.5 * sums + (of_bias if bias else 0)
        np.testing.assert_allclose(memory.values, expected, rtol=1e-3, atol=1e-4)
        kept = memory.values.astype(np.float64)
        np.testing.assert_array_equal(following.values, (kept * gamma * 0.25).astype(np.float16))
        np.testing.assert_allclose(squares.values.sum(0), (kept**2).sum(1), rtol=1e-5)
        rows = np.minimum(np.arange(parts + 1) * 16 * tile.tile_row_blocks, n)
        for part, (first, end) in enumerate(itertools.pairwise(rows)):
            np.testing.assert_allclose(squares.values[part], (kept[:, first:end] ** 2).sum(1), rtol=1e-5)
        for stored in (memory, following, squares):
            assert (stored.written == 1).all(), "h is added to once, and its squares count once"


@pytest.mark.parametrize(
    ("role", "n", "k"), [("residual", 896, 4864), ("gated", 9728, 896), ("norm", 960, 576), ("residual", 5120, 13824)]
)
@pytest.mark.parametrize("m", [1, 16])
def test_every_candidate_finishes_every_output_once(role, n, k, m):
    """Checks only the map of outputs: each accumulator is finished by exactly one thread."""
    rows = chain_candidates(role, GemmShape(m, n, k, 4), typical_machine(90))
    of_role = Epilogue(False, False, 1, "silu" if role == "gated" else "none")
    if role == "residual":
        of_role = Epilogue(False, False, h_type="fp16")
    for tile in (row.tile for row in rows if isinstance(row.tile, RingTile)):
        config = config_of(tile, of_role)
        block = Block(config, (1, 1, 1), (0, 0, 0), small_m_epilogue)
        warps, found, before = lanes(np.arange(config.warps)), [], None
        for i in range(config.outputs):
            element, row_of_warps = block.device["element_of"](i, warps, config)
            found += [(int(e), int(r)) for e, r in zip(element, row_of_warps, strict=True) if e < config.accumulators]
            if role == "gated" and i % 2:
                assert (element == before + 2).all() and (before // 2 % 2 == 0)[before < config.accumulators].all()
            before = element
        assert sorted(found) == [(e, r) for e in range(config.accumulators) for r in range(config.warps_n)]


@pytest.mark.parametrize(("role", "n", "k"), [("residual", 896, 4864), ("gated", 9728, 896), ("norm", 4096, 4096)])
@pytest.mark.parametrize("bits", [4, DENSE_BITS])
def test_sums_of_a_row_share_what_is_asked_for(role, n, k, bits):
    """In every thread of every tile, `first_of_row` names an output of the same row, which exists if the given output
    exists.
    """
    for m in (1, 16):
        for tile in ring_tiles(GemmShape(m, n, k, bits), typical_machine(80)):
            gate, parts = "silu" if role == "gated" else "none", 0 if role == "residual" else 1
            config = config_of(tile, Epilogue(False, True, parts, gate, "fp16" if role == "residual" else None))
            block = Block(config, (1, 1, 1), (0, 0, 0), small_m_epilogue)
            lane, warp = block.thread & 31, block.thread >> 5
            at = types.SimpleNamespace(lane=lane, warp=warp, first_row_block=0, first_token=0, own_row=0, M=m, N=n)
            elements = [block.device["element_of"](i, warp, config) for i in range(config.outputs)]
            rows = [block.device["output_of"](*one, at, config)[0] for one in elements]
            for i, (element, _) in enumerate(elements):
                first, finished = config.first_of_row(i), element < config.accumulators
                assert (rows[i] == rows[first])[finished].all() and (elements[first][0] <= element).all(), str(tile)


def test_ptx_names_its_operands():
    check_operands(small_m_epilogue.ADD_GROUPS.value, "=&f,f")
    check_operands(small_m_epilogue.STORE.value, "=r,r,f")
    check_operands(small_m_epilogue.STORE_IF.value, "=r,r,f,r")
    for count in (1, 4, 16):
        text = small_m_epilogue.add_strided(count, 128)
        check_operands(getattr(text, "value", text), "=&f,r")


def test_a_residual_has_no_norm():
    with pytest.raises(ValueError, match="no norm and no gate"):
        Epilogue(False, False, 4, h_type="fp16")
