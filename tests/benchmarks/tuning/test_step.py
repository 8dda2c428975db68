"""The search for a decode step's tiles: its candidates, that operators launch the given tiles, and one run on a GPU."""

from __future__ import annotations

import importlib

import pytest
import torch

from benchmarks import language_model
from benchmarks.e2e import engine_for
from benchmarks.language_model import random_model
from benchmarks.tuning.step import StepTrial, TiledPart, given, parts_of, search
from lowbit.hardware.machine import machine_of, typical_machine
from lowbit.kernels.choose.fused_gemm import choose_chain
from lowbit.kernels.choose.gemm import choose
from lowbit.kernels.choose.tiles import GemmShape, RingTile
from tests.benchmarks.test_e2e import SMALL
from tests.engine.test_chain import packed, program_of
from tests.tiny import eager_llama

H200 = typical_machine(90)


@pytest.mark.parametrize("rows", [1, 16])
def test_every_product_and_attention_is_tried(rows):
    """Up to eight rows, it tries the chained kernels' tiles, with one block per SM and with several. For more rows, it tries
    the tiles of the plain GEMMs.
    """
    program = program_of(packed(eager_llama(torch.float16), "w4a16_g32"))
    parts = {part.name: part for part in parts_of(program, rows, 128, H200, 6)}
    head = {"head"} if rows == 1 else set()
    assert {*parts} == {"gate_up", "down", "qkv", "o", "attention"} | head, (
        "a head in 16 bits is the chain's as far as there is one"
    )
    for name in ("gate_up", "down", "qkv", "o"):
        part = parts[name]
        assert part.shape.m == rows and len(part.tiles) > 2 and len(set(part.tiles)) == len(part.tiles)
        chosen = choose_chain(part.role, part.shape, H200) if part.role else choose(part.shape, H200)
        assert part.tiles[0] == chosen and (part.role is None) == (rows > 8)
    if rows == 1:
        assert {tile.blocks_per_sm for tile in parts["down"].tiles} == {0, 1}
    assert {tile.warps for tile in parts["attention"].tiles} == {1, 2, 4}


def test_operators_take_what_they_are_given_and_no_longer_than_that():
    ops = [importlib.import_module(f"lowbit.ops.{name}") for name in ("fragment_gemm", "fused_gemm", "attention")]
    before = [ops[0].choose, ops[1].choose_chain, ops[2].choose_decode]
    shape, tile = GemmShape(4, 4096, 4096, 4), RingTile(8, 5, 1, 1, 8, 1)
    part = TiledPart("o", "residual", shape, ())
    with pytest.raises(RuntimeError, match="its end"), given({"o": tile}, [part]):
        assert ops[1].choose_chain("residual", shape, H200, False) == tile
        assert ops[1].choose_chain("norm", shape, H200, False) != tile and ops[0].choose(shape, H200) != tile
        raise RuntimeError("its end")
    assert [ops[0].choose, ops[1].choose_chain, ops[2].choose_decode] == before


@pytest.mark.gpu
def test_a_search_on_a_gpu(monkeypatch):
    monkeypatch.setitem(
        language_model.SHAPES, "small", lambda: language_model._llama(**SMALL | {"hidden": 256, "intermediate": 704})
    )
    model = random_model("small", "w4a16_g32", "w8a16", torch.float16, torch.device("cuda"), 2)
    engine = engine_for(model, [(16, 512)])
    for rows in (2, 16):
        trial = StepTrial(engine, rows, 200)
        lines = list(search(trial, parts_of(engine.program, rows, trial.reach, machine_of("cuda"), 3)))
        assert lines[0].startswith("chosen tiles: ") and sum("attention: " in line for line in lines) >= 2
        assert any(line.startswith("kept: ") for line in lines) and not any("differ" in line for line in lines)
