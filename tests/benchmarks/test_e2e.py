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
from benchmarks.e2e_report import E2E, SCHEMA, bar_name, failed, load, plot, shares, tables
from benchmarks.language_model import random_model, weight_bytes
from lowbit.engine import Engine, Request
from lowbit.engine import chain as chain_of
from lowbit.engine.prefill_runner import PrefillRunner
from lowbit.engine.program import DecodeProgram
from lowbit.eval.results import write_json
from lowbit.nn import PackedWeight, QuantExperts
from lowbit.nn.convert import swap
from lowbit.ops.route import RouterRule, route, route_tokens

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
            module.restore()  # restores the unpacked weights, since the CPU's packed form may be larger
    weights = 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 192 * 64)
    of_layers = weights // 2 + weights // 32 * 2  # 4-bit codes, and fp16 scales of groups of 32
    norms = 5 * 64 * 2
    head = 320 * 64 + 320 * 4  # the embedding does not count, since a step reads only single rows of it
    assert weight_bytes(model) == of_layers + norms + head
    plain = random_model(small, None, None, torch.float16, torch.device("cpu"))
    assert not any(isinstance(module, PackedWeight) for module in plain.modules())
    (request,) = Engine(plain.float(), max_concurrent=1, max_length=128).generate([Request([1, 2, 3], 8)])
    assert len(request.sampled) == 8


def test_unknown_models_are_refused():
    with pytest.raises(ValueError, match="models are Llama-3-8B, Llama-2-13B, .*, OLMoE-1B-7B, got 'GPT-5'"):
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
    assert shares(row()) == {"products": 300.0, "attention": 90.0, "norms, gates, routing": 0.0, "drawing": 0.0, "other": 10.0}


def test_sums_of_split_k_are_products():
    """cuBLAS's split-K reduction kernels, by their names on an H200, count as products."""
    name = "void cublasLt::splitKreduce_kernel<32, 16, int, float, __half>(cublasLt::cublasSplitKParams<float>)"
    assert any(part in name for part in e2e.PRODUCTS)
    assert shares(row(kernels={name: [1, 2.0, 2.0], "collect": [1, 1.0, 1.0]})) == {
        "products": 2.0, "attention": 0.0, "norms, gates, routing": 0.0, "drawing": 1.0, "other": 0.0,
    }  # fmt: skip


def test_bars_have_names_of_their_own():
    rows = (row(), row(impl="lowbit one launch"), row(scheme=None, kv_dtype="bfloat16"), row(kv_dtype="int4"))
    scheme = row()["scheme"]
    assert [bar_name(each) for each in rows] == [
        f"{scheme}, 1",
        f"{scheme}, one launch, 1",
        "16 bits, 1",
        f"{scheme}, KV int4, 1",
    ]


def test_pictures_need_a_measured_row(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra lowbit[plot]")
    plot(document(row(), row(batch=4), row(scheme=None), row(impl="transformers eager", kernels=None)), tmp_path / "e2e.svg")
    assert {path.name for path in tmp_path.iterdir()} == {"e2e.svg", "e2e-dark.svg"}
    with pytest.raises(ValueError, match="hold no measured row"):
        plot(document(row(ms_per_token=None)), tmp_path / "none.svg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "GPT-5"], "gpt-oss-20b, OLMoE-1B-7B, got 'GPT-5'"),
        (["--rivals", "vllm"], "--rivals are eager, static, got 'vllm'"),
        (["--dtype", "float32"], "--dtype is float16 or bfloat16, got 'float32'"),
        (["--schemes", "int4"], "int4"),
        (["--kv", "16,int3"], "formats of keys and values are 16"),
    ],
)
def test_what_is_asked_wrongly_is_refused(arguments, message):
    result = CliRunner().invoke(app, ["e2e", *arguments])
    assert result.exit_code == 1 and message in " ".join(result.stderr.split())


