"""The measurement of attention tiles: which tiles it would time, and one row on a GPU."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.tuning import attention
from benchmarks.tuning.attention import CONTEXTS, LLAMA, ROWS, Timed, make_batch, packed_tiles, tiles_to_time, time_tiles
from lowbit.formats.kv import KV16, parse_kv
from lowbit.hardware.machine import machine_of, typical_machine
from lowbit.kernels.choose.attention import DecodeTile, attention_refusals, choose_decode
from lowbit.kernels.choose.packed_attention import choose_packed
from lowbit.kernels.reference.attention import decode_reference

gpu = pytest.mark.gpu


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("context", CONTEXTS)
def test_the_chosen_tile_and_others_of_all_warps_are_timed(rows, context):
    machine = typical_machine(90)
    tiles = tiles_to_time(rows, context, LLAMA, machine, 6)
    assert not attention_refusals(LLAMA)
    assert tiles[0] == choose_decode(rows, LLAMA, context + 128, machine)
    assert {tile.warps for tile in tiles} == {1, 2, 4} and len(set(tiles)) == len(tiles) <= 30


def test_a_batch_has_pages_of_its_own_for_each_row():
    for kv in ("16", "fp8", "k8v4"):
        batch = make_batch(3, 256, LLAMA, parse_kv(kv), torch.float32, 2, "cpu")
        assert sorted(batch.tables.flatten().tolist()) == list(range(9)) and len(batch.caches) == 2
        k, v = batch.caches[0].read(batch.tables[0].long()[:, None], torch.arange(128), torch.float32)
        assert 0.5 < k.std() < 1.5 and 0.5 < v.std() < 1.5
        state = batch.tables, batch.positions, batch.rows, batch.cos_sin
        assert decode_reference(batch.qkv, batch.caches[0], *state, LLAMA).isfinite().all()


def test_a_row_says_what_was_found():
    tile = DecodeTile(16, 64, 32, 2)
    line = str(Timed(KV16, 1, 1024, tile, True, 5.7, 5.8, 0.92, 0.0042))
    assert line.startswith("16    B   1 context   1024 *     5.70 us,  737 GB/s, 0.16 of the limit, model 5.80 us: at most 16")
    assert "out of memory" in str(Timed(KV16, 1, 1024, tile, False, None, 5.8, 0.92, 0.0042, "out of memory"))


def test_a_result_file_has_all_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(attention, "read_bandwidth", lambda: (4e12, "a kernel"))
    monkeypatch.setattr(attention, "machine_now", lambda: {"gpu": "a GPU", "commit": "abc"})
    machine = typical_machine(90)
    results = attention.Results(tmp_path / "attention.json", LLAMA, torch.float16, machine)
    kv = parse_kv("int4")
    tile = choose_packed(16, LLAMA, kv, 8320, machine)
    results.add([Timed(kv, 16, 8192, tile, True, 40.5, 42.4, 30.2, 0.138, None, 1e-3, 1900.0, 600.0)])
    rival = "pages of 16 tokens, at most 32 splits"
    results.add([Timed(parse_kv("fp8"), 16, 8192, rival, False, 70.0, None, 58.6, 0.268, impl=attention.FA3)])
    document = json.loads((tmp_path / "attention.json").read_text())
    assert document["complete"] is False and document["machine"]["commit"] == "abc" and "power_w" in document["protocol"]
    own, other = document["rows"]
    assert (own["impl"], own["kv_dtype"], own["registers"], own["splits"]) == ("lowbit", "int4", 168, 3)
    assert (own["us"], own["bytes"], own["sm_clock_mhz"], own["power_w"]) == (40.5, 138000000, 1900.0, 600.0)
    assert (other["impl"], other["tile"], other["model_us"], other["splits"]) == ("FlashAttention-3", rival, None, None)
    results.finish()
    assert json.loads((tmp_path / "attention.json").read_text())["complete"] is True
    (tmp_path / "other.json").write_text('{"result": "another"}')
    with pytest.raises(ValueError, match="it is not replaced"):
        attention.Results(tmp_path / "other.json", LLAMA, torch.float16, machine)


@pytest.mark.parametrize("kv", ["fp8", "int4"])
def test_tiles_of_packed_pages_split_contexts_differently(kv):
    for rows, context in ((1, 131072), (16, 8192), (64, 300)):
        tiles = packed_tiles(rows, context, LLAMA, parse_kv(kv), typical_machine(90), 6)
        assert tiles[0] == choose_packed(rows, LLAMA, parse_kv(kv), (context // 128 + 1) * 128, typical_machine(90))
        assert len({(tile.active(context), tile.registers, tile.early_keys) for tile in tiles}) == len(tiles) >= 3
        assert (
            tiles[0].early_keys
            == (tiles[0].registers == 168)
            == (not tiles[1].early_keys and tiles[1].splits == tiles[0].splits)
        )


@gpu
def test_tiles_are_timed_and_checked():
    machine = machine_of("cuda")
    tiles = tiles_to_time(4, 1000, LLAMA, machine, 3)
    for kv in map(parse_kv, ("16", "fp8", "int4")):
        if kv.quantized:
            tiles = packed_tiles(4, 1000, LLAMA, kv, machine, 3)
        rows = list(time_tiles(4, 1000, LLAMA, kv, torch.float16, tiles, machine))
        assert [row.error for row in rows] == [None] * len(tiles) and rows[0].chosen
        assert all(row.us is not None and row.us > row.limit_us for row in rows)
