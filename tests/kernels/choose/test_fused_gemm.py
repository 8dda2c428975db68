"""Tiles of the fused products of a decode step: a measured tile if there is one, otherwise full waves, and never a refusal."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.hardware.arch import arch_for
from lowbit.hardware.machine import MACHINES, typical_machine
from lowbit.kernels.choose.fused_gemm import CHAIN_TOKENS, MOST_PARTS, chain_candidates, choose_chain, parts_of
from lowbit.kernels.choose.large_m import LEAST_STAGES
from lowbit.kernels.choose.measured import MEASURED_CHAINS as MEASURED
from lowbit.kernels.choose.tiles import DENSE_BITS, RING_TOKENS, GemmShape, RingTile, WgmmaTile, shared_by

H200 = typical_machine(90)
ROLES = ["norm", "gated", "residual"]
MODELS = {
    # hidden size, width of qkv, width of all heads together, intermediate size
    "SmolLM2-135M": (576, 960, 576, 1536),
    "Qwen2.5-0.5B": (896, 1152, 896, 4864),
    "Llama-3-8B": (4096, 6144, 4096, 14336),
    "Llama-2-13B": (5120, 15360, 5120, 13824),
    "Llama-2-70B": (8192, 10240, 8192, 28672),
}


def products(model):
    hidden, qkv, heads, intermediate = MODELS[model]
    return [
        ("norm", qkv, hidden),
        ("residual", hidden, heads),
        ("gated", 2 * intermediate, hidden),
        ("residual", hidden, intermediate),
    ]


def blocks(tile, shape):
    return -(-shape.row_blocks // tile.tile_row_blocks) * tile.splits


@settings(deadline=None, max_examples=200)
@given(
    role=st.sampled_from(ROLES), m=st.integers(1, CHAIN_TOKENS), n=st.integers(1, 32768), k=st.integers(1, 32768),
    bits=st.integers(2, 9), invariant=st.booleans(),
)  # fmt: skip
def test_every_shape_has_a_tile(role, m, n, k, bits, invariant):
    bits = bits if bits < 9 else DENSE_BITS
    shape = GemmShape(m, n, k, bits)
    tile = choose_chain(role, shape, H200, invariant)
    assert m <= tile.tokens or isinstance(tile, RingTile)
    assert isinstance(tile, WgmmaTile) or tile.tile_row_blocks <= shape.row_blocks
    assert role != "residual" or parts_of(tile, shape) <= MOST_PARTS
    if invariant:
        other = choose_chain(role, GemmShape(1 + CHAIN_TOKENS - m, n, k, bits), H200, True)
        assert (tile.tile_row_blocks, tile.warps_k, tile.splits) == (other.tile_row_blocks, 8, 1) and other.splits == 1


@pytest.mark.parametrize("sm_count", [16, 26, 60])
def test_few_sms_have_a_tile_too(sm_count):
    """On a slice of a GPU the wgmma kernel cannot add every product to h in one wave. Then the small-M kernel is chosen, in
    blocks of tokens.
    """
    part = replace(H200, product="a part of an H200", sm_count=sm_count)
    for m in (16, 17, 32, 64):
        for role in ROLES:
            assert choose_chain(role, GemmShape(m, 16384, 8192, 4), part).splits >= 1
    wide = choose_chain("residual", GemmShape(64, 16384, 8192, 4), part)
    assert isinstance(wide, RingTile) and wide.blocks_per_sm == 0, "several waves"


@pytest.mark.parametrize("role", ["norm", "residual"])
def test_no_tile_waits_for_itself(role):
    rows = chain_candidates(role, GemmShape(64, 4096, 4096, 6), H200)
    tiled = [row for row in rows if isinstance(row.tile, WgmmaTile)]
    assert all((row.tile.stages < LEAST_STAGES) <= bool(row.reasons) for row in tiled)
    assert {row.tile.stages for row in tiled} & {2}, "memory for the end leaves room for 2"


@pytest.mark.parametrize("row", MEASURED, ids=str)
def test_measured_tiles_are_chosen(row):
    for m in row.tokens:
        shape = GemmShape(m, row.n, row.k, row.bits)
        assert choose_chain(row.role, shape, H200) == row.tile == chain_candidates(row.role, shape, H200)[0].tile
        assert not any(one.measured for one in chain_candidates(row.role, shape, typical_machine(80)))


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("m", [1, 4, 8])
@pytest.mark.parametrize("model", MODELS)
def test_few_tokens_fill_whole_waves(model, m, bits):
    """The SMs of an H200 are busy for at least 70 % of the time of the busiest SM. Measured tiles and products with fewer row
    blocks than SMs are exempt.
    """
    for role, n, k in products(model):
        shape = GemmShape(m, n, k, bits)
        tile = choose_chain(role, shape, H200)
        measured = chain_candidates(role, shape, H200)[0].measured
        count = blocks(tile, shape)
        assert tile.splits == 1, "blocks would meet in memory"
        if shape.row_blocks >= H200.sm_count and not measured:
            busiest = -(-count // H200.sm_count) * tile.tile_row_blocks
            assert shape.row_blocks / (busiest * H200.sm_count) >= 0.7, (role, n, k, str(tile))
        assert (tile.blocks_per_sm == 1) == (count <= H200.sm_count)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.product)
def test_every_machine_has_room(machine):
    for model in MODELS:
        for role, n, k in products(model):
            for m in (1, 16):
                for bits in (8, DENSE_BITS):
                    tile = choose_chain(role, GemmShape(m, n, k, bits), machine)
                    if isinstance(tile, RingTile):
                        assert shared_by(tile, machine.arch) <= machine.arch.shared_per_block_bytes


@settings(deadline=None, max_examples=60)
@given(role=st.sampled_from(ROLES), m=st.integers(1, RING_TOKENS), n=st.integers(16, 40000), k=st.integers(8, 30000))
def test_weights_of_16_bits_are_the_ring_kernels(role, m, n, k):
    """16-bit weights always take the small-M kernel. Its ring may have fewer slots than row blocks. It always fits shared
    memory."""
    for row in chain_candidates(role, GemmShape(m, n, k, DENSE_BITS), H200):
        assert isinstance(row.tile, RingTile) and row.tile.tokens == (8 if m <= 8 else 16)
        assert row.tile.row_blocks * row.tile.rounds % row.tile.depth == 0
        warps = row.tile.warps_n * row.tile.warps_k
        assert row.reasons or warps * row.tile.depth * 4096 <= H200.arch.shared_per_block_bytes


@pytest.mark.parametrize("sm", [80, 86, 90])
def test_shared_memory_keeps_blocks_apart(sm):
    arch = arch_for(sm)
    for count in (1, 2, 3):
        tile = RingTile(8, 1, 1, 1, 8, 1, blocks_per_sm=count)
        taken = shared_by(tile, arch) + 1024
        assert (count + 1) * taken > arch.shared_per_sm_bytes >= count * taken
    assert shared_by(RingTile(8, 1, 1, 1, 8, 1), arch) == 0


def test_printed():
    row = chain_candidates("residual", GemmShape(1, 4096, 4096, 4), H200)[0]
    assert str(row.tile).endswith("K split 1, 1 block an SM")
    assert str(row.measured).startswith("measured in a step on H200, 2026-11-22, 1 to 2 tokens: o")