def test_a_model_with_an_embedding_of_positions(monkeypatch):
    """OPT's shape. Of the position embedding a step reads one row, which does not count. The tied weight counts once, as the LM
    head."""
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
            module.restore()  # restores the unpacked weights, since the CPU's packed form may be larger
    assert packed.lm_head.weight_packed is packed.model.decoder.embed_tokens.weight_packed
    of_layer = (4 * 64 * 64 + 2 * 64 * 256) * 9 // 16 + 2 * (4 * 64 + 64 + 256 + 4 * 64)
    assert weight_bytes(packed) == 3 * of_layer + 2 * 2 * 64 + 50272 * (64 + 4)


HEADS = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, vocab_size=320)
MIXTURES = {
    "Qwen3-30B-A3B": dict(**HEADS, head_dim=16, moe_intermediate_size=48, num_experts=16),
    "Mixtral-8x7B": dict(**HEADS, intermediate_size=96),
    "gpt-oss-20b": dict(**HEADS, head_dim=16, intermediate_size=64, num_local_experts=8),
    "OLMoE-1B-7B": dict(**HEADS, intermediate_size=32, num_experts=16),
}
"""Sizes of the mixtures of experts in these tests. Routing and everything else are those of the real models."""


@pytest.fixture
def small_mixtures(monkeypatch):
    def cut(make, sizes):
        config = make()
        for key, value in sizes.items():
            setattr(config, key, value)
        return config

    for name, sizes in MIXTURES.items():
        make = language_model.SHAPES[name]
        monkeypatch.setitem(language_model.SHAPES, name, lambda make=make, sizes=sizes: cut(make, sizes))


EXPERTS = {
    "Qwen3-30B-A3B": (128, 8, 3 * 768 * 2048),
    "Mixtral-8x7B": (8, 2, 3 * 14336 * 4096),
    "gpt-oss-20b": (32, 4, 3 * 2880 * 2880),
    "OLMoE-1B-7B": (64, 8, 3 * 1024 * 2048),
}
"""(experts of a layer, experts of a token, weights of one expert) by model."""


@pytest.mark.parametrize("model", EXPERTS)
def test_bytes_of_whole_mixtures(model):
    """The bytes that a step of 16 tokens reads in 16 bits, counted by hand. Models have their real sizes, on the meta
    device."""
    made = language_model.meta_model(model, torch.bfloat16, 2)
    experts, top_k, size = EXPERTS[model]
    all_experts = 2 * 2 * experts * size
    biases = 2 * 2 * experts * 3 * 2880 if model == "gpt-oss-20b" else 0
    others = sum(p.nbytes for p in made.parameters()) - all_experts - biases - made.model.embed_tokens.weight.nbytes
    hit = 1 - (1 - top_k / experts) ** 16
    assert weight_bytes(made) == others + all_experts + biases
    assert weight_bytes(made, 16) == pytest.approx(others + hit * (all_experts + biases))
    assert weight_bytes(made, 1) == pytest.approx(others + top_k / experts * (all_experts + biases))


@pytest.mark.parametrize("model", MIXTURES)
def test_mixtures_of_experts_without_a_gpu(small_mixtures, model):
    """The models compute, and their experts differ. A step is expected to hit as many experts as independent tokens would."""
    made = random_model(model, "w4a16_g32", "w8a16", torch.bfloat16, torch.device("cpu"), layers=2)
    experts = made.model.layers[0].mlp.experts
    part = next(iter(experts.packed().values()))
    assert isinstance(experts, QuantExperts) and not torch.equal(part.expert(0).codes, part.expert(1).codes)
    engine = Engine(made, max_concurrent=4, max_length=300, cache_bytes=1 << 22, prefix_caching=False)
    assert isinstance(engine.program, DecodeProgram) and engine.difference < 0.05
    for layer in range(2):
        e2e.fill(engine.program.cache.layer(layer))
    found = e2e.experts_of_a_step(engine, made, 4, 256)
    top_k = made.config.num_experts_per_tok
    assert found.keys() == {"experts_hit"} and top_k < found["experts_hit"] < min(4 * top_k, experts.num_experts)
    window = 128 if model == "gpt-oss-20b" else 256
    of_token = 2 * 2 * made.config.num_key_value_heads * 16
    assert e2e.kv_bytes(engine.program, 256) == (256 + window) * of_token
    sixteen = random_model(model, None, None, torch.bfloat16, torch.device("cpu"), layers=1)
    tokens = torch.arange(24)[None]
    with torch.no_grad():
        assert bool(sixteen(input_ids=tokens).logits.isfinite().all()) and bool(made(input_ids=tokens).logits.isfinite().all())


