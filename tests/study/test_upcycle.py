"""A small dense model becomes a mixture of experts: exact where it can be, better where it is trained, the same every time."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import typer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralForCausalLM

from lowbit.engine.decoder import Decoder
from lowbit.engine.recognise import recognise
from lowbit.eval import perplexity
from study.__main__ import main
from study.run import halves
from study.upcycle import (
    RECORD,
    Recipe,
    balance_loss,
    build_mixture,
    cluster,
    distill,
    fit_expert,
    fit_layers,
    fit_router,
    mixture_config,
    read_texts,
    route,
    upcycle,
)
from tests.tiny import eager_llama, tiny_tokenizer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RECIPE = Recipe(experts=4, top_k=2, channels=96, samples=6, length=24, steps=0, batch=2)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "dense"
    eager_llama().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tokens(count, seed=0):
    return torch.randint(3, 160, (count,), generator=torch.Generator().manual_seed(seed))


def mixture_of(dense, recipe, seen, device="cpu"):
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).requires_grad_(False)
    config = mixture_config(model.config, recipe)
    mixture = build_mixture(model, config, fit_layers(dense, seen, config, recipe, device, False))
    return model.to(device), mixture.to(device)


def test_experts_with_all_channels_compute_the_dense_model(dense):
    model, mixture = mixture_of(dense, dataclasses.replace(RECIPE, channels=176), tokens(200))
    ids = tokens(40, seed=1)[None]
    with torch.no_grad():
        torch.testing.assert_close(mixture(ids).logits, model(ids).logits, rtol=1e-3, atol=1e-3)
    routers = [layer.mlp.gate.weight for layer in mixture.model.layers]
    assert all(len(weight.unique(dim=0)) == 4 for weight in routers)


def test_clusters_follow_the_direction_of_rows():
    generator = torch.Generator().manual_seed(0)
    directions = torch.nn.functional.normalize(torch.randn(3, 16, generator=generator), dim=1)
    own = torch.arange(60) % 3
    rows = torch.nn.functional.normalize(directions[own] + 0.05 * torch.randn(60, 16, generator=generator), dim=1)
    labels = cluster(rows, 3, torch.Generator().manual_seed(0))
    assert len({(int(a), int(b)) for a, b in zip(own, labels, strict=True)}) == 3
    assert cluster(torch.ones(5, 4) / 2, 3, generator).bincount(minlength=3).min() >= 1  # equal rows leave none empty
    with pytest.raises(ValueError, match="6 clusters"):
        cluster(rows[:5], 6, generator)


def test_the_router_finds_clusters_and_shares_sum_to_one():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 16, generator=generator) * torch.logspace(-2, 2, 16)
    labels = (x / torch.logspace(-2, 2, 16) @ torch.randn(16, 4, generator=generator)).argmax(1)
    router = fit_router(x, labels, 4)
    assert ((x @ router.T).argmax(1) == labels).float().mean() > 0.95
    shares = route(x, router, 2)
    assert torch.equal((shares > 0).sum(1), torch.full((300,), 2))
    torch.testing.assert_close(shares.sum(1), torch.ones(300))


def test_a_fitted_expert_is_nearer_to_the_dense_output_on_its_tokens():
    generator = torch.Generator().manual_seed(0)
    activations = torch.randn(400, 32, generator=generator) @ torch.randn(32, 32, generator=generator)
    down = torch.randn(8, 32, generator=generator)
    share = (torch.arange(400) % 4 == 0).float()
    y = activations @ down.T
    kept, fitted = fit_expert(activations, activations.abs() * down.norm(dim=0), y, share, down, 16, 100.0)
    assert kept.tolist() == sorted(set(kept.tolist())) and fitted.shape == (8, 16)
    own = share > 0

    def error(weight):
        return float((activations[own][:, kept] @ weight.T - y[own]).norm())

    assert error(fitted) < 0.8 * error(down[:, kept])
    kept, unreached = fit_expert(activations, activations.abs(), y, torch.zeros(400), down, 16, 100.0)
    assert torch.equal(unreached, down[:, kept])


@pytest.mark.parametrize("device", DEVICES)
def test_training_approaches_the_dense_model_and_repeats(dense, device):
    recipe = dataclasses.replace(RECIPE, steps=40, batch=4, learning_rate=2e-3)
    seen = tokens(200)
    runs = []
    for _ in range(2):
        teacher, student = mixture_of(dense, recipe, seen, device)
        before = {name: value.clone() for name, value in student.state_dict().items()}
        losses = distill(student, teacher, seen, recipe, False)
        runs.append((losses, student.state_dict()))
    losses, state = runs[0]
    assert len(losses) == 40 and sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert losses == runs[1][0] and all(torch.equal(value, runs[1][1][name]) for name, value in state.items())
    changed = {name for name in state if not torch.equal(state[name], before[name])}
    assert changed == {name for name in state if ".mlp." in name}


def test_balance_is_one_for_equal_experts_and_more_for_one_busy_expert():
    # Each token prefers an expert of its own.
    assert float(balance_loss([torch.eye(4).repeat(5, 1) * 9], 1)) == pytest.approx(1.0)
    assert float(balance_loss([torch.tensor([[50.0, 0, 0, 0]]).repeat(20, 1)], 1)) == pytest.approx(4.0)


def test_writes_a_mixture_of_transformers_with_its_record(dense, tmp_path):
    texts = {"fox": "\n\n".join(f"the {i}th quick brown fox" for i in range(40))}
    recipe = dataclasses.replace(RECIPE, steps=2)
    records = [upcycle(dense, texts, tmp_path / name, recipe, window=32, windows=2) for name in "ab"]
    weights = [load_file(tmp_path / name / "model.safetensors") for name in "ab"]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in weights[0]
    assert records[0]["perplexity"] == records[1]["perplexity"] and len(records[0]["loss"]) == 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32)
    assert isinstance(model, MixtralForCausalLM) and isinstance(recognise(model), Decoder)
    ids = tiny_tokenizer()(halves(texts["fox"])[1], return_tensors="pt").input_ids[0, :64]
    written = json.loads((tmp_path / "a" / RECORD).read_text())
    assert written["recipe"] == dataclasses.asdict(recipe)
    assert written["perplexity"]["mixture"]["fox"] == pytest.approx(perplexity(model, ids, window=32).perplexity, rel=1e-4)
    with pytest.raises(ValueError, match="take fewer or shorter samples"):
        upcycle(dense, texts, tmp_path / "c", dataclasses.replace(recipe, samples=1000))


def test_refusals(dense, tmp_path):
    config = AutoModelForCausalLM.from_pretrained(dense).config
    with pytest.raises(ValueError, match="the dense MLP has 176"):
        mixture_config(config, dataclasses.replace(RECIPE, channels=177))
    config.attention_bias = True
    with pytest.raises(ValueError, match="without biases"):
        mixture_config(config, RECIPE)
    with pytest.raises(ValueError, match="got 5 of 4"):
        dataclasses.replace(RECIPE, top_k=5)
    with pytest.raises(ValueError, match="no text"):
        read_texts(tmp_path)


def test_the_first_argument_names_the_command(tmp_path, capsys):
    for arguments in (["upcycle", str(tmp_path)], ["experts", str(tmp_path), "--data", str(tmp_path)]):
        with pytest.raises((SystemExit, typer.Exit)) as raised:
            main(arguments)
        assert getattr(raised.value, "code", 1) == 1
    printed = capsys.readouterr().err
    assert "name a new folder for the mixture" in printed and "has no text" in printed
