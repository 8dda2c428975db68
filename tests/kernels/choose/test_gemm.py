"""The choice of tile is feasible on every GPU, can be printed, and is the measured tile where one was measured."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.grid import weights
from lowbit.hardware.machine import MACHINES, typical_machine
from lowbit.kernels.choose import gemm as module
from lowbit.kernels.choose.gemm import candidates, choose
from lowbit.kernels.choose.large_m import LEAST_STAGES, mma_candidate, mma_tiles
from lowbit.kernels.choose.measured import MEASURED, Measured
from lowbit.kernels.choose.tiles import GemmShape, MmaTile, RingTile, WgmmaTile

H200 = typical_machine(90)


@settings(deadline=None, max_examples=200)
@given(m=st.integers(1, 20000), n=st.integers(1, 160000), k=st.integers(1, 30000), bits=st.integers(2, 8))
def test_every_shape_has_a_tile_that_fits(m, n, k, bits):
    shape = GemmShape(m, n, k, bits)
    tile = choose(shape, H200)
    if isinstance(tile, RingTile):
        assert tile.tile_row_blocks <= shape.row_blocks and tile.warps_n * tile.warps_k in (8, 16)
    else:
        assert tile.stages % 2 == 0 and tile.stages >= LEAST_STAGES
        assert tile.stages * (512 * tile.warpgroups * bits + 128 * tile.tokens) <= 230_000


@pytest.mark.parametrize("machine", MACHINES, ids=lambda d: d.product)
def test_other_machines_multiply_many_tokens_by_mma(machine):
    for m in (1, 16, 4096):
        tile = choose(GemmShape(m, 4096, 4096, 4), machine)
        many = WgmmaTile if machine.arch.sm == 90 else MmaTile
        assert isinstance(tile, many) == (m > 16) and isinstance(tile, RingTile) == (m <= 16)


@settings(deadline=None, max_examples=200)
@given(
    m=st.integers(1, 20000), n=st.integers(1, 160000), k=st.integers(1, 30000), bits=st.integers(2, 8),
    machine=st.sampled_from([machine for machine in MACHINES if machine.arch.sm != 90]),
)  # fmt: skip
def test_every_shape_has_a_tile_that_fits_without_wgmma(m, n, k, bits, machine):
    tile = choose(GemmShape(m, n, k, bits), machine)
    if isinstance(tile, MmaTile):
        assert tile.rows <= 16 * -(-n // 16) and tile.stages >= 2 and tile.warps_n * tile.warps_m == 8
        stage = 128 * tile.tokens + tile.rows // 16 * (128 * bits + 256)
        assert tile.stages * stage <= machine.arch.shared_per_block_bytes
        assert tile.splits <= -(-k // 64)
    else:
        assert isinstance(tile, RingTile)


def test_many_tokens_come_near_dense_products():
    """For many tokens on an A100, the tensor cores could compute the product in 1.76 ms, while the small-M kernel would take
    5.7 ms. So the chosen tile must be near the former."""
    a100, shape = typical_machine(80), GemmShape(4096, 8192, 8192, 4)
    rows = candidates(shape, a100)
    ideal = 2 * shape.m * shape.n * shape.k / a100.peak_fp16 * 1e6
    assert isinstance(rows[0].tile, MmaTile) and ideal < rows[0].cost_us < 1.6 * ideal
    ring = next(row for row in rows if isinstance(row.tile, RingTile))
    assert ring.cost_us > 3 * ideal


@pytest.mark.parametrize(
    ("m", "n", "k", "us"),
    [
        # microseconds of the best tile measured on an H200, 2026-11-23, int4, groups of 128
        (64, 4096, 4096, 12.9), (128, 4096, 4096, 18.9), (256, 4096, 4096, 27.6), (512, 4096, 4096, 47.3),
        (1024, 4096, 4096, 83.4), (64, 8192, 8192, 29.7), (128, 8192, 8192, 48.3), (256, 8192, 8192, 85.0),
        (4096, 8192, 8192, 1350.6), (64, 28672, 4096, 45.6), (256, 28672, 4096, 167.9), (1024, 28672, 4096, 604.7),
    ],
)  # fmt: skip
def test_costs_of_mma_tiles_are_near_what_was_measured(m, n, k, us):
    """The costs are compared with times on an H200. The choice for an H200 never depends on them, since it has wgmma."""
    rows = [mma_candidate(tile, shape, H200) for shape in [GemmShape(m, n, k, 4)] for tile in mma_tiles(shape, H200)]
    assert min(row.cost_us for row in rows if not row.reasons) == pytest.approx(us, rel=0.12)


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_time_does_not_fall_as_tokens_are_added(bits, monkeypatch):
    """Modelled costs of known models' weights must not fall when tokens are added (3 % slack): fewer tokens can always be
    padded to more."""
    monkeypatch.setattr(module, "MEASURED", ())
    tokens = [1, 2, 5, 8, 9, 16, 17, 24, 32, 33, 64, 65, 96, 128, 129, 192, 256, 257, 384, 512, 1024, 1500, 4096]
    for n, k in weights()[::3]:
        costs = [candidates(GemmShape(m, n, k, bits), H200)[0].cost_us for m in tokens]
        falls = [m for i, m in enumerate(tokens) if costs[i] > 1.03 * min(costs[i:])]
        assert not falls, (n, k, falls)


def test_without_room_the_reasons_say_so():
    rows = candidates(GemmShape(1, 4096, 4096, 8), typical_machine(86))
    refused = [row for row in rows if row.reasons]
    assert refused and "bytes of shared memory, a block has 101,376" in refused[0].reasons[0]
    assert not rows[0].reasons and rows == sorted(rows, key=lambda r: (bool(r.reasons), r.cost_us))


@pytest.mark.parametrize(
    ("m", "n", "k", "expected"),
    [
        # the best candidates measured on an H200, 2026-11-21, int4, groups of 128 (docs/log)
        (1, 8192, 8192, "ring 64 rows x 8 tokens"),
        (1, 8192, 28672, "ring 64 rows x 8 tokens"),
        (16, 8192, 28672, "ring 128 rows x 16 tokens, 1 x 8 warps of 8 row blocks, ring of 8, K split 2"),
        (16, 28672, 8192, "ring 224 rows x 16 tokens, 2 x 4 warps of 7 row blocks"),
        (4096, 8192, 8192, "wgmma 128 rows x 256 tokens, 4 stages, K split 1"),
    ],
)
def test_measured_choices(m, n, k, expected):
    assert str(choose(GemmShape(m, n, k, 4), H200)).startswith(expected)


@pytest.mark.parametrize(
    ("n", "k", "m", "shared"),
    [
        # where stream-K was the fastest tile measured on an H200, 2026-11-23 (docs/log), and where it was not
        (5120, 13824, 256, True), (5120, 13824, 1024, True), (6144, 4096, 256, False), (6144, 4096, 1024, False),
        (4096, 14336, 256, False), (4096, 14336, 1024, False),
    ],
)  # fmt: skip
def test_the_last_wave_is_shared_where_that_was_fastest(n, k, m, shared):
    shape = GemmShape(m, n, k, 4)
    tile = choose(shape, H200)
    assert isinstance(tile, WgmmaTile) and (tile.splits == 0) == shared
    assert ("stream-K" in str(tile)) == shared
    assert all(row.tile.splits for row in candidates(shape, H200, batch_invariant=True))


def test_whole_waves_are_not_shared():
    rows = candidates(GemmShape(256, 132 * 128, 4096, 4), H200)
    reasons = {row.tile.tokens: row.reasons for row in rows if isinstance(row.tile, WgmmaTile) and row.tile.splits == 0}
    assert reasons.keys() == {128, 256}
    assert all("0 tiles of 32 x 128 k" in text for (text,) in reasons.values())


@settings(deadline=None, max_examples=50)
@given(n=st.integers(16, 30000), k=st.integers(64, 30000), bits=st.integers(2, 8), m=st.lists(st.integers(1, 8192), min_size=2))
def test_batch_invariant_sums_do_not_depend_on_m(n, k, bits, m):
    tiles = [choose(GemmShape(rows, n, k, bits), H200, True) for rows in m]
    assert all(isinstance(tile, WgmmaTile) and 1 in (tile.splits, tile.sections) for tile in tiles)
    assert len({tile.splits * tile.sections for tile in tiles}) == 1  # type: ignore[union-attr]


def test_what_was_measured_comes_before_what_is_modelled(monkeypatch):
    shape = GemmShape(128, 3000, 2000, 4)
    second = candidates(shape, H200)[1]
    row = Measured(H200.product, "2026-11-21", shape, second.tile, 9.0, 10.0)
    monkeypatch.setattr(module, "MEASURED", (row,))
    first = candidates(shape, H200)[0]
    assert first.tile == second.tile and str(first.measured).endswith("M 128: 9 us, 10 % less than modelled")
    assert row.holds_for(GemmShape(65, 3000, 2000, 4), H200)
    for other in (GemmShape(64, 3000, 2000, 4), GemmShape(129, 3000, 2000, 4), GemmShape(128, 3000, 2000, 8)):
        assert not row.holds_for(other, H200)
    assert not row.holds_for(shape, typical_machine(80))


@pytest.mark.parametrize("row", MEASURED, ids=str)
def test_measured_rows_name_tiles_that_are_candidates(row):
    machine = next(machine for machine in MACHINES if machine.product == row.product)
    assert row.us < 0.97 * row.instead_us
    assert candidates(row.shape, machine)[0].tile == row.tile == choose(row.shape, machine)
