"""What a scheme costs a layer: the Fisher information equals that of autograd, and the predicted divergence is near the
measured one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, OPTConfig, OPTForCausalLM

from lowbit.checkpoint import CheckpointReader
from lowbit.formats import parse_scheme
from lowbit.models import sensitivity as module
from lowbit.models.calibrate import Calibration
from lowbit.models.decoder import LayerwiseDecoder
from lowbit.models.sensitivity import measure_sensitivity
from lowbit.quantize import rtn
from tests.tiny import save_tiny, tiny_tokenizer

SCHEME = parse_scheme("w4a16_g32")
SMALL = {
    "vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip


def save_gemma(path):
    """Saves a Gemma: scaled embeddings, soft caps on the logits, a tied head."""
    torch.manual_seed(0)
    config = Gemma2Config(**SMALL, intermediate_size=96, num_key_value_heads=2, head_dim=16, sliding_window=8)
    Gemma2ForCausalLM(config).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)


def save_opt(path):
    """Saves an OPT: learned positions, biases, decoder layers nested one module deeper."""
    torch.manual_seed(0)
    OPTForCausalLM(OPTConfig(**SMALL, ffn_dim=96, word_embed_proj_dim=64)).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)


MAKERS = {
    "tied": lambda path: save_tiny(path, dtype=torch.float32),
    "untied": lambda path: save_tiny(path, tied=False, bias=True, dtype=torch.float32),
    "gemma2": save_gemma,
    "opt": save_opt,
}


def measured(path, tmp_path, tokens):
    decoder = LayerwiseDecoder(CheckpointReader(path), "cpu", torch.float32)
    linears = [n for n, m in decoder.model.named_modules() if isinstance(m, torch.nn.Linear) and ".layers." in n]
    units = measure_sensitivity(decoder, linears, [SCHEME], tokens, tmp_path)
    assert all(p.device.type == "meta" for p in decoder.model.parameters()), "nothing stays in memory"
    assert not any("forward" in layer.__dict__ for layer in decoder.layers)
    return {unit: row for unit, (row,) in units.items()}


@pytest.mark.parametrize("name", MAKERS)
def test_fisher_information_by_autograd(name, tmp_path):
    """Compares with gradients from hooks on every linear layer of the whole model in memory, for the same drawn tokens."""
    MAKERS[name](tmp_path / "m")
    tokens = Calibration(3, 24, text=Path(__file__)).tokens(tmp_path / "m")
    units = measured(tmp_path / "m", tmp_path, tokens)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    generator, fisher = torch.Generator().manual_seed(0), {}
    for row in tokens:
        seen = {}
        handles = []
        for n in (n for unit in units for n in unit):

            def keep(m, args, y, n=n, seen=seen):
                y.retain_grad()
                seen[n] = args[0].detach(), y

            handles.append(model.get_submodule(n).register_forward_hook(keep))
        log_probabilities = model(row[None]).logits.log_softmax(-1)
        drawn = torch.multinomial(log_probabilities[0].detach().exp(), 1, generator=generator)
        log_probabilities[0].gather(1, drawn).sum().backward()
        for n, (x, y) in seen.items():
            for t in range(x.reshape(-1, x.shape[-1]).shape[0]):
                g, v = y.grad.reshape(-1, y.shape[-1])[t], x.reshape(-1, x.shape[-1])[t]
                fisher[n] = fisher.get(n, 0) + torch.outer(g, v).square() / tokens.numel()
        for handle in handles:
            handle.remove()
    for unit, row in units.items():
        weights = {n: model.get_submodule(n).weight.data for n in unit}
        errors = [fisher[n] * (rtn(w, SCHEME, search="mse").dequantize() - w).square() for n, w in weights.items()]
        assert abs(row.error / float(sum(e.sum() for e in errors) / 2) - 1) < 1e-3, unit
    first = [n for unit in units for n in unit]
    in_order = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and ".layers." in n]
    assert [n.split(".layers.")[1] for n in first] == [n.split(".layers.")[1] for n in in_order] or name == "opt"


def test_it_foretells_the_divergence(tmp_path, monkeypatch):
    """Units are quantized one at a time; the measured divergence is within a factor of 4 of the predicted one. Random tokens
    make a layer's inputs alike, so errors add up over channels and tokens, which a diagonal Fisher matrix misses.
    """
    monkeypatch.setattr(module, "TOKENS", 2048)
    save_tiny(tmp_path / "m", tied=False, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    model.lm_head.weight.data *= 20  # makes the model sure of some tokens
    model.save_pretrained(tmp_path / "m")
    tokens = torch.randint(3, 98, (32, 64), generator=torch.Generator().manual_seed(0))
    units = measured(tmp_path / "m", tmp_path, tokens)
    with torch.inference_mode():
        before = model(tokens).logits.log_softmax(-1)
        for unit, row in units.items():
            kept = {n: model.get_submodule(n).weight.data for n in unit}
            for n, w in kept.items():
                model.get_submodule(n).weight.data = rtn(w, SCHEME, search="mse").dequantize()
            after = model(tokens).logits.log_softmax(-1)
            divergence = float((before.exp() * (before - after)).sum(-1).mean())
            assert 0.25 < row.error / divergence < 4, (unit, row.error, divergence)
            for n, w in kept.items():
                model.get_submodule(n).weight.data = w


def test_a_part_of_the_texts_is_enough(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TOKENS", 100)
    save_tiny(tmp_path / "m", dtype=torch.float32)
    tokens = torch.randint(3, 98, (9, 24), generator=torch.Generator().manual_seed(0))
    some = measured(tmp_path / "m", tmp_path, tokens)
    monkeypatch.setattr(module, "TOKENS", 10_000)
    few = measured(tmp_path / "m", tmp_path, tokens[[0, 3, 5, 8]])
    assert [row.error for row in some.values()] == [row.error for row in few.values()]
