"""The convolution benchmark without a GPU: what the network must do, its limits, its tables."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from lowbit.bench.conv_report import bench_conv, layer_table, load, network_table, plot
from lowbit.bench.resnet50 import STEM, blocks


def layers():
    for block in blocks():
        yield from (block.first, block.second, block.third)
        if block.shortcut is not None:
            yield block.shortcut


def test_the_network_is_resnet50():
    """3.86 + 0.24 (v1.5) billion multiply-adds and 25.5 million weights, less the classifier's: He et al., table 1."""
    found = [STEM, *layers()]
    assert len(found) == 53
    assert sum(layer.operations(1) for layer in found) / 2 == pytest.approx(4.087e9, rel=1e-3)
    assert sum(layer.weights() for layer in found) == 23_454_912
    assert [b.third.output_size for b in blocks()] == [56] * 3 + [28] * 4 + [14] * 6 + [7] * 3
    assert sum(b.shortcut is not None for b in blocks()) == 4


def test_bytes_by_hand():
    block = blocks()[1]
    third = block.third  # 64 to 256 channels, 56 x 56, with a residual
    pixels = 2 * 56 * 56
    assert third.moved_bytes(2, 4) == pixels * (64 + 256 + 256) / 2 + 64 * 256
    assert third.moved_bytes(2, 8) == pixels * (64 + 256 + 256) + 64 * 256
    shortcut = blocks()[3].shortcut  # stride 2 reads a quarter of the pixels
    assert shortcut is not None and shortcut.moved_bytes(1, 8) == 28 * 28 * (256 + 512) + 256 * 512


def document():
    row = {"impl": "lowbit", "model": "resnet50", "storage": "u4", "fusion": "add", "batch": 128, "error": None}
    failed = row | {"ms": None, "images_s": None, "limit_ms": None, "error": "why"}
    layer = {"storage": "u4", "fusion": "add", "batch": 128, "layer": "layer1.0.conv1", "us": 10.0, "limit_us": 5.0}
    layer |= {"bound": "memory", "operations": 3.3e9, "bytes": 2.6e7}
    return {
        "benchmark": "conv", "date": "2026-11-21", "machine": {"gpu": "NVIDIA H200", "sm": 90},
        "rows": [row | {"ms": 1.0, "images_s": 128000.0, "limit_ms": 0.5}, failed],
        "layers": [layer],
    }  # fmt: skip


def printed(table):
    with io.StringIO() as text:
        Console(width=160, file=text).print(table)
        return text.getvalue()


def test_tables():
    text = printed(network_table(document()))
    assert "128,000" in text and "50 %" in text and "why" in text
    text = printed(layer_table(document(), "u4"))
    assert "layer1.0.conv1" in text and "50 %" in text and "330" in text and "memory" in text


def test_files_are_checked(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(document()))
    assert load(path) == document()
    path.write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        load(path)
    path.write_text(json.dumps({"benchmark": "gemm"}))
    with pytest.raises(ValueError, match="not a result file of `lowbit bench conv`"):
        load(path)
    path.write_text(json.dumps({"benchmark": "conv"}))
    with pytest.raises(ValueError, match="holds no 'machine'"):
        load(path)


def test_unknown_storages_are_refused():
    with pytest.raises(ValueError, match="int4 and int8, got fp4"):
        bench_conv(storages="int4,fp4", report_file=None)


def test_the_roofline(tmp_path):
    pytest.importorskip("matplotlib")
    plot(document(), tmp_path / "roof.svg")
    assert (tmp_path / "roof.svg").stat().st_size > 1000
