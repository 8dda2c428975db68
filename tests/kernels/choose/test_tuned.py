"""Tiles measured on this machine override modelled ones. A damaged or wrong file changes nothing."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest
import torch

from lowbit._version import __version__
from lowbit.formats import parse_scheme
from lowbit.hardware.machine import typical_machine
from lowbit.kernels.choose import tuned
from lowbit.kernels.choose.gemm import candidates, choose
from lowbit.kernels.choose.scaled_gemm import KINDS as SCALED
from lowbit.kernels.choose.scaled_gemm import ScaledTile, candidates_scaled, choose_scaled
from lowbit.kernels.choose.tiles import KINDS, GemmShape, MmaTile, RingTile, WgmmaTile
from lowbit.kernels.choose.tuned import RESULT, SCHEMA, TunedRow, problem_of, read, written
from lowbit.ops.table import Problem, scaled_shape
from lowbit.ops.table import choose as choose_kernel

H200, A100 = typical_machine(90), typical_machine(80)
SHAPE = GemmShape(64, 5120, 13824, 4)


@pytest.fixture
def file(tmp_path):
    tuned.forget()
    yield tmp_path / "h200.json"
    tuned.forget()


def write(file, products, **other):
    rows = {problem: [asdict(row) for row in found] for problem, found in products.items()}
    file.write_text(json.dumps({"result": RESULT, "schema": SCHEMA, "lowbit": __version__, "products": rows} | other))
    return str(file)


def measured(tile, m=64, kinds=KINDS):
    return TunedRow(m, written(tile, kinds), 20.0, 25.0, "2026-11-23")


@pytest.mark.parametrize("machine", [H200, A100], ids=lambda machine: machine.product)
def test_the_measured_tile_comes_first(file, machine):
    """The measured tile is used for the measured number of tokens only, and not for a batch-invariant product."""
    modelled = choose(SHAPE, machine)
    other = next(row.tile for row in candidates(SHAPE, machine)[1:] if not row.reasons and row.tile != modelled)
    here = replace(machine, tuned=write(file, {problem_of(SHAPE): [measured(other)]}))
    assert choose(SHAPE, here) == other
    for shape in (replace(SHAPE, m=32), replace(SHAPE, m=65), replace(SHAPE, n=5136), replace(SHAPE, bits=8)):
        assert choose(shape, here) == choose(shape, machine)
    assert choose(SHAPE, here, True) == choose(SHAPE, machine, True)
    assert len(candidates(SHAPE, here)) == len(candidates(SHAPE, machine))


def cost_of(tile, shape, machine):
    rows = {row.tile: row.cost_us for row in candidates(shape, machine) if not row.reasons}
    return rows[tile] / min(rows.values())


def test_fewer_tokens(file):
    """A measured tile also serves fewer tokens, down to half of the measured number (exclusive), unless the cost model rates it
    slower there. The nearest measured number wins.
    """
    shape = GemmShape(512, 28672, 4096, 4)
    tiles = [row.tile for row in candidates(shape, H200) if not row.reasons][1:]
    fewer = replace(shape, m=400)
    near = next(tile for tile in tiles if 1 < cost_of(tile, fewer, H200) < tuned.NO_SLOWER)
    far = next(tile for tile in tiles if cost_of(tile, fewer, H200) > 1.2)
    for name, tile in (("near", near), ("far", far)):
        here = replace(H200, tuned=write(file.with_name(name), {problem_of(shape): [measured(tile, 512)]}))
        assert choose(shape, here) == tile
        assert choose(fewer, here) == (tile if tile == near else choose(fewer, H200))
        assert choose(replace(shape, m=256), here) == choose(replace(shape, m=256), H200)
    rows = [measured(near, 512), measured(far, 400)]
    assert choose(fewer, replace(H200, tuned=write(file.with_name("both"), {problem_of(shape): rows}))) == far


def test_where_nothing_gained_the_model_decides(file):
    """If the measured tile was the modelled one, the model also chooses for fewer tokens, where that tile would be a bad
    choice.
    """
    shape = GemmShape(1024, 6144, 4096, 4)
    modelled = written(choose(shape, A100), KINDS)
    here = replace(A100, tuned=write(file, {problem_of(shape): [TunedRow(1024, modelled, 100.0, 100.0, "2026-11-23")]}))
    for m in (513, 520, 700, 1024):
        assert choose(replace(shape, m=m), here) == choose(replace(shape, m=m), A100)


def test_a_tile_that_the_choice_does_not_consider(file):
    tile = WgmmaTile(64, 2, 8, 7, 2)
    assert tile not in [row.tile for row in candidates(SHAPE, H200)]
    here = replace(H200, tuned=write(file, {problem_of(SHAPE): [measured(tile)]}))
    assert choose(SHAPE, here) == tile


def test_products_with_8_bits(file):
    shape = scaled_shape(parse_scheme("w8a8"), 64, 5120, 13824)
    tile = [row.tile for row in candidates_scaled(shape, H200) if not row.reasons][2]
    here = replace(H200, tuned=write(file, {problem_of(shape): [measured(tile, kinds=SCALED)]}))
    assert choose_scaled(shape, here) == tile != choose_scaled(shape, H200)
    assert choose_scaled(replace(shape, integer=False), here) == choose_scaled(replace(shape, integer=False), H200)
    words = choose_kernel(Problem(parse_scheme("w8a8"), 64, 5120, 13824, torch.bfloat16, here)).tile
    told = words(Problem(parse_scheme("w8a8"), 64, 5120, 13824, torch.bfloat16, here))[0]
    assert str(tile) in told and "measured here by `lowbit tune`, 2026-11-23, M 64: 20 us, 20 % less than modelled" in told


def stated(**products):
    return json.dumps({"result": RESULT, "schema": SCHEMA, "lowbit": __version__, **products})


def row(**changed):
    return {"m": 64, "tile": "wgmma 64 2 8 7 2", "us": 1.0, "modelled_us": 2.0, "date": "2026-11-23", **changed}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Expecting property name"),
        ("[]", "no file of `lowbit tune`"),
        (json.dumps({"result": "another", "schema": SCHEMA}), "no file of `lowbit tune`"),
        (json.dumps({"result": RESULT, "schema": SCHEMA, "lowbit": "0.0.1"}), "lowbit 0.0.1 measured it"),
        (
            json.dumps({"result": RESULT, "schema": SCHEMA, "lowbit": __version__, "products": {"a": [{}]}}),
            "a measurement has the fields",
        ),
        ("[" * 100_000, "recursion"),
        ("\udcff".encode("utf-8", "surrogatepass").decode("latin-1"), "Expecting value"),
        (stated(products=[]), "its products are no object"),
        (stated(products={"a": 3}), "its products are no object"),
        (stated(products={"a": ["x"]}), "'a': a measurement has the fields"),
        (stated(products={"a": [row(m="64")]}), "'a': m is a number of tokens, got '64'"),
        (stated(products={"a": [row(m=-1)]}), "'a': m is a number of tokens, got -1"),
        (stated(products={"a": [row(us=math.nan)]}), "'a': us is a time in microseconds, got nan"),
        (stated(products={"a": [row(us="1")]}), "'a': us is a time in microseconds, got '1'"),
        (stated(products={"a": [row(modelled_us=0)]}), "'a': modelled_us is a time in microseconds, got 0"),
        (stated(products={"a": [row(tile=None)]}), "'a': tile is a text, got None"),
        (stated(products={"a": [row(date=3)]}), "'a': date is a text, got 3"),
    ],
)
def test_a_file_that_is_wrong_is_left_aside(file, text, why):
    file.write_text(text)
    here = replace(H200, tuned=str(file))
    with pytest.warns(UserWarning, match=why):
        assert choose(SHAPE, here) == choose(SHAPE, H200)


TILES = (
    "", " ", "wgmma 64", "wgmma 64 2 8 many 2", "wgmma 64 2 8 -4 2", f"wgmma 64 2 8 {10**9} 2", "wgmma 0 0 0 0 0",
    "wgmma 64 3 8 4 2", "wgmma 64 2 8 4 2 0 1 2 3 4 5 6", "ring 0 0 0 0 0 0 0", "ring 8 99999 2 1 8 1",
    "another 1 2", "ring 8 3 2 1 8 1",
)  # fmt: skip


@pytest.mark.parametrize("text", TILES)
def test_tiles_that_nobody_knows_are_left_aside(file, text):
    """A ring tile that was written before fields were added still loads. Texts of unknown tiles and impossible numbers are
    ignored."""
    if text == "ring 8 3 2 1 8 1":
        assert read(text, KINDS) == RingTile(8, 3, 2, 1, 8, 1)
    else:
        here = replace(H200, tuned=write(file, {problem_of(SHAPE): [TunedRow(64, text, 1.0, 2.0, "2026-11-23")]}))
        assert choose(SHAPE, here) == choose(SHAPE, H200)


def test_names_of_problems_tell_all_but_tokens():
    assert problem_of(SHAPE) == "GemmShape 5120 13824 4" == problem_of(replace(SHAPE, m=1))
    shapes = [scaled_shape(parse_scheme(name), 1, 512, 1024) for name in ("w8a8", "fp8_dynamic", "w4a8_g128", "fp8_block")]
    assert len({problem_of(shape) for shape in shapes}) == 4
    assert read(written(MmaTile(64, 2, 4, 2, 3, 1), KINDS), KINDS) == MmaTile(64, 2, 4, 2, 3, 1)
    assert read(written(ScaledTile(False, 2, 64, 4, 1, 8), SCALED), SCALED) == ScaledTile(False, 2, 64, 4, 1, 8)