@pytest.mark.parametrize("kv", ["16", "fp8", "k8v4"])
def test_pages_are_filled(small, kv):
    """Every page has Gaussian keys and values, as nearly as the format can store them."""
    model = random_model(small, None, None, torch.float32, torch.device("cpu"))
    engine = e2e.engine_for(model, [(2, 200)], kv)
    pages = engine.program.cache.layer(1)
    place, page = torch.arange(128), torch.full((128,), pages.pages - 1)
    for part in pages.read(page, place, torch.float32):
        assert abs(float(part.mean())) < 0.05 and 0.9 < float(part.std()) < 1.1
    assert e2e.kv_bytes(engine.program, 256) == 2 * engine.program.page_bytes


def test_routers_are_counted():
    generator = torch.Generator().manual_seed(0)
    x, router = torch.randn(3, 32, generator=generator).bfloat16(), torch.randn(7, 32, generator=generator).bfloat16()
    with e2e.RoutingCounts() as counts:
        made = [route_tokens(x, router, RouterRule(2), tile_rows=8), route(x[:, :5].float(), RouterRule(3), tile_rows=8)]
    assert [int(hit) for hit in counts.hit] == [len(each.experts.unique()) for each in made]


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "gpt-oss-20b"])
def test_a_run_without_a_gpu(small_mixtures, name, tmp_path, monkeypatch):
    """A result file has all its rows. The measurements on the device are replaced."""
    make = e2e.random_model
    monkeypatch.setattr(e2e, "random_model", lambda *a: make(*a[:4], torch.device("cpu"), a[5]))
    monkeypatch.setattr(e2e, "machine", lambda: {"gpu": "a GPU"})
    monkeypatch.setattr(e2e, "read_bandwidth", lambda: (1e12, "a kernel"))
    monkeypatch.setattr(e2e, "warm_up", lambda: None)
    monkeypatch.setattr(e2e, "OUTPUT", 4)
    monkeypatch.setattr(Engine, "compile", lambda self: iter(()))
    monkeypatch.setattr(e2e, "_prefill", lambda engine: (1e4, 0.5))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(
        e2e,
        "engine_for",
        lambda model, cases, kv, _: Engine(model, max_concurrent=4, max_length=300, cache_bytes=1 << 22, kv=kv),
    )

    def decode(engine, batch, context, held, bandwidth):
        limit = 1e3 * (held + batch * e2e.kv_bytes(engine.program, context)) / bandwidth
        return {"ms_per_token": 2 * limit, "limit_ms": limit, "tokens_per_gpu_s": 1.0}

    monkeypatch.setattr(e2e, "_decode", decode)
    monkeypatch.setattr(e2e, "_better", decode)
    config = e2e.E2EConfig((name,), ("w4a16_g32", "w8a16"), (1, 4), (64,), layers=2, kv=("16", "int4"))
    path, found = e2e.run(config, tmp_path / "moe.json", lambda said: None)
    own = ["w4e2m1a16_g32"] if name == "gpt-oss-20b" else []
    assert [row["error"] for row in found["rows"]] == [None] * len(found["rows"])
    schemes = [None, *own, "w4a16_g32", "w8a16"]
    wide, *quantized = [found["rows"][:2], *(found["rows"][i : i + 4] for i in range(2, len(found["rows"]), 4))]
    assert [rows[0]["scheme"] for rows in (wide, *quantized)] == schemes
    assert [row["kv_dtype"] for row in wide] == ["bfloat16"] * 2
    assert all([row["kv_dtype"] for row in rows] == ["bfloat16", "bfloat16", "int4", "int4"] for rows in quantized)
    limits = [row["limit_ms"] for row in found["rows"]]
    assert limits[0] > limits[2] and all(one < four for one, four in zip(limits[::2], limits[1::2], strict=True))
    assert all(rows[i]["limit_ms"] > rows[i + 2]["limit_ms"] for rows in quantized for i in (0, 1))
    wide_ms = {row["batch"]: row["ms_per_token"] for row in found["rows"][:2]}
    assert all(row["bf16_ms_per_token"] == wide_ms[row["batch"]] for row in found["rows"])
    assert all(
        row["experts_hit"] >= {"Qwen3-30B-A3B": 8, "gpt-oss-20b": 4}[name] and row["request_s"] > 0 for row in found["rows"]
    )
    terminal = Console(width=80, record=True, quiet=False)
    terminal.print(*tables(load(path)))
    text = terminal.export_text()
    assert "50 %" in text and "w8a16, KV int4" in text and "16 bits, KV int4" not in text


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["Qwen3-30B-A3B", "Mixtral-8x7B", "gpt-oss-20b", "OLMoE-1B-7B"])
def test_a_short_run_of_experts(tmp_path, model):
    """A model of two layers. Steps hit about as many experts as the limit counts, and none is faster than its limit."""
    out = tmp_path / "e2e.json"
    scheme = "w4e2m1a16_g32" if model == "gpt-oss-20b" else "w4a16_g128"
    arguments = ["--models", model, "--layers", "2", "--schemes", scheme, "--batches", "1,16", "--contexts", "256"]
    result = CliRunner().invoke(app, ["e2e", *arguments, "--out", str(out)])
    assert result.exit_code == 0, result.stderr
    found = json.loads(out.read_text())
    assert found["complete"] and len(found["rows"]) == 4
    for line in found["rows"]:
        assert line["error"] is None and line["ms_per_token"] > 0.9 * line["limit_ms"] > 0
        assert abs(line["experts_hit_once"] - line["experts_hit"]) < 0.25 * line["experts_hit"]


