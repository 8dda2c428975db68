"""`python -m benchmarks e2e`: models of known shapes, classes of a step's kernels, tables, and one short run on a GPU."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import e2e, language_model
from benchmarks.cli import app
from benchmarks.e2e import by_name, one_layer, timeline
from benchmarks.e2e_report import E2E, SCHEMA, failed, load, plot, shares, tables
from benchmarks.language_model import random_model, weight_bytes
from lowbit.engine import Engine, Request
from lowbit.engine import chain as chain_of
from lowbit.eval.results import write_json
from lowbit.nn import PackedWeight
from lowbit.nn.convert import swap

RESULTS = Path(__file__).parents[2] / "benchmarks/results/h200"

SMALL = dict(hidden=64, intermediate=192, layers=3, heads=4, kv_heads=2, vocab=320, theta=1e4)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(language_model.SHAPES, "small", lambda: language_model._llama(**SMALL))
    return "small"


def test_a_random_model_computes_and_counts_its_bytes(small):
    model = random_model(small, "w4a16_g32", "w8a16", torch.bfloat16, torch.device("cpu"), layers=2)
    assert len(model.model.layers) == 2 and model.dtype == torch.bfloat16
    for module in model.modules():
        if isinstance(module, PackedWeight):
            module.restore()  # the CPU's packed form may be larger
    weights = 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 192 * 64)
    of_layers = weights // 2 + weights // 32 * 2  # codes of 4 bits, fp16 scales of groups of 32
    norms = 5 * 64 * 2
    head = 320 * 64 + 320 * 4  # single rows of the embedding are read; they do not count
    assert weight_bytes(model) == of_layers + norms + head
    plain = random_model(small, None, None, torch.float16, torch.device("cpu"))
    assert not any(isinstance(module, PackedWeight) for module in plain.modules())
    (request,) = Engine(plain.float(), max_concurrent=1, max_length=128).generate([Request([1, 2, 3], 8)])
    assert len(request.sampled) == 8


def test_unknown_models_are_refused():
    with pytest.raises(ValueError, match="models are Llama-3-8B, Llama-2-13B, Llama-2-70B, OPT-30B, got 'GPT-5'"):
        random_model("GPT-5", None, None, torch.float16, torch.device("cpu"))


def row(**more):
    return {
        "model": "small", "scheme": "w4a16_g128", "impl": "lowbit", "batch": 1, "context": 256, "ms_per_token": 0.5,
        "limit_ms": 0.25, "bf16_ms_per_token": 1.0, "tokens_per_gpu_s": 2000.0, "kernels_per_layer": 5.1, "prefill_tok_s": 3e4,
        "step_wall_ms": 0.6, "error": None,
        "kernels": {"ring_gemm": [4, 900.0, 300.0], "decode_attention": [1, 95.0, 90.0], "x": [1, 10.0, 10.0]},
    } | more  # fmt: skip


def document(*rows):
    return {
        "result": E2E, "schema": SCHEMA, "date": "2026-11-22", "complete": True, "machine": {"gpu": "a GPU"}, "rows": [*rows],
    }  # fmt: skip


def test_tables_say_shares_ratios_and_errors(tmp_path):
    write_json(tmp_path / "e2e.json", document(row(), row(batch=4, ms_per_token=None, error="OutOfMemoryError: too much")))
    terminal = Console(width=80, record=True, quiet=False)
    results = load(tmp_path / "e2e.json")
    terminal.print(*tables(results))
    text = terminal.export_text()
    for said in ("small, context 256", "50 %", "2.00", "2,000", "5.1", "0.600", "30,000"):
        assert said in text
    assert failed(results) == ["small, w4a16_g128, batch 4, context 256: OutOfMemoryError: too much"]


def test_kept_results_fit_a_terminal():
    """No figure is truncated."""
    terminal = Console(width=80, record=True, quiet=False)
    for file in RESULTS.glob("*-e2e*.json"):
        terminal.print(*tables(load(file)))
    text = terminal.export_text()
    assert "Llama-3-8B, context 8,192" in text and "16 bits, cuBLAS" in text and "…" not in text


def test_shares_of_kinds_of_kernels():
    assert shares(row()) == {"products": 300.0, "attention": 90.0, "norms and gates": 0.0, "drawing": 0.0, "other": 10.0}


def test_sums_of_split_k_are_products():
    """cuBLAS's split-K reduction kernels, by their names on an H200, count as products."""
    name = "void cublasLt::splitKreduce_kernel<32, 16, int, float, __half>(cublasLt::cublasSplitKParams<float>)"
    assert any(part in name for part in e2e.PRODUCTS)
    assert shares(row(kernels={name: [1, 2.0, 2.0], "collect": [1, 1.0, 1.0]})) == {
        "products": 2.0, "attention": 0.0, "norms and gates": 0.0, "drawing": 1.0, "other": 0.0,
    }  # fmt: skip


