"""Splits over packed pages: every machine and batch has a choice, batch-invariant ones do not depend on the batch."""

from __future__ import annotations

import itertools

import pytest

from lowbit.formats.kv import parse_kv
from lowbit.hardware.machine import MACHINES, typical_machine
from lowbit.kernels.choose.attention import AttentionShape
from lowbit.kernels.choose.packed_attention import (
    candidates_packed,
    choose_packed,
    packed_tile,
    packed_us,
    register_limits,
    token_bytes,
)

LLAMA = AttentionShape(32, 8, 128, 128**-0.5, 128)
H200 = typical_machine(90)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.product)
@pytest.mark.parametrize("kv", ["fp8", "int4", "k8v4"])
def test_there_is_a_tile_for_every_batch(machine, kv):
    scheme = parse_kv(kv)
    for shape, longest in itertools.product((LLAMA, AttentionShape(16, 1, 256, 1.0, 64, window=512)), (128, 4096, 131072)):
        tiles = [choose_packed(rows, shape, scheme, longest, machine) for rows in (1, 8, 64, 256)]
        assert all(tile.block == 128 and tile.chunk % 128 == 0 and tile.warps == 4 for tile in tiles)
        assert tiles[-1].splits <= tiles[0].splits
        assert len({choose_packed(rows, shape, scheme, longest, machine, True) for rows in (1, 8, 64, 256)}) == 1


def test_long_contexts_fill_the_machine_and_short_ones_are_not_cut_in_vain():
    for kv in map(parse_kv, ("fp8", "int4")):
        tile = choose_packed(1, LLAMA, kv, 131072, H200)
        places = H200.sm_count * tile.resident
        assert places // 2 < 8 * tile.active(131072) <= places
        tile = choose_packed(16, LLAMA, kv, 8192, H200)
        assert places // 2 < 16 * 8 * tile.active(8192) <= places
        assert choose_packed(64, LLAMA, kv, 1024, H200).splits == 1


def test_time_grows_with_bytes():
    assert token_bytes(LLAMA, parse_kv("int4")) == 8 * (128 + 4) and token_bytes(LLAMA, parse_kv("fp8")) == 8 * (256 + 4)
    tile = choose_packed(64, LLAMA, parse_kv("int4"), 8192, H200)
    tiles = [(choose_packed(64, LLAMA, kv, 8192, H200), kv) for kv in map(parse_kv, ("int4", "k8v4", "fp8"))]
    times = [packed_us(of_kv, 64, LLAMA, kv, 8192, 8192, H200) for of_kv, kv in tiles]
    assert times == sorted(times) and 1.6 < times[2] / times[0] < 2.1  # measured: 1.65
    windowed = AttentionShape(32, 8, 128, 1.0, 128, window=1024)
    assert packed_us(tile, 64, windowed, parse_kv("int4"), 8192, 8192, H200) < times[0] / 3


@pytest.mark.parametrize(
    ("kv", "rows", "context", "splits", "chunk", "registers", "us"),
    [  # measured by python -m benchmarks.tuning.attention --kv fp8 int4, H200, 2026-11-28
        ("fp8", 1, 1024, 8, 128, 168, 5.57), ("fp8", 1, 1024, 6, 128, 168, 6.48), ("fp8", 16, 8192, 3, 512, 168, 68.3),
        ("fp8", 16, 8192, 2, 512, 168, 74.7), ("fp8", 64, 1024, 1, 128, 168, 42.4), ("fp8", 64, 8192, 1, 128, 168, 283),
        ("fp8", 64, 8192, 3, 1024, 168, 249), ("fp8", 16, 32768, 6, 512, 168, 250), ("int4", 1, 1024, 12, 128, 128, 5.8),
        ("int4", 16, 8192, 4, 128, 128, 43), ("int4", 16, 8192, 3, 128, 168, 40.5), ("int4", 64, 1024, 1, 128, 128, 22.7),
        ("int4", 64, 8192, 1, 128, 128, 152), ("int4", 16, 32768, 4, 128, 128, 153), ("int4", 1, 131072, 64, 128, 128, 46),
    ],
)  # fmt: skip
def test_the_model_is_near_what_was_measured(kv, rows, context, splits, chunk, registers, us):
    scheme = parse_kv(kv)
    tile = packed_tile(splits, chunk, register_limits(LLAMA, scheme), registers)
    assert abs(packed_us(tile, rows, LLAMA, scheme, context, context, H200) / us - 1) < 0.08


@pytest.mark.parametrize(
    ("rows", "context", "registers"),
    [(64, 1024, 128), (64, 8192, 128), (16, 8192, 168), (16, 32768, 168), (1, 1024, 168), (1, 131072, 168)],
)
def test_four_programs_share_an_sm_where_three_need_another_wave(rows, context, registers):
    """int4 with heads of 128 elements: fewer registers where the programs of all rows then run at once; else no spills."""
    tile = choose_packed(rows, LLAMA, parse_kv("int4"), context + 128, H200)
    early = ", early keys" if registers == 168 else ""
    assert tile.registers == registers and str(tile).endswith(f"at most {registers} registers{early}")
    programs = 8 * rows * tile.active(context)
    assert programs <= H200.sm_count * tile.resident
    invariant = {choose_packed(count, LLAMA, parse_kv("int4"), context + 128, H200, True) for count in (1, 16, 64)}
    assert len(invariant) == 1  # so that a row's bits do not depend on the batch


def test_registers_and_programs():
    for head_dim, kv, registers, programs in (
        (64, "int4", (0,), [4]), (64, "fp8", (0,), [4]), (96, "int4", (0,), [4]), (128, "int4", (128, 168), [4, 3]),
        (128, "fp8", (168,), [3]), (128, "k8v4", (168,), [3]), (256, "int4", (255,), [2]), (256, "fp8", (255,), [2]),
    ):  # fmt: skip
        shape = AttentionShape(8, 2, head_dim, 1.0, head_dim)
        limits = register_limits(shape, parse_kv(kv))
        assert limits == registers and [packed_tile(1, 128, limits, limit).resident for limit in limits] == programs
        tiles = [row.tile for row in candidates_packed(1, shape, parse_kv(kv), 1024, H200)]
        assert {tile.registers for tile in tiles} == set(limits)
        assert {tile.registers for tile in tiles if tile.tight} == set(limits[:-1])


def test_refusals():
    odd = AttentionShape(8, 2, 100, 1.0, 100)
    assert any(
        "a multiple of 8, got 100" in reason for reason in candidates_packed(1, odd, parse_kv("int4"), 128, H200)[0].reasons
    )
    with pytest.raises(ValueError, match="a multiple of 8, got 100"):
        choose_packed(1, odd, parse_kv("int4"), 1024, H200)
