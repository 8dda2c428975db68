"""The benchmark of vLLM's engine: its arguments and, if vLLM is installed, a whole run with a tiny model on a CPU."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from benchmarks import vllm_report
from benchmarks.vllm import OWN, RIVALS, VllmConfig, cache_bytes, main, run, stated, write_model
from benchmarks.vllm_weights import random_weights
from lowbit.picture import LIGHT
from tests.vllm.folders import SETTINGS, plain

KEPT = Path(__file__).parents[2] / "benchmarks/results/h200/2026-11-23-vllm.json"
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (make test-vllm)")


def test_what_config_json_states():
    assert stated("lowbit:wf6af16") == {"quant_method": "lowbit", "scheme": "w6e3m2a16"}
    assert stated("vllm:bf16") is None and stated("vllm:int4")["bits"] == 4
    assert all(stated(impl) for impl in OWN) and set(RIVALS) == {"vllm:bf16", "vllm:int4", "vllm:fp8"}
    for impl in ("vllm:int3", "lowbit", "lowbit:w9"):
        with pytest.raises(ValueError, match="implementations are lowbit:SCHEME|unknown scheme"):
            stated(impl)


def test_a_model_is_its_shape(tmp_path):
    write_model(tmp_path, VllmConfig("Llama-3-8B", (1,), 512, 128, layers=2), "lowbit:w4a16_g128")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["num_hidden_layers"] == 2
    assert (config["hidden_size"], config["intermediate_size"], config["vocab_size"]) == (4096, 14336, 128256)
    assert config["quantization_config"] == {"quant_method": "lowbit", "scheme": "w4a16_g128"}


@pytest.mark.parametrize(("model", "kind"), [("OPT-30B", "OPTForCausalLM"), ("Qwen3-30B-A3B", "Qwen3MoeForCausalLM")])
def test_a_model_has_its_class(tmp_path, model, kind):
    write_model(tmp_path, VllmConfig(model, (1,), 8, 4), "vllm:bf16")
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [kind]


def test_memory_for_keys_and_values(tmp_path):
    request = VllmConfig("Llama-3-8B", (1, 16), 100, 28, gpus=2)
    write_model(tmp_path, request, "vllm:bf16")
    config = json.loads((tmp_path / "config.json").read_text())
    assert cache_bytes(config, request) == (16 * 128 + 128) * 32 * 2 * 4 * 128 * 2


def test_random_weights_are_no_zeros():
    """Random weights are not zero. vLLM's own dummy weights are zeros for codes and fp8."""
    module = torch.nn.Module()
    kinds = {"weight": torch.bfloat16, "packed": torch.float8_e4m3fn, "weight_scale": torch.bfloat16}
    for name, dtype in kinds.items():
        module.register_buffer(name, torch.zeros(64, 64, dtype=dtype))
    module.register_buffer("_k_scale", torch.ones(()))
    module.register_buffer("norm", torch.zeros(64))
    random_weights(module)
    for name in kinds:
        values = getattr(module, name).double()
        assert len(values.unique()) > 32 and values.isfinite().all()
    assert (module.weight_scale > 0).all() and (module.norm == 1).all() and module._k_scale == 1


