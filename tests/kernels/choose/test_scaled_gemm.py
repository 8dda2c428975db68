"""The choice of tile for 8-bit activations: the cost model ranks the tile first that was measured to be the best."""

from __future__ import annotations

import pytest

from lowbit.formats import parse_scheme
from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose.scaled_gemm import ScaledShape, candidates_scaled, choose_scaled, shared_bytes
from lowbit.ops.byte_gemm import scaled_shape

H200 = typical_machine(90)


@pytest.mark.parametrize(
    ("scheme", "m", "k", "warpgroups", "columns", "splits"),
    [  # N 8192, the fastest of 3 to 12 tiles measured on an H200, 2026-11-21
        ("w8a8", 1, 8192, 1, 8, 1),
        ("w8a8", 16, 28672, 1, 16, 1),
        ("w8a8", 64, 8192, 1, 64, 1),
        ("w8a8", 128, 8192, 1, 128, 1),
        ("w8a8", 128, 28672, 2, 128, 2),
        ("w8a8", 256, 8192, 2, 128, 1),
        ("w8a8", 256, 28672, 2, 256, 2),
        ("w8a8", 1024, 8192, 2, 256, 1),
        ("w8a8", 4096, 28672, 2, 256, 1),
        ("fp8_dynamic", 128, 8192, 1, 128, 1),
        ("fp8_dynamic", 128, 28672, 2, 128, 2),
        ("fp8_dynamic", 256, 8192, 2, 128, 1),
        ("fp8_dynamic", 256, 28672, 2, 256, 2),
        ("fp8_dynamic", 1024, 28672, 2, 256, 1),
        ("fp8_dynamic", 4096, 8192, 2, 256, 1),
        ("w4a8_g128", 1, 8192, 2, 8, 2),
        ("w4a8_g128", 16, 8192, 2, 16, 2),
        ("w4a8_g128", 64, 28672, 2, 64, 2),
        ("w4a8_g128", 128, 8192, 2, 128, 2),
        ("w4a8_g128", 256, 8192, 2, 128, 1),
        ("w4a8_g128", 4096, 8192, 2, 256, 1),
        ("w4a8e4m3_g128", 16, 28672, 2, 16, 2),
        ("w4a8e4m3_g128", 1024, 8192, 2, 256, 1),
        ("w4a8e4m3", 64, 8192, 2, 64, 2),
        ("w4a8e4m3", 128, 8192, 2, 128, 2),
        ("w4a8e4m3", 256, 28672, 2, 128, 1),
        ("w4a8e4m3", 1024, 28672, 2, 256, 1),
        ("w4a8", 4096, 8192, 2, 128, 1),
    ],
)
def test_the_fastest_tile_comes_first(scheme, m, k, warpgroups, columns, splits):
    tile = choose_scaled(scaled_shape(parse_scheme(scheme), m, 8192, k), H200)
    assert (tile.warpgroups, tile.columns, tile.splits) == (warpgroups, columns, splits)


def test_fast_sums_are_those_of_fp8_by_fp8_alone():
    """`fast_accum` matters for fp8 x fp8 only. Other products lose no precision if the tensor core adds all of K."""

    def promoted(scheme, fast):
        return scaled_shape(parse_scheme(scheme), 256, 8192, 8192, fast_accum=fast).promoted

    for scheme in ("fp8_dynamic", "fp8", "w8e4m3a8e5m2"):
        assert promoted(scheme, False) and not promoted(scheme, True), scheme
    for scheme in ("fp8_block", "w4a8e4m3", "w4a8e4m3_g128", "w8a8", "w4a8"):
        assert promoted(scheme, False) == promoted(scheme, True) == ("a8e4m3" in scheme or scheme == "fp8_block"), scheme
    blocks = scaled_shape(parse_scheme("fp8_dynamic"), 256, 8192, 8192, True, fast_accum=True)
    assert blocks.promoted, "scales of x change every 128 k"


def test_scales_of_blocks_keep_to_one_block():
    for m in (1, 64, 1000):
        rows = candidates_scaled(scaled_shape(parse_scheme("fp8_block"), m, 4096, 4096, x_blocks=True), H200)
        assert all(row.tile.channels <= 128 for row in rows if not row.reasons)
        assert m < 1000 or any("one block of scales" in " ".join(row.reasons) for row in rows)
    assert choose_scaled(scaled_shape(parse_scheme("fp8_block"), 1000, 4096, 4096, True), H200).tokens_are_rows


def test_candidates_fit_shared_memory():
    for bits in (4, 6, 8):
        shape = ScaledShape(300, 4096, 4096, bits)
        tiles = [row.tile for row in candidates_scaled(shape, H200) if not row.reasons]
        assert tiles and all(shared_bytes(tile, shape) <= H200.arch.shared_per_block_bytes for tile in tiles)


def test_pairs_meet_within_one_wave():
    """The two blocks of a pair share one tile. They reduce through the cluster, not through global memory. Products with many
    tokens take no pairs."""
    shape = scaled_shape(parse_scheme("fp8_dynamic"), 256, 8192, 28672)
    tile = choose_scaled(shape, H200)
    assert tile.pair and "pair of blocks" in str(tile)
    many = scaled_shape(parse_scheme("fp8_dynamic"), 4096, 8192, 28672)
    assert not choose_scaled(many, H200).pair
    narrow = [row for row in candidates_scaled(shape, H200) if row.tile.pair and row.tile.columns < 16]
    assert narrow and all("no two halves" in " ".join(row.reasons) for row in narrow)
