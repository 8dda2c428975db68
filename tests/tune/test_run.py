"""`lowbit tune`: a model's GEMMs, the tile that is kept, the file's contents; on a GPU, that the tile is launched."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from lowbit._version import __version__
from lowbit.cli.commands import app
from lowbit.folders import tuned_file
from lowbit.hardware.machine import machine_of, typical_machine
from lowbit.kernels.choose import tuned
from lowbit.kernels.choose.gemm import choose
from lowbit.kernels.choose.tiles import KINDS, GemmShape
from lowbit.kernels.choose.tuned import TunedRow
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from lowbit.tune import run as tune
from lowbit.tune.run import Tuned, fastest, keep, products_of_model, with_a_choice
from tests.tiny import save_tiny
from tests.tiny_experts import tiny_experts

H200 = typical_machine(90)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tuned.forget()
    yield tmp_path / "cache"
    tuned.forget()


def test_products_of_a_model(tmp_path):
    """Each GEMM is listed once, fused ones as well. For a lowbit checkpoint, each has the scheme in its config.json."""
    source = save_tiny(tmp_path / "tiny")
    config = json.loads((source / "config.json").read_text())
    hidden, between = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    wanted = {
        (hidden + 2 * kv, hidden),
        (2 * between, hidden),
        (hidden, hidden),
        (kv, hidden),
        (between, hidden),
        (hidden, between),
    }
    (found,) = products_of_model(source, "w8a16").values()
    assert set(found) == wanted and len(found) == len(wanted)
    quantize_checkpoint(source, tmp_path / "quantized", "w4a16_g32", progress=False)
    assert products_of_model(tmp_path / "quantized", None) == {"w4a16_g32": found}
    with pytest.raises(ValueError, match="is not quantized; name the scheme"):
        products_of_model(source, None)
    with pytest.raises(ValueError, match="states its schemes; leave out --scheme"):
        products_of_model(tmp_path / "quantized", "w8a8")


def test_experts_are_left_out_with_a_line(tmp_path):
    tiny_experts("mixtral").save_pretrained(tmp_path / "m")
    quantize_checkpoint(tmp_path / "m", tmp_path / "q", "w4a16_g32", progress=False)
    for source, scheme in ((tmp_path / "m", "w4a16_g32"), (tmp_path / "q", None)):
        lines: list[str] = []
        (found,) = products_of_model(source, scheme, lines.append).values()
        assert len(lines) == 1 and lines[0].startswith("4 weights of experts keep the tiles"), lines
        assert found and all(n <= 160 for n, _ in found)


@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_is_a_product_where_it_is_the_head(tied, tmp_path):
    source = save_tiny(tmp_path / "tiny", tied=tied)
    quantize_checkpoint(source, tmp_path / "quantized", "w8a16", embeddings=True, progress=False)
    config = json.loads((source / "config.json").read_text())
    (found,) = products_of_model(tmp_path / "quantized", None).values()
    assert (config["vocab_size"], config["hidden_size"]) in found


def test_another_tile_is_kept_where_it_gains():
    us = {"a": 10.0, "b": 9.8, "c": 12.0}
    assert fastest("a", us, 16, "today") == TunedRow(16, "a", 10.0, 10.0, "today")
    assert fastest("c", us, 16, "today") == TunedRow(16, "b", 9.8, 12.0, "today")
    assert fastest("d", us, 16, "today") == TunedRow(16, "b", 9.8, 9.8, "today"), "the modelled one failed"


def test_files_add_up(cache):
    """New results replace older ones of the same GEMM; results of another version are dropped."""
    file = tuned_file("H200")
    first, second = (
        Tuned("w4a16_g128", 4096, 4096, TunedRow(m, "wgmma 64 2 8 2 2", 9.0, 10.0, "2026-11-23")) for m in (64, 128)
    )
    keep(file, [first], H200)
    keep(file, [second, replace(first, kept=replace(first.kept, us=8.0))], H200)
    rows = json.loads(file.read_text())["products"]["GemmShape 4096 4096 4"]
    assert [(row["m"], row["us"]) for row in rows] == [(64, 8.0), (128, 9.0)]
    here = replace(H200, tuned=str(file))
    assert "wgmma 128 rows x 64 tokens" in str(choose(GemmShape(64, 4096, 4096, 4), here))
    document = json.loads(file.read_text())
    file.write_text(json.dumps(document | {"lowbit": "0.0.1"}))
    keep(file, [second], H200)  # drops the first, which is of another version
    (left,) = json.loads(file.read_text())["products"]["GemmShape 4096 4096 4"]
    assert left["m"] == 128


def test_two_that_write_at_once_lose_nothing(cache, monkeypatch):
    """The second writer starts when the first has read the file but not written it yet. Both results are kept."""
    file, write, threads, said = tuned_file("H200"), tune.write_json, [], []
    rows = [Tuned("w4a16_g128", 4096, 4096, TunedRow(m, "wgmma 64 2 8 2 2", 9.0, 10.0, "2026-11-23")) for m in (64, 128)]

    def first_comes_the_other(path, document):
        if not threads:
            threads.append(threading.Thread(target=keep, args=(file, rows[1:], H200, said.append)))
            threads[0].start()
            threads[0].join(0.5)
        write(path, document)

    monkeypatch.setattr(tune, "write_json", first_comes_the_other)
    keep(file, rows[:1], H200)
    threads[0].join()
    assert [row["m"] for row in json.loads(file.read_text())["products"]["GemmShape 4096 4096 4"]] == [64, 128]
    assert len(said) == 1 and f"process {os.getpid()} on host" in said[0] and "waiting until it ends" in said[0]


@pytest.mark.parametrize("text", ['{"result": "lowbit tune", "schema": 1, "lowbit": "VERSION", "products": {"a": [{}]}}'])
def test_a_damaged_file_is_written_anew(text, cache):
    file = tuned_file("H200")
    file.parent.mkdir(parents=True)
    file.write_text(text.replace("VERSION", __version__))
    keep(file, [Tuned("w8a16", 64, 128, TunedRow(1, "ring 8 1 1 1 8 1", 1.0, 2.0, "2026-11-23"))], H200)
    assert list(json.loads(file.read_text())["products"]) == ["GemmShape 64 128 8"]


def test_schemes_without_a_choice_are_named():
    said = []
    assert with_a_choice(["w4a16_g40", "w8a8", "w4a16_g128"], H200, said.append) == ["w8a8", "w4a16_g128"]
    assert len(said) == 1 and said[0].startswith("w4a16_g40: nothing to tune, ")
    said.clear()
    assert with_a_choice(["w4a16_g128", "w4a16_pc", "fp8_block"], H200, said.append) == ["w4a16_g128"]
    assert said == [
        "w4a16_pc: nothing to tune, it shares the tiles of w4a16_g128, which has as many bits",
        "fp8_block: nothing to tune, tiles for block scales are not tuned",
    ]
    said.clear()
    assert with_a_choice(["w8a8", "w4a16_g128"], typical_machine(80), said.append) == ["w4a16_g128"]
    assert said == ["w8a8: nothing to tune, the kernel for 8-bit activations has one tile on A100-SXM4-80GB"]
    with pytest.raises(ValueError, match="w4a16_g40: nothing to tune"):
        with_a_choice(["w4a16_g40"], H200, said.append)


def test_the_command_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    source = save_tiny(tmp_path / "tiny")
    result = CliRunner().invoke(app, ["tune", str(source), "--scheme", "w8a16"], env={"COLUMNS": "200"})
    assert result.exit_code == 1 and "lowbit tune needs an NVIDIA GPU" in result.output
    result = CliRunner().invoke(app, ["tune", str(source)], env={"COLUMNS": "200"})
    assert result.exit_code == 1 and "--scheme" in result.output


@pytest.mark.gpu
def test_what_is_measured_is_launched(cache, monkeypatch):
    """The tuned tile is launched by the next process; here the machine's cache is cleared instead."""
    from lowbit.hardware.machine import _machine_of

    said = []
    monkeypatch.setattr(tune, "MARGIN", -1.0)  # keeps the fastest tile, even without a gain
    rows = tune.run({"w4a16_g128": [(1024, 2048)], "w8a8": [(1024, 2048)]}, (1, 64), 120.0, said.append, lambda *_: None)
    assert [(row.scheme, row.kept.m) for row in rows] == [(s, m) for s in ("w4a16_g128", "w8a8") for m in (1, 64)]
    _machine_of.cache_clear()
    try:
        here = machine_of("cuda")
        assert here.tuned == str(tuned_file(here.product)) and any(here.tuned in line for line in said)
        tile = choose(GemmShape(64, 1024, 2048, 4), here)
        assert tuned.written(tile, KINDS) == rows[1].kept.tile
    finally:
        _machine_of.cache_clear()
