"""The convolution benchmark without a GPU: the network's work, its time limits, its tables."""

from __future__ import annotations

import collections
import functools
import io
import json
import math

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import conv, conv_lite, conv_network
from benchmarks.cli import app
from benchmarks.conv_network import ALL_FUSIONS, FUSIONS, LaunchedNetwork, Reference, checked_indices, labels, up_to, work_of
from benchmarks.conv_report import layer_table, load, network_table, plot
from benchmarks.resnet50 import STEM, ResNet50, blocks
from lowbit.hardware.machine import typical_machine
from lowbit.vision.bits import assign_bits, calibrate
from lowbit.vision.fusion import KERNEL_FUSIONS, UNMEASURED_FUSIONS, fused, with_pooled_stems
from lowbit.vision.graph import Conv
from lowbit.vision.lower import lower
from lowbit.vision.observe import observe
from lowbit.vision.program import Compute
from lowbit.vision.trace import FUSIONS as trace_fusions
from lowbit.vision.trace import fuse, trace, unfused
from tests.vision.nets import resnet


@functools.cache
def unfused_resnet50():
    return unfused(ResNet50(), torch.zeros(1, 3, 224, 224))


def test_the_network_is_resnet50():
    """3.86 + 0.24 (v1.5) billion multiply-adds and 25.5 million weights: He et al., table 1."""
    graph = unfused_resnet50()
    convs = {name: node for name, node in graph.nodes.items() if isinstance(node, Conv)}
    assert len(convs) == 54 and sum(node.weight.numel() for node in convs.values()) == 25_502_912
    products = sum(node.weight.numel() * math.prod(graph.shapes[name][1:]) for name, node in convs.items())
    assert products == pytest.approx(4.089e9, rel=1e-3)
    assert [b.third.output_size for b in blocks()] == [56] * 3 + [28] * 4 + [14] * 6 + [7] * 3
    listed = [layer for b in blocks() for layer in (b.first, b.second, b.third, b.shortcut) if layer is not None]
    for layer in (STEM, *listed):
        node = convs[layer.name]
        assert tuple(node.weight.shape) == (layer.outputs, layer.channels, layer.kernel, layer.kernel)
        assert node.stride == (layer.stride, layer.stride) and graph.shapes[layer.name][1] == layer.output_size
    assert sum(b.shortcut is not None for b in blocks()) == 4


@pytest.mark.parametrize(
    ("fusion", "convs", "sums"),
    [("none", 54, 49 + 16), ("relu", 54, 16), ("add", 54, 0), ("shortcut", 50, 0), ("blocks", 50, 0)],
)
def test_what_each_fusion_saves(fusion, convs, sums):
    chosen = FUSIONS[1 : FUSIONS.index(fusion) + 1]
    graph = fuse(unfused_resnet50(), [name for name in chosen if name in trace_fusions])
    kinds = collections.Counter(type(node).__name__ for node in graph.nodes.values())
    assert kinds == collections.Counter({"Input": 1, "Conv": convs, "Sum": sums, "MaxPool": 1, "AveragePool": 1})


@functools.cache
def program(*fusions):
    model, images = resnet("bottleneck", sizes=(128, 256), depths=(2, 1), embedding=64), torch.randn(2, 3, 64, 32)
    graph = fuse(unfused(model, images), fusions)
    return lower(graph, calibrate(graph, observe(graph, [images]), assign_bits(graph, "w8a4")))


def works(program, batch):
    names = labels(program)
    return {names[op.y]: work_of(op, program, batch) for op in program.operations}


def test_work_by_hand():
    found = works(program("relu", "add"), 2)
    stem, block = "resnet.embedder.embedder.convolution", "resnet.encoder.stages.1.layers.0"
    pixels = 2 * 32 * 16
    assert found[stem] == (2 * 32 * (16 + 3) * 16 + 64 * 3 * 49 + pixels * 64 / 2, 2 * pixels * 64 * 3 * 49)
    # With stride 2, a 1 x 1 window reads a quarter of the 16 x 8 pixels. The output has 8 bits, as no ReLU follows.
    assert found[f"{block}.shortcut.convolution"] == (2 * 8 * 4 * (128 / 2 + 256) + 128 * 256, 2 * 2 * 8 * 4 * 128 * 256)
    last = f"{block}.layer.2.convolution"
    assert found[last] == (2 * 8 * 4 * (64 / 2 + 256 + 256 / 2) + 64 * 256, 2 * 2 * 8 * 4 * 64 * 256)
    assert found["max-pool"] == (pixels * 64 / 2 * 1.25, 0.0)
    folded = works(program("relu", "add", "shortcut"), 2)[last]
    assert folded == (2 * 8 * 4 * (64 / 2 + 128 / 2 + 256 / 2) + (64 + 128) * 256, 2 * 2 * 8 * 4 * (64 + 128) * 256)
    pooled = with_pooled_stems(program("relu", "add"), None)
    moved, work = works(pooled, 2)[f"{stem} and max-pool"]
    assert moved == found[stem][0] - pixels * 64 / 2 * 0.75 and work == found[stem][1]