def test_int4_of_vllm_are_weights_as_ours():
    """vLLM's int4 weights have normally distributed codes, as ours do. Uniform codes need less power: Machete took 4.66 ms
    instead of 5.54 for a layer (H200).
    """
    module = torch.nn.Sequential(torch.nn.Module())
    k, n = 512, 64
    for name, shape, dtype in (("qweight", (k // 8, n), torch.int32), ("qzeros", (k // 128, n // 8), torch.int32)):
        module[0].register_buffer(name, torch.zeros(shape, dtype=dtype))
    module[0].register_buffer("scales", torch.zeros(k // 128, n, dtype=torch.bfloat16))
    random_weights(module[0])
    shifts = 4 * torch.arange(8, dtype=torch.int32)
    codes = ((module[0].qweight[:, None] >> shifts[:, None]) & 15).reshape(k, n) - 8
    weight = codes * module[0].scales.double().repeat_interleave(128, 0)
    assert abs(weight.mean()) < 1e-3 and 0.95 < weight.std() * k**0.5 < 1.05
    assert torch.histc(codes.double(), 16, -8, 7).argmax() == 8


def test_wrong_requests_are_refused_before_anything_runs(tmp_path, capsys):
    for arguments, said in (
        (["--impls", "vllm:int4"], "--out names"),
        (["--impls", "x:y", "--out", str(tmp_path / "a")], "'x:y'"),
        (["--out", str(tmp_path / "a"), "--plot", str(tmp_path / "a.gif")], "a plot must be a .png, .svg or .pdf file"),
        (["--report", str(tmp_path / "a")], "no such file"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_an_implementation_that_fails_is_a_row(tmp_path):
    document = run(tmp_path / "out.json", ["vllm:bf16"], VllmConfig("Llama-3-8B", (1,), 8, 4))
    (row,) = document["rows"]
    assert "No module named 'vllm'" in row["error"] and json.loads((tmp_path / "out.json").read_text())["complete"]
    with pytest.raises(ValueError, match="no measured row"):
        vllm_report.plot(vllm_report.load(tmp_path / "out.json"), tmp_path / "none.png")


def test_kept_results_are_printed_and_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the extra lowbit[plot]")
    main(["--report", str(KEPT), "--plot", str(tmp_path / "vllm.png")])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 28 and lines[8].startswith("lowbit:w4a16_g128 batch 1: 388 tokens/s, 2.34 ms a step")
    assert all((tmp_path / f"vllm{theme}.png").stat().st_size > 10_000 for theme in ("", "-dark"))


def test_bars_stand_by_bits_with_their_values():
    """A figure may be missing because an engine failed, or because no step generated a token for all sequences. Then there is
    no bar."""
    pytest.importorskip("matplotlib", reason="the extra lowbit[plot]")
    document = vllm_report.load(KEPT)
    rows = [row | {"step_ms": None} if row["scheme"] == "fp8" else row for row in document["rows"]]
    figure = vllm_report._draw(document, [row for row in rows if (row["scheme"], row["batch"]) != ("bf16", 16)], LIGHT)
    first, second, *_, last = figure.axes
    names = "w4a16_g128", "vLLM's int4", "w6e3m2a16", "fp8_dynamic", "w8a8", "vLLM's fp8", "vLLM's bf16"
    assert tuple(label.get_text() for label in first.get_yticklabels()) == names
    assert [text.get_text() for text in first.texts] == ["388", "264", "313", "285", "269", "288", "207"]
    assert [text.get_text() for text in second.texts] == ["3,492", "3,030", "3,196", "3,495", "3,570", "3,515"]
    assert [text.get_text() for text in last.texts] == ["72", "76", "73", "89", "93", "73"]
    assert [round(bar.get_width()) for bar in last.patches] == [72, 76, 73, 89, 93, 73]
    assert [text.get_color() == LIGHT.own for text in first.texts] == [True, False, True, True, True, False, False]


ENGINES = """#!/bin/sh
# -m benchmarks.vllm --one IMPLEMENTATION REQUEST
case $4 in
vllm:fp8) echo $$ > "$0.silent"; exec sleep 60;;
vllm:bf16) echo '{"started": true}'; exec 0<&-; touch "$0.gone";;
*) echo '{"started": true}'; read line
   while [ ! -e "$0.gone" ]; do sleep 0.1; done
   kill -0 "$(cat "$0.silent")" 2> "$0.error" && alone=false || alone=true
   row='"impl": "vllm", "scheme": "int4", "gpus": 1, "tokens_s": 1, "first_s": 1, "step_ms": null, "kernels": [], "error": null'
   echo "{$row, \\"batch\\": 1, \\"alone\\": $alone}"; echo "{$row, \\"batch\\": 3}"; exit 3;;
esac
"""


def test_engines_that_fall_silent_or_end_leave_the_others_alone(tmp_path, monkeypatch):
    """A silent engine is ended before the next one is measured. An engine that ends after its start becomes a row with an
    error. What an engine does after its last row is ignored.
    """
    engines = tmp_path / "engines"
    engines.write_text(ENGINES)
    engines.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(engines))
    request = VllmConfig("Llama-3-8B", (1, 3), 8, 4)
    document = run(tmp_path / "out.json", ["vllm:int4", "vllm:fp8", "vllm:bf16"], request, together=3, limit_s=3)
    assert "gpu" in document["machine"]
    first, second, silent, ended = document["rows"]
    assert first["alone"] and (first["batch"], second["batch"], second["error"]) == (1, 3, None)
    assert (silent["scheme"], silent["error"]) == ("fp8", "nothing for 3 s")
    assert (ended["scheme"], ended["error"]) == ("bf16", "the process ended with 0") and document["complete"]


@needs_vllm
@pytest.mark.parametrize(("gpus", "impls"), [(1, ["lowbit:w4a16_g32", "vllm:bf16"]), (2, ["lowbit:w4a16_g32"])])
def test_a_whole_run(tmp_path, monkeypatch, gpus, impls):
    """With two ranks, the engine has two more processes."""
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    request = VllmConfig(str(plain(tmp_path / "model")), (1, 3), 16, 8, eager=True, gpus=gpus)
    document = run(tmp_path / "out.json", impls, request, together=2)
    assert [(f"{row['impl']}:{row['scheme']}", row["batch"]) for row in document["rows"]] == [
        (impl, batch) for impl in impls for batch in (1, 3)
    ]
    for row in document["rows"]:
        assert row["error"] is None and row["tokens_s"] > 0 and (row["prompt"], row["output"], row["gpus"]) == (16, 8, gpus)
        assert row["step_ms"] > 0 and 0 < row["first_s"] < max(row["runs_s"])
        assert any("Lowbit" in kernel for kernel in row["kernels"]) == (row["impl"] == "lowbit")
        assert ("for each of 2 GPUs" in vllm_report.line(row)) == (gpus == 2)