@pytest.mark.gpu
def test_a_short_run_of_keys_and_values(tmp_path):
    """A model of two layers, at a context where most bytes are keys and values. There are rows of each format. None is faster
    than its bytes allow, and fewer bytes take less time."""
    out = tmp_path / "e2e.json"
    arguments = ["--models", "Llama-3-8B", "--layers", "2", "--schemes", "w4a16_g128", "--batches", "32", "--contexts", "8192"]
    result = CliRunner().invoke(app, ["e2e", *arguments, "--kv", "16,fp8,int8,k8v4,int4", "--out", str(out)])
    assert result.exit_code == 0, result.stderr
    found = json.loads(out.read_text())
    assert [row["kv_dtype"] for row in found["rows"]] == ["float16", "fp8", "int8", "k8v4", "int4"] * 2
    for rows in (found["rows"][:5], found["rows"][5:]):
        assert all(row["error"] is None and row["ms_per_token"] > 0.9 * row["limit_ms"] > 0 for row in rows)
        wide, fp8, int8, _, int4 = (row["ms_per_token"] for row in rows)
        assert int4 < min(fp8, int8) <= max(fp8, int8) < wide


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
    """The 16-bit row is the faster of two steps: by cuBLAS, and by the small-M chain if it supports so many rows. Afterwards
    the program is as before."""
    monkeypatch.setattr(chain_of, "_refusals", lambda product, m, dtype: ())
    model = random_model(small, None, None, torch.float16, torch.device("cpu"))
    engine = Engine(model, max_concurrent=1, max_length=128)
    assert isinstance(engine.program.chain, chain_of.Chain) and engine.program.chain.most == 8
    times = {"ring": 2.0, "cuBLAS": 3.0}

    def decode(engine, batch, *more):
        name = "ring" if isinstance(engine.program.chain, chain_of.Chain) else "cuBLAS"
        assert len(more) == 4, "steps of its own: the engine's graphs may be of another form"
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