def test_work_of_blocks_by_hand():
    model, images = resnet("bottleneck", sizes=(256, 512), depths=(1, 1), embedding=64), torch.randn(2, 3, 32, 48)
    graph = trace(model, images)
    whole = fused(lower(graph, calibrate(graph, observe(graph, [images]), assign_bits(graph, "w8a4"))), 2, None)
    (name,) = [name for name in works(whole, 2) if " to " in name]
    pixels, weights = 2 * 8 * 12, 64 * 64 * 9 + (64 + 64) * 256 + 256 * 128
    assert name.endswith("stages.1.layers.0.layer.0.convolution")
    # x, the shortcut's input, y and z are moved; the second convolution's output stays on the SM.
    assert works(whole, 2)[name] == (pixels * (64 + 64 + 256 + 128) / 2 + weights, 2 * pixels * weights)


def test_passes_on_codes_are_called_after_what_they_read():
    found = works(program(), 1)
    last = "resnet.encoder.stages.0.layers.1.layer.2.convolution"
    size = 16 * 8 * 128
    assert found[f"{last} sum"] == (size + size / 2 + size, 0.0)  # 8 bits before a ReLU
    assert found[f"{last} sum ReLU"] == (size + size / 2, 0.0)


def document():
    row = {"impl": "lowbit", "model": "resnet50", "storage": "u4", "fusion": "add", "batch": 128, "error": None}
    failed = row | {"ms": None, "images_s": None, "limit_ms": None, "error": "why"}
    layer = {"storage": "u4", "fusion": "add", "batch": 128, "layer": "layer1.0.conv1", "us": 10.0, "limit_us": 5.0}
    layer |= {"bound": "memory", "operations": 3.3e9, "bytes": 2.6e7}
    return {
        "result": "lowbit bench conv", "schema": 1, "date": "2026-11-21", "machine": {"gpu": "NVIDIA H200", "sm": 90},
        "rows": [row | {"ms": 1.0, "images_s": 128000.0, "limit_ms": 0.5}, failed],
        "layers": [layer, layer | {"layer": "average pool", "us": 6.0, "operations": 0.0}],
    }  # fmt: skip


def printed(table):
    with io.StringIO() as text:
        Console(width=220, file=text).print(table)
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
    path.write_text(json.dumps({"result": "lowbit bench gemm"}))
    with pytest.raises(ValueError, match="not a result file of `python -m benchmarks conv`"):
        load(path)
    path.write_text(json.dumps({"result": "lowbit bench conv", "schema": 1}))
    with pytest.raises(ValueError, match="holds no 'machine'"):
        load(path)


def test_unknown_storages_are_refused():
    refused = CliRunner().invoke(app, ["conv", "--storages", "int4,fp4"])
    assert refused.exit_code == 1 and "int4 and int8, got fp4" in refused.stderr


def test_where_the_time_goes(tmp_path):
    pytest.importorskip("matplotlib")
    plot(document(), tmp_path / "layers.svg")
    for name in ("layers.svg", "layers-dark.svg"):
        assert (tmp_path / name).stat().st_size > 1000


def test_lite0_is_whole():
    """The network of the rows of EfficientNet-lite0 has no operation in floating point, and its work is counted."""
    model, weights = conv_lite.lite0()
    assert weights in ("trained", "random") and not model.training
    found = conv_lite.programs(model, ("w8a4",))["w8a4"]
    assert not any(isinstance(op, Compute) and op.node.reason for op in found.operations)
    moved = works(fused(found, conv_lite.BATCH, typical_machine(90)), conv_lite.BATCH)
    assert len(moved) > 50 and all(size > 0 for size, _ in moved.values())
    assert sum(work for _, work in moved.values()) == pytest.approx(2 * conv_lite.BATCH * 0.39e9, rel=0.15)