def test_pictures_need_a_measured_row(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra lowbit[plot]")
    plot(document(row(), row(batch=4), row(scheme=None), row(impl="transformers eager", kernels=None)), tmp_path / "e2e.svg")
    assert {path.name for path in tmp_path.iterdir()} == {"e2e.svg", "e2e-dark.svg"}
    with pytest.raises(ValueError, match="hold no measured row"):
        plot(document(row(ms_per_token=None)), tmp_path / "none.svg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "GPT-5"], "--models are Llama-3-8B, Llama-2-13B, Llama-2-70B, OPT-30B, got 'GPT-5'"),
        (["--rivals", "vllm"], "--rivals are eager, static, got 'vllm'"),
        (["--dtype", "float32"], "--dtype is float16 or bfloat16, got 'float32'"),
        (["--schemes", "int4"], "int4"),
    ],
)
def test_what_is_asked_wrongly_is_refused(arguments, message):
    result = CliRunner().invoke(app, ["e2e", *arguments])
    assert result.exit_code == 1 and message in " ".join(result.stderr.split())


def test_a_model_with_an_embedding_of_positions(monkeypatch):
    """OPT's shape: one row of the position embedding is read, and the tied weight counts once, as the LM head."""
    config = language_model.SHAPES["OPT-30B"]()
    assert (config.hidden_size, config.ffn_dim, config.num_hidden_layers, config.num_attention_heads) == (7168, 28672, 48, 56)
    monkeypatch.setitem(language_model.SHAPES, "small", lambda: language_model._opt(64, 256, 3, 4))
    model = random_model("small", None, None, torch.float32, torch.device("cpu"), layers=2)
    of_layer = 4 * 64 * 64 + 4 * 64 + 2 * 64 * 256 + 64 + 256 + 2 * 2 * 64
    assert weight_bytes(model) == 4 * (2 * of_layer + 2 * 64 + 50272 * 64)
    engine = Engine(model, max_concurrent=1, max_length=128)
    assert engine.difference < 1e-5 and not engine.program.reasons
    packed = random_model("small", "w4a16_g32", "w8a16", torch.bfloat16, torch.device("cpu"))
    for module in packed.modules():
        if isinstance(module, PackedWeight):
            module.restore()  # the CPU's packed form may be larger
    assert packed.lm_head.weight_packed is packed.model.decoder.embed_tokens.weight_packed
    of_layer = (4 * 64 * 64 + 2 * 64 * 256) * 9 // 16 + 2 * (4 * 64 + 64 + 256 + 4 * 64)
    assert weight_bytes(packed) == 3 * of_layer + 2 * 2 * 64 + 50272 * (64 + 4)


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["Llama-3-8B", "OPT-30B"])
def test_a_short_run(tmp_path, model):
    """Two layers of a model's shape: the result file has all its columns, and no step is faster than its bytes allow."""
    out = tmp_path / "e2e.json"
    arguments = ["--models", model, "--layers", "2", "--schemes", "w4a16_g128", "--batches", "1,16", "--contexts", "256"]
    arguments += ["--out", str(out)]
    result = CliRunner().invoke(app, ["e2e", *arguments])
    assert result.exit_code == 0, result.stderr
    found = json.loads(out.read_text())
    assert found["complete"] and len(found["rows"]) == 4
    for line in found["rows"]:
        assert line["error"] is None and line["ms_per_token"] > line["limit_ms"] > 0
        both = line["scheme"] is None and model != "OPT-30B"
        assert (line["products"] is not None) == (line["scheme"] is None)
        assert (line["other_ms_per_token"] is not None) == both and (
            not both or line["other_ms_per_token"] >= line["ms_per_token"]
        )
        promised = ("model scheme gpus batch context kv_dtype head prompt output ms_per_token limit_ms bf16_ms_per_token "
                    "prefill_tok_s tokens_per_gpu_s kernels_per_layer weight_bytes peak_bytes impl")  # fmt: skip
        assert set(promised.split()) <= set(line)