def test_steps_by_launches_and_in_one_launch(small, tmp_path, monkeypatch):
    """With `one_launch` each case has a row of the launches, computed without the engine's one launch, and a row in one launch
    if the engine can compute it so."""
    monkeypatch.setattr(e2e, "machine", lambda: {"gpu": "none"})
    for name in ("warm_up", "Graphs", "DecodeRunner"):
        monkeypatch.setattr(e2e, name, lambda *arguments, **more: None)
    for name, value in (("read_bandwidth", (1e12, "none")), ("_prefill", (1.0, 0.5)), ("_request", {})):
        monkeypatch.setattr(e2e, name, lambda *arguments, value=value: value)
    monkeypatch.setattr(e2e, "computes_in_one_launch", lambda engine, batch, context: batch < 3)

    def decode(engine, *arguments):
        with_reasons = engine.program.one_launch is not None
        return {"ms_per_token": 1.0 if with_reasons else 2.0, "limit_ms": 1.0}

    monkeypatch.setattr(e2e, "_decode", decode)
    monkeypatch.setattr(e2e, "random_model", lambda *about: random_model(*about[:4], torch.device("cpu")))
    config = e2e.E2EConfig((small,), ("w4a16_g32",), (1, 3), (64,), head=None, one_launch=True)
    _, found = e2e.run(config, tmp_path / "one.json", lambda said: None)
    assert [row["error"] for row in found["rows"]] == [None] * 6
    rows = [(row["scheme"], row["impl"], row["batch"], row["ms_per_token"]) for row in found["rows"]]
    one, several = "lowbit one launch", "lowbit"
    assert rows == [
        (scheme, *row) for scheme in (None, "w4a16_g32") for row in ((several, 1, 2.0), (one, 1, 1.0), (several, 3, 2.0))
    ]


def test_long_prompts_run_through_the_engine(small, tmp_path, monkeypatch):
    """Each quantized model and format has a row for each prompt, computed in chunks by the engine, or the reason for none."""
    monkeypatch.setattr(e2e, "machine", lambda: {"gpu": "a GPU"})
    monkeypatch.setattr(e2e, "warm_up", lambda: None)
    monkeypatch.setattr(e2e, "WARM_PROMPT", 200)
    for name, value in (("read_bandwidth", (1e12, "none")), ("_prefill", (1.0, 0.5)), ("_request", {})):
        monkeypatch.setattr(e2e, name, lambda *arguments, value=value: value)
    for name in ("_decode", "_better"):
        step = {"ms_per_token": 1.0, "limit_ms": 1.0, "tokens_per_gpu_s": 1.0}
        monkeypatch.setattr(e2e, name, lambda *arguments, step=step: step)
    monkeypatch.setattr(e2e, "random_model", lambda *about: random_model(*about[:4], torch.device("cpu")))
    made, computed = [], []
    launch = PrefillRunner.launch

    def recorded(self, chunks):
        computed.append([(chunk.begin, chunk.end) for chunk in chunks])
        return launch(self, chunks)

    monkeypatch.setattr(PrefillRunner, "launch", recorded)

    def engine_for(model, cases, kv, one_launch):
        assert cases == ([(1, 64)] if len(made) == 0 else [(1, 64), (1, 1500), (1, 5000)])
        made.append(Engine(model, max_concurrent=1, max_length=2048, cache_bytes=1 << 22, kv=kv, prefix_caching=False))
        return made[-1]

    monkeypatch.setattr(e2e, "engine_for", engine_for)
    config = e2e.E2EConfig(
        (small,), ("w4a16_g32",), (1,), (64,), head=None, kv=("16", "int4"), prompts=(1500, 5000)
    )  # fmt: skip
    path, found = e2e.run(config, tmp_path / "prompts.json", lambda said: None)
    assert [row["error"] for row in found["rows"]] == [None] * 3
    rows = [(row["scheme"], row["kv_dtype"], row["prompt"]) for row in found["prompts"]]
    assert rows == [("w4a16_g32", kv, prompt) for kv in ("float16", "int4") for prompt in (1500, 5000)]
    for row in found["prompts"][::2]:
        assert row["error"] is None and row["prefill_tok_s"] == 1500 / row["prompt_s"] > 0
    assert all("2,048" in row["error"] and row["prompt_s"] is None for row in found["prompts"][1::2])
    assert computed == 2 * [[(0, 200)], [(0, 1024)], [(1024, 1500)], [(0, 200)]]
    terminal = Console(width=80, record=True, quiet=False)
    terminal.print(*tables(load(path)))
    assert "s to its first token" in terminal.export_text() and "prompt 5,000: " in failed(found)[0]


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
