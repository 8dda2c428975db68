"""A small mixture quantized and measured through Transformers and through the engine."""

from __future__ import annotations

import json

import pytest
import torch

from lowbit.engine.engine import Engine
from lowbit.eval import divergence, perplexity
from lowbit.models.load import load_causal
from lowbit.models.quantize_checkpoint import quantize_checkpoint
from study.experts import (
    PromptLogits,
    Settings,
    agreement,
    continue_greedily,
    measure,
    recorded,
    routing_statistics,
    routing_table,
    table,
)
from study.run import halves
from tests.models.mixtures import tiny_mixture
from tests.tiny import save_tiny, tiny_tokenizer

SETTINGS = Settings(window=32, windows=3, prompts=2, prompt=16, new=6, samples=4, length=24)
TEXTS = {
    "fox": "\n\n".join(f"the {i}th quick brown fox" for i in range(40)),
    "topics": "\n\n".join(f"light of colour {i} is bent" for i in range(40)),
}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "mixture"
    tiny_mixture("mixtral").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def document(mixture, tmp_path_factory):
    output = tmp_path_factory.mktemp("results") / "experts.json"
    cases = [("w8a16", "rtn"), ("w4a16_g16", "rtn"), ("w4a16_g16", "gptq")]
    result = measure(mixture, TEXTS, output, SETTINGS, cases)
    assert json.loads(output.read_text()) == json.loads(json.dumps(result)) and result["complete"]
    return result


def test_figures_are_those_of_the_files(mixture, document, tmp_path):
    quantize_checkpoint(mixture, tmp_path / "q", "w4a16_g16")
    quantized, reference = (load_causal(folder, dtype=torch.float32) for folder in (tmp_path / "q", mixture))
    ids = tiny_tokenizer()(halves(TEXTS["fox"])[1], return_tensors="pt").input_ids[0, :96]
    row = document["rows"][2]
    assert row["key"] == "w4a16_g16 rtn" and row["bits_per_weight"] == pytest.approx(5.0)
    figures = row["paths"]["Transformers"]["figures"]["fox"]
    assert figures["KL mean"][0] == pytest.approx(divergence(quantized, reference, ids, window=32).mean, rel=1e-3)
    assert figures["perplexity"][0] == pytest.approx(perplexity(quantized, ids, window=32).perplexity, rel=1e-3)
    expected = continue_greedily(reference, torch.stack([ids[:16], ids[16:32]]), 6)
    assert torch.equal(expected, continue_greedily(reference, torch.stack([ids[:16], ids[16:32]]), 6))
    assert 0 <= row["paths"]["Transformers"]["greedy"] <= 1


def test_the_engine_computes_what_transformers_does(document):
    unquantized = document["rows"][0]["paths"]["engine"]
    assert unquantized["greedy"] == 1.0 and "decode program of Mixtral" in unquantized["report"][0]
    assert all(own["KL mean"][0] < 1e-9 for own in unquantized["figures"].values())
    for row in document["rows"][1:]:
        through = row["paths"]
        for name in TEXTS:
            pair = [through[path]["figures"][name]["KL mean"][0] for path in ("Transformers", "engine")]
            assert pair[0] == pytest.approx(pair[1], rel=1e-2)


def test_more_bits_are_nearer(document):
    kl = {r["key"]: r["paths"]["Transformers"]["figures"]["fox"]["KL mean"][0] for r in document["rows"][1:]}
    same = {r["key"]: r["paths"]["Transformers"]["same_experts"] for r in document["rows"][1:]}
    assert 0 < kl["w8a16 rtn"] < 0.1 * kl["w4a16_g16 rtn"] and kl["w4a16_g16 gptq"] != kl["w4a16_g16 rtn"]
    assert same["w4a16_g16 rtn"] < same["w8a16 rtn"] <= 1


def test_the_table_has_a_line_for_each_path(document):
    head, _, *lines = table(document)
    assert len(lines) == 2 * len(document["rows"]) and all(line.count("|") == head.count("|") for line in lines)
    assert lines[2].startswith("| w8a16 rtn | 8.") and "| Transformers |" in lines[2] and "| engine |" in lines[3]


def test_logits_of_all_positions(mixture):
    model = load_causal(mixture, dtype=torch.float32)
    ids = torch.randint(3, 160, (1, 150), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids).logits
        logits = PromptLogits(Engine(model, max_length=200, cache_bytes=1 << 22).program, 200, 160)
        torch.testing.assert_close(logits(ids).logits, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits(ids[:, :40], logits_to_keep=3).logits, expected[:, 37:40], rtol=1e-4, atol=1e-4)


def test_routing(mixture, document):
    model = load_causal(mixture, dtype=torch.float32)
    ids = torch.randint(3, 160, (1, 20), generator=torch.Generator().manual_seed(0))
    with recorded(model, ["model.layers.1.mlp.experts"]) as batches:
        router = model(ids, output_router_logits=True).router_logits[1]
    (chosen,) = batches["model.layers.1.mlp.experts"]
    assert torch.equal(chosen, router.topk(2).indices.sort(-1).values)
    one_sided = routing_statistics({"a": torch.tensor([[0, 1]] * 6), "b": torch.tensor([[0, 1], [2, 3]] * 3)}, 4)
    assert one_sided["a"]["tokens"] == [6, 6, 0, 0] and one_sided["a"]["largest"] == 2 and one_sided["a"]["smallest"] == 0
    assert one_sided["a"]["effective"] == pytest.approx(2) and one_sided["b"]["effective"] == pytest.approx(4)
    assert all(sum(own["tokens"]) == 2 * 2 * 96 for own in document["routing"].values())  # top-2 of both texts
    assert routing_table({"routing": one_sided})[-1] == "| a | 2.00 | 2.00 | 0.00 |"


@pytest.mark.gpu
def test_on_a_gpu_the_engine_is_near_transformers(tmp_path):
    sizes = dict(hidden_size=128, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64)
    tiny_mixture("mixtral", torch.bfloat16, **sizes).save_pretrained(tmp_path / "mixture")
    tiny_tokenizer().save_pretrained(tmp_path / "mixture")
    cases = [("w4a16_g64", "rtn"), ("w8a8", "rtn")]
    document = measure(tmp_path / "mixture", TEXTS, tmp_path / "r.json", SETTINGS, cases, device="cuda")
    unquantized, int4, int8 = (row["paths"] for row in document["rows"])
    for name in TEXTS:
        pair = [int4[path]["figures"][name]["KL mean"][0] for path in ("Transformers", "engine")]
        assert pair[0] == pytest.approx(pair[1], rel=0.2)
    assert "experts in 16 bits" in unquantized["engine"]["refused"][0]
    assert "8-bit activations" in int8["engine"]["refused"][0]


def test_agreement_ends_at_the_first_difference():
    expected = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert agreement(expected, torch.tensor([[1, 2, 0, 4], [5, 6, 7, 8]])) == pytest.approx(6 / 8)


def test_refusals(mixture, tmp_path):
    with pytest.raises(ValueError, match="has no experts"):
        measure(save_tiny(tmp_path / "dense"), TEXTS, tmp_path / "r.json", SETTINGS)
    with pytest.raises(ValueError, match="take fewer windows"):
        measure(mixture, {"short": "a\n\nb\n\nc"}, tmp_path / "r.json", SETTINGS)
    with pytest.raises(ValueError, match="prompts of 16 tokens"):
        Settings(window=32, windows=1, prompts=3, prompt=16)