def test_16_bits_are_the_better_of_two(small, monkeypatch):
    """The 16-bit row is the faster of the small-M chain, for as many rows as that supports, and cuBLAS. The program is restored
    afterwards.
    """
    monkeypatch.setattr(chain_of, "_refusals", lambda product, m, dtype: ())
    model = random_model(small, None, None, torch.float16, torch.device("cpu"))
    engine = Engine(model, max_concurrent=1, max_length=128)
    assert isinstance(engine.program.chain, chain_of.Chain) and engine.program.chain.most == 8
    times = {"ring": 2.0, "cuBLAS": 3.0}

    def decode(engine, batch, *more):
        name = "ring" if isinstance(engine.program.chain, chain_of.Chain) else "cuBLAS"
        assert (name == "cuBLAS") == (len(more) == 4), "steps of its own: graphs of the others are of the chain"
        return {"ms_per_token": times[name], "kernels": name}

    monkeypatch.setattr(e2e, "_decode", decode)
    monkeypatch.setattr(e2e, "Graphs", lambda device: None)
    assert e2e._better(engine, 1, 64, 1, 1.0) == {
        "ms_per_token": 2.0, "kernels": "ring", "products": "ring", "other_ms_per_token": 3.0,
    }  # fmt: skip
    times["ring"] = 4.0
    assert e2e._better(engine, 8, 64, 1, 1.0)["products"] == "cuBLAS"
    found = e2e._better(engine, 9, 64, 1, 1.0)
    assert found["products"] == "cuBLAS" and found["other_ms_per_token"] is None
    assert isinstance(engine.program.chain, chain_of.Chain)
    terminal = Console(width=80, record=True, quiet=False)
    terminal.print(*tables(document(row(scheme=None, products="ring"))))
    assert "16 bits, ring" in terminal.export_text()


def test_kernels_count_from_the_end_of_the_one_before(monkeypatch):
    """A kernel's time counts from the end of the previous one. With programmatic launch the second starts during the first; the
    third starts after a gap.
    """
    times = [("qkv", 0, 10), ("attention", 4, 15), ("o", 18, 20)]

    class Profile:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def events(self):
            device, span = SimpleNamespace(name="CUDA"), lambda *at: SimpleNamespace(start=at[0], end=at[1])
            return [SimpleNamespace(name=n, device_type=device, time_range=span(a, b)) for n, a, b in reversed(times)]

    monkeypatch.setattr(e2e.torch.profiler, "profile", lambda **options: Profile())
    monkeypatch.setattr(e2e.torch.cuda, "synchronize", lambda: None)
    found = timeline(lambda: None)
    assert found == [("qkv", 10, 10), ("attention", 11, 5), ("o", 2, 2)]
    step = [("embed", 1.0, 1.0), *(3 * found), ("head", 5.0, 5.0)]
    assert one_layer(step) == [("qkv", 10), ("attention", 5), ("o", 2)] and one_layer(found) == []
    assert by_name(step)["attention"] == (3, 33, 15)


def test_one_layer_of_a_random_model_is_in_16_bits_at_a_time(small, monkeypatch):
    """Building a random model keeps one layer in 16 bits at a time, so that a 70B model fits memory."""
    made, alive = [], []

    def swap_and_count(model, name, q):
        alive.append(sum(layer() is not None for layer in made))
        made.append(weakref.ref(model.get_submodule(name)))
        return swap(model, name, q)

    monkeypatch.setattr(language_model, "swap", swap_and_count)
    random_model(small, "w4a16_g32", None, torch.float16, torch.device("cpu"))
    assert len(alive) == 21 and set(alive) == {0}
