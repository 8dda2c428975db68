"""`lowbit recommend`: bytes equal those of the checkpoint, choices follow the table, and unknowns are stated."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from transformers import DeepseekV3Config, GPT2Config, LlamaConfig, MixtralConfig, OPTConfig

from lowbit import recommend as room
from lowbit.checkpoint import CheckpointError, CheckpointReader
from lowbit.engine.cache import CacheSpec
from lowbit.formats import parse_scheme
from lowbit.formats.kv import parse_kv
from lowbit.models.hf import plan_for
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from lowbit.models.skeleton import skeleton
from lowbit.recommend import cache_bytes, options_of, recommend, tensor_bytes
from tests.test_cli import run
from tests.tiny import save_tiny

ROOT = Path(__file__).parent.parent
SMALL, LARGE = "small", "large"


def row(scheme, method, kl):
    return {"scheme": scheme, "method": method, "bits": 4.0, "kl": kl, "error": None}


TABLE = (
    {
        "model": SMALL, "linear": 1000, "other": 10, "group": 64,
        "rows": [
            row("w3a16_g64", "rtn", 2.0), row("w4a16_g64", "rtn", 0.4), row("w4a16_g64", "gptq", 0.2),
            row("w4a16_g64_z", "rtn", 0.01), row("w8a16", "rtn", 0.004), row("w4a16_g64", "gptq damping=0.01", 0.001),
            row("w2a16_g32", "learned iterations=100", 3.0),
        ],
    },
    {
        "model": LARGE, "linear": 10_000_000, "other": 10, "group": 128,
        "rows": [
            row("w4a16_g128", "rtn", 0.1), row("w4a16_g128", "gptq", 0.05), row("w8a16", "rtn", 0.001),
            row("w8a16_g128", "gptq", 0.0005),
        ],
    },
)  # fmt: skip


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(room, "measured", lambda: TABLE)
    monkeypatch.setattr(room, "of_one_text", tuple)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("recommend") / "tiny")


def config_only(folder, config, dtype=torch.bfloat16):
    config.dtype = dtype
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(folder)
    return folder


def llama(**options):
    sizes = dict(hidden_size=256, intermediate_size=640, num_hidden_layers=2, num_attention_heads=4, vocab_size=512)
    return LlamaConfig(**{**sizes, "num_key_value_heads": 2, "tie_word_embeddings": False, **options})


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16_g16", "w4a16_g32_z", "w6e2m3a16", "w3a16_g16_fz"])
@pytest.mark.parametrize(("tied", "embeddings"), [(True, False), (False, False), (True, True), (False, True)])
def test_bytes_are_those_of_the_checkpoint(tmp_path, scheme, tied, embeddings):
    save_tiny(tmp_path / "m", tied=tied, bias=True)
    quantize_checkpoint(tmp_path / "m", tmp_path / "q", scheme, embeddings=embeddings)
    with CheckpointReader(tmp_path / "q") as reader:
        stored = sum(info.end - info.begin for info in map(reader.info, reader.names()))
    model = skeleton(tmp_path / "m")
    assert tensor_bytes(model, plan_for(model, scheme, None, embeddings)) == stored


def test_bytes_of_the_model_as_it_is(tiny):
    with CheckpointReader(tiny) as reader:
        stored = sum(info.end - info.begin for info in map(reader.info, reader.names()))
    assert tensor_bytes(skeleton(tiny), None) == stored


def test_bytes_of_a_context(tmp_path):
    model = skeleton(config_only(tmp_path / "llama", llama()))
    # 2 tensors x 2 layers x 2 heads of 64 channels x 2 bytes: 1024 bytes per token, in pages of 128 tokens
    assert [cache_bytes(model, n) for n in (0, 1, 128, 129)] == [0, 131072, 131072, 262144]
    assert cache_bytes(model, 128) == CacheSpec(2, 2, 64, torch.bfloat16).page_bytes
    opt = OPTConfig(hidden_size=64, ffn_dim=192, num_hidden_layers=3, num_attention_heads=4, vocab_size=160)
    assert cache_bytes(skeleton(config_only(tmp_path / "opt", opt)), 128) == 2 * 3 * 64 * 2 * 128

    # int8 and int4 have a scale of 2 bytes for each token and head, of 64 channels
    sizes = [cache_bytes(model, 128, parse_kv(kv)) for kv in ("fp8", "int8", "int4", "k8v4")]
    assert sizes == [2 * 2 * 128 * rows for rows in (2 * 66, 2 * 66, 2 * 34, 66 + 34)]

    # Four heads with keys of 24 + 8 channels and values of 24
    deepseek = DeepseekV3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, v_head_dim=24,
        qk_nope_head_dim=24, qk_rope_head_dim=8, vocab_size=160,
    )  # fmt: skip
    assert cache_bytes(skeleton(config_only(tmp_path / "deepseek", deepseek)), 128) == 2 * 4 * (32 + 24) * 2 * 128
    with pytest.raises(
        ValueError, match="keys have 32 channels, its values 24; the engine does not store .* int4: take --kv 16"
    ):
        cache_bytes(skeleton(tmp_path / "deepseek"), 128, parse_kv("int4"))


def test_weights_that_stay_in_16_bits_count_once(tmp_path):
    tied = recommend(config_only(tmp_path / "tied", llama(tie_word_embeddings=True)), budget_bytes=1e9)
    assert any(
        f"{512 * 256:,} weights of 2 modules (embeddings and LM head among them) count with" in line for line in tied.why
    )
    wide = recommend(config_only(tmp_path / "wide", llama(), torch.float32), budget_bytes=1e9)
    assert any("among them) count with 32 bits" in line for line in wide.why)
    experts = MixtralConfig(
        hidden_size=256, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, num_local_experts=4,
    )  # fmt: skip
    found = recommend(config_only(tmp_path / "experts", experts), budget_bytes=1e9)
    weights = 2 * 512 * 256 + 2 * 4 * 256
    assert any(f"{weights:,} weights of 4 modules (embeddings and LM head among them, MixtralT" in line for line in found.why)
    assert found.linear_weights == 2 * (4 * 3 * 64 * 256 + 2 * 256 * 256 + 2 * 256 * 128)


def test_the_nearest_measured_model_is_no_larger(table, tmp_path):
    model = config_only(tmp_path / "m", llama())  # 1.4 million linear weights
    found = recommend(model, divergence=0.004)
    assert (found.chosen.scheme.name, found.chosen.method, found.chosen.of) == ("w8a16", "rtn", SMALL)
    # The only case measured for the other model alone. Its KL is scaled by the ratio of the cases measured for both.
    other = next(c for c in found.neighbours if c.of == LARGE)
    ratio = (0.4 / 0.1 * 0.2 / 0.05 * 0.004 / 0.001) ** (1 / 3)
    assert other.scheme.name == "w8a16_g128" and other.kl == pytest.approx(0.0005 * ratio) and "estimate" in other.source()
    big = config_only(tmp_path / "big", llama(intermediate_size=25600))
    assert recommend(big, budget_bytes=1e9).chosen.of == LARGE


def test_a_budget_takes_the_least_divergence_and_the_least_work(table, tmp_path):
    model = config_only(tmp_path / "m", llama())
    size = {s: tensor_bytes(skeleton(model), plan_for(skeleton(model), s, None, False)) for s in ("w4a16_g128", "w8a16")}
    found = recommend(model, budget_bytes=size["w8a16"] - 1)
    assert (found.chosen.scheme.name, found.chosen.method, found.chosen.bytes) == ("w4a16_g128", "gptq", size["w4a16_g128"])
    assert found.command == f"lowbit quantize {model} m-w4a16_g128 --scheme w4a16_g128 --method gptq"
    assert any("gptq has 50% of the divergence of rounding to nearest" in line for line in found.why)
    assert any("the next better option is w8a16 by rtn" in line for line in found.why)
    # Both divergences are negligible, so the fewer bytes and plain rounding win.
    assert recommend(config_only(tmp_path / "b", llama(intermediate_size=25600)), budget_bytes=1e9).chosen.method == "rtn"
    # The memory of the context's KV cache is not available for weights.
    context = recommend(model, budget_bytes=size["w8a16"] + 131071, context=128)
    assert context.chosen.scheme.name == "w4a16_g128" and context.cache_bytes == 131072
    assert recommend(model, budget_bytes=size["w8a16"] + 131072, context=128).chosen.scheme.name == "w8a16"
    narrow = recommend(model, budget_bytes=size["w8a16"] + 34816, context=128, kv="int4")
    assert (narrow.chosen.scheme.name, narrow.kv, narrow.cache_bytes) == ("w8a16", "int4", 2 * 2 * 128 * 2 * 34)


@pytest.mark.parametrize("is_measured", [True, False])
def test_formats_of_keys_and_values_are_compared(table, tmp_path, monkeypatch, is_measured):
    kl = {
        "model": SMALL,
        "context": 2048,
        "rows": [
            {"kv": "fp8", "kl": 0.004},
            {"kv": "int8", "kl": 0.0005},
            {"kv": "k8v4", "kl": 0.01},
            {"kv": "int4", "kl": 0.06},
        ],
    }
    monkeypatch.setattr(room, "kv_divergence", lambda: kl if is_measured else None)
    model = config_only(tmp_path / "m", llama())
    assert not any("--kv" in line for line in recommend(model, budget_bytes=1e9).why), "without a context there are no bytes"
    (line,) = [line for line in recommend(model, budget_bytes=1e9, context=1000).why if "--kv" in line]
    sizes = "1.0 MB (16), 0.5 MB (fp8{}), 0.5 MB (int8{}), 0.4 MB (k8v4{}), 0.3 MB (int4{})"
    losses = (", KL 0.004", ", KL 0.0005", ", KL 0.01", ", KL 0.06") if is_measured else ("",) * 4
    where = "measured on small, 2,048 tokens" if is_measured else "no divergence was measured"
    assert line == f"keys and values of 1,000 tokens, by --kv: {sizes.format(*losses)}; {where}"


def test_a_divergence_takes_the_fewest_bytes_and_the_least_work(table, tmp_path):
    model = config_only(tmp_path / "m", llama())
    assert recommend(model, divergence=0.4).chosen.options == ("--scheme", "w4a16_g128")
    assert recommend(model, divergence=0.39).chosen.options == ("--scheme", "w4a16_g128", "--method", "gptq")
    assert recommend(model, divergence=0.1).chosen.scheme.name == "w8a16"
    broken = recommend(model, divergence=2.5)
    assert broken.chosen.scheme.name == "w3a16_g128" and any("output breaks down" in line for line in broken.why)
    assert any("was measured as w3a16_g64" in line for line in broken.why)


def test_groups_are_those_that_divide_the_layers(table, tmp_path):
    found = recommend(config_only(tmp_path / "m", llama(intermediate_size=608)), divergence=0.4)  # 19 x 32
    assert found.chosen.scheme == parse_scheme("w4a16_g32") and found.chosen.measured == parse_scheme("w4a16_g64")
    # Group sizes other than those that the measured model was tried with are kept, or left out.
    learned = recommend(tmp_path / "m", divergence=5.0).chosen
    assert learned.options == ("--scheme", "w2a16_g32", "--method", "learned", "--iterations", "100")
    assert recommend(config_only(tmp_path / "n", llama(intermediate_size=624)), divergence=5.0).chosen.scheme.weight.bits == 3


def test_neither_zeros_nor_options_that_the_command_lacks(table, tmp_path):
    found = recommend(config_only(tmp_path / "m", llama()), divergence=5.0)
    assert all(c.scheme.zero.value == "" and "damping" not in c.method for c in found.neighbours)
    assert options_of("gptq damping=0.01") is None and options_of("rtn") == ()
    assert options_of("gptq act_order=True search=mse") == ("--method", "gptq", "--act-order", "--search", "mse")


def test_what_does_not_fit_is_told_what_would(table, tmp_path):
    model = config_only(tmp_path / "m", llama())
    with pytest.raises(ValueError, match=r"no measured scheme fits 0\.1 MB: the smallest is w2a16_g32 by .* --embeddings\)"):
        recommend(model, budget_bytes=1e5)
    with pytest.raises(
        ValueError, match=r"no measured scheme has a divergence of at most 0\.0001; the closest is w8a16_g128 by gptq"
    ):
        recommend(model, divergence=1e-4)
    with pytest.raises(
        ValueError,
        match=r"nothing in 1\.5 MB has a .* at most 0\.01: the closest there is w4a16.*; in more memory w8a16 by rtn, ",
    ):
        recommend(model, budget_bytes=1.5e6, divergence=0.01)
    with pytest.raises(ValueError, match=r"--budget-gb 6\) or a bound"):
        recommend(model)


def test_models_it_has_no_answer_for(tmp_path, tiny):
    quantize_checkpoint(tiny, tmp_path / "q", "w8a16")
    with pytest.raises(CheckpointError, match=r"is quantized already \(lowbit\); give the 16-bit model"):
        recommend(tmp_path / "q", budget_bytes=1e9)
    with pytest.raises(CheckpointError, match="no such folder"):
        recommend(tmp_path / "none", budget_bytes=1e9)
    gpt2 = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=160)
    gpt2.architectures = ["GPT2LMHeadModel"]
    gpt2.save_pretrained(tmp_path / "gpt2")  # its linear layers are Conv1D
    with pytest.raises(ValueError, match="none of its layers can be quantized"):
        recommend(tmp_path / "gpt2", budget_bytes=1e9)


def test_the_real_table_on_a_model_of_8_billion(tmp_path):
    eight = llama(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256,
    )  # fmt: skip
    model = config_only(tmp_path / "Llama-3-8B", eight)
    found = recommend(model, budget_bytes=24e9)
    assert found.chosen.options == ("--scheme", "w8a16") and found.weights_16bit_bytes == 2 * 8_030_261_248
    # 8 bits for 6,979,321,856 weights, a float32 scale for each row of the linear layers, the rest in 16 bits
    rows = 32 * (2 * 4096 + 2 * 1024 + 2 * 14336 + 4096)
    assert found.chosen.bytes == 6_979_321_856 + 4 * rows + 2 * (8_030_261_248 - 6_979_321_856)
    assert any("extrapolated" in line for line in found.why) and any("1,050,673,152 weights of 2" in line for line in found.why)
    least = math.inf
    for budget in (5e9, 5.65e9, 6e9, 7e9, 8e9, 10e9):
        c = recommend(model, budget_bytes=budget).chosen
        assert c.bytes <= budget and c.kl <= least
        least = max(room.SIMILAR * c.kl, room.NEGLIGIBLE)
    assert recommend(model, budget_bytes=7.4e9).chosen.scheme.name == "w6e2m3a16"


def test_figures_of_one_text_are_those_of_the_documentation():
    """Each figure is in a table of the section that its source names, in the line of its scheme and method."""
    for model in room.of_one_text():
        for row in model["rows"]:
            page, anchor = row["source"].split("#")
            sections = re.split(r"^#{2,3} ", (ROOT / page).read_text(), flags=re.MULTILINE)
            (section,) = [s for s in sections if s.split("\n")[0].lower().replace(" ", "-") == anchor]
            name = row["method"].split(" ")[0]
            words = [f"--{word}" for word in ("rotate-inputs", "rotate") if word.replace("-", "_") + "=" in row["method"]][:1]
            words += [name] if name != "rtn" else []
            lines = [line for line in section.split("\n") if line.startswith("|") and f"{row['kl']:.4f}".rstrip("0") in line]
            assert [line for line in lines if all(word in line for word in words)], row
            assert row["scheme"] in section and options_of(row["method"]) is not None


def test_methods_measured_on_one_text(monkeypatch, tmp_path):
    monkeypatch.setattr(room, "measured", lambda: TABLE)
    beside = {
        "model": "one text", "linear": 1000, "group": 64,
        "rows": [
            row("w4a16_g64", "rtn", 0.2), row("w4a16_g64", "gptq", 0.1), row("w4a16_g64", "gptq rotate=True samples=32", 0.05),
            row("w4a16_g64", "learned iterations=100", 0.04), row("w8a8", "rtn rotate_inputs=*", 0.003),
        ],
    }  # fmt: skip
    monkeypatch.setattr(room, "of_one_text", lambda: (beside,))
    model = config_only(tmp_path / "m", llama())
    size = tensor_bytes(skeleton(model), plan_for(skeleton(model), "w4a16_g128", None, False))
    found = recommend(model, budget_bytes=size)
    # Both are within a quarter of the minimum, so less work wins. The KL is twice that of the one text: the ratio where both
    # were measured.
    assert found.chosen.options == ("--scheme", "w4a16_g128", "--method", "gptq", "--rotate", "--samples", "32")
    assert found.chosen.kl == pytest.approx(0.1) and found.chosen.bytes == size
    assert any("2.00" in line and "an estimate: 2.00 times that of one text" in line for line in found.why)
    assert any(line.startswith("--method learned, slower, has 80%") for line in found.why)
    eight = recommend(model, budget_bytes=tensor_bytes(skeleton(model), plan_for(skeleton(model), "w8a8", None, False)))
    assert eight.chosen.scheme.name == "w8a16", "8-bit activations are named, not taken"
    assert any("--scheme w8a8 --rotate-inputs '*'" in line and "0.006" in line for line in eight.why)
    assert not any("--scheme w8a8" in line for line in recommend(model, divergence=0.005).why), "0.006 is more than was asked"
    # Rotation unties tied weights, which costs the bytes of an embedding. Other decoders are never rotated.
    tied = recommend(config_only(tmp_path / "tied", llama(tie_word_embeddings=True)), divergence=0.1)
    apart = next(c for c in tied.neighbours if "--rotate" in c.options)
    assert apart.bytes == tied.chosen.bytes + 2 * 512 * 256 == size and tied.chosen.method == "learned iterations=100"
    opt = OPTConfig(hidden_size=256, ffn_dim=640, num_hidden_layers=2, num_attention_heads=4, vocab_size=512)
    assert recommend(config_only(tmp_path / "opt", opt), divergence=0.1).chosen.method == "learned iterations=100"


def test_the_command(tiny, tmp_path):
    result = run("recommend", tiny, "--divergence", "0.05", "--json", tmp_path / "r.json")
    assert result.exit_code == 0
    value = json.loads((tmp_path / "r.json").read_text())
    assert value["result"] == "lowbit recommend" and value["command"] in result.stdout and "KL measured on" in result.stdout
    assert value["chosen"] in value["neighbours"] and value["chosen"]["kl"] <= 0.05 and value["cache_bytes"] == 0
    with_context = run("recommend", tiny, "--budget-gb", "0.01", "--context", "100", "--json", "-")
    assert json.loads(with_context.stdout)["cache_bytes"] == 128 * 2 * 2 * 2 * 16 * 2
    narrow = run("recommend", tiny, "--budget-gb", "0.01", "--context", "100", "--kv", "int8", "--json", "-")
    assert json.loads(narrow.stdout)["cache_bytes"] == 128 * 2 * 2 * 2 * (32 + 2) and json.loads(narrow.stdout)["kv"] == "int8"
    words = value["command"].split()
    assert run(*words[1:3], tmp_path / "q", *words[4:], "--samples", "2", "--length", "16").exit_code == 0
    for options, message in (
        ([], "no criterion: give"), (["--budget-gb", "0"], "--budget-gb 0: must be a finite number"),
        (["--divergence", "nan"], "--divergence nan: must be a finite number"),
        (["--budget-gb", "0.00001"], "no measured scheme"),
    ):  # fmt: skip
        failed = run("recommend", tiny, *options)
        assert failed.exit_code == 1 and message in failed.stderr and failed.stderr.count("\n") == 1