def test_unknown_models_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    refused = CliRunner().invoke(app, ["conv", "--models", "resnet18"])
    assert refused.exit_code == 1 and "--models are resnet50, efficientnet-lite0, got 'resnet18'" in refused.stderr


def test_fusions_are_selected_by_name(monkeypatch):
    """A name selects all before it."""
    assert not set(UNMEASURED_FUSIONS) & set(FUSIONS)
    assert up_to("whole") == ALL_FUSIONS[1:] and up_to("blocks")[-1] == "blocks" and up_to("none") == ()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    refused = CliRunner().invoke(app, ["conv", "--fusions", "blocks,halves"])
    assert refused.exit_code == 1 and "got 'halves'" in refused.stderr
    asked = []
    monkeypatch.setattr(conv, "run", lambda request, *rest: asked.append(request) or (None, document()))
    options = ["--fusions", "whole,blocks", "--batches", "128", "--schemes", "w8a8", "--peers", "cudnn,reduce-overhead"]
    assert CliRunner().invoke(app, ["conv", *options]).exit_code == 0
    assert asked[0].fusions == ["blocks", "whole"] and asked[0].schemes == ("w8a8",)
    assert asked[0].rivals == ("cudnn", "reduce-overhead")


def test_compared_images_are_spread():
    assert checked_indices(128) == [0, 42, 85, 127] and checked_indices(5) == [0, 1, 3, 4] and checked_indices(3) == [0, 1, 2]


def test_wrong_codes_are_counted(monkeypatch):
    """Codes that the reference has otherwise are counted: of every compared image, and logits too."""
    monkeypatch.setattr(conv_network, "IMAGE", 32)
    torch.manual_seed(0)
    graph = trace(resnet("bottleneck", sizes=(128,), depths=(1,), embedding=64), images := torch.randn(2, 3, 32, 32))
    program = lower(graph, calibrate(graph, observe(graph, [images]), assign_bits(graph, "w8a4")))
    reference = Reference(program, "cpu")
    network = LaunchedNetwork(reference, 5, KERNEL_FUSIONS, "cpu")
    assert network.checked == [0, 1, 3, 4] and network.wrong_values() == 0
    codes, logits = reference.outcome
    name = network.launched.steps[0][0]
    codes[name][3, 0, 0, :2] += 1
    logits[0, 0] += 1.0
    assert network.wrong_values() == 3


class FakeNetwork:
    """A network without a GPU: of "whole", 7 codes are wrong, and "pairs" cannot be built."""

    def __init__(self, storage, batch, fusion):
        if fusion == "pairs":
            raise RuntimeError("no memory")
        self.steps, self.checked, self.launched, self.fusion = [], [0, 1], self, fusion
        self.replay = fusion

    def wrong_values(self):
        return 7 * (self.fusion == "whole")


def test_wrong_networks_are_not_timed(monkeypatch):
    times = iter([3.0, 1.0, 2.0])
    monkeypatch.setattr(conv, "Network", FakeNetwork)
    monkeypatch.setattr(conv, "replay_ms", lambda replay, replays: next(times))
    blocks, pairs, whole = conv.network_rows("s8", 128, ("blocks", "pairs", "whole"), lambda line: None)
    assert (blocks["ms"], blocks["wrong_codes"], blocks["checked_images"], blocks["error"]) == (2.0, 0, 2, None)
    assert pairs["ms"] is None and pairs["error"] == "RuntimeError: no memory"
    assert whole["ms"] is None and whole["wrong_codes"] == 7 and "7 codes" in whole["error"]
    text = printed(network_table({"rows": [blocks, pairs, whole]}))
    assert "wrong codes" in text and "not timed: 7 codes" in text and "no memory" in text


def test_rivals_report_their_end_in_a_row(monkeypatch):
    """A rival that does not end, or fails, has a row that says so; the one after it is measured."""

    def in_process(measure, arguments, seconds, name, say):
        if arguments == ("compile",):
            raise TimeoutError(f"{name} did not end within {seconds:.0f} s")
        return 5.0, 2.0

    monkeypatch.setattr(conv, "in_process", in_process)
    rows = list(conv.rival_rows({"model": conv_lite.MODEL}, ("reduce-overhead", "compile", "cudnn"), 9.0, lambda line: None))
    assert [(row["impl"], row["ms"]) for row in rows] == [("cudnn", 2.0), ("compile", None), ("reduce-overhead", 2.0)]
    assert rows[0]["setup_s"] == 5.0 and rows[1]["error"].endswith("did not end within 9 s")
