"""The real demo model: its perplexities equal those of a plain simulation of the rounding, to four digits."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowbit import LowbitConfig, demo
from lowbit.engine import Engine, Request
from lowbit.eval import perplexity, sample_text
from lowbit.explain import explain, render
from lowbit.models.quantize_checkpoint import quantize_checkpoint

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def ids(smollm2):
    return AutoTokenizer.from_pretrained(smollm2)(sample_text(), return_tensors="pt").input_ids[0, :384]


def measure(model, ids):
    return perplexity(model, ids, window=len(ids)).perplexity


@pytest.fixture(scope="module")
def plain(smollm2):
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)


@pytest.fixture(scope="module")
def reference(plain, ids):
    return measure(plain, ids)


def simulate(weight, scheme):
    """The weight after rounding to a demo scheme, reimplemented in plain torch."""
    w = weight.float()
    if scheme == "w8a16":
        scale = w.abs().amax(1, keepdim=True) / 127
        return (w / scale).round().clamp(-128, 127) * scale
    if scheme in ("w6e3m2a16", "w5e2m2a16"):
        exponent, bias = (3, 3) if scheme == "w6e3m2a16" else (2, 1)
        scale = w.abs().amax(1, keepdim=True) / (2.0 ** (2**exponent - 1 - bias) * 1.75)
        scaled = w / scale
        # The step is a quarter of the power of two below the value, or of the smallest normal number. Ties go to the even
        # multiple.
        step = (scaled.view(torch.int32) & 0x7F800000).view(torch.float32).clamp(min=2.0 ** (1 - bias)) / 4
        return (scaled / step).round() * step * scale
    n, k = w.shape
    if scheme == "w4a16_g64":
        groups = w.reshape(n, k // 64, 64)
        scale = (groups.abs().amax(2, keepdim=True) / 7).half().float()
        return ((groups / scale).round().clamp(-8, 7) * scale).reshape(n, k)
    groups = w.reshape(n, k // 32, 32)
    low = groups.amin(2, keepdim=True)
    scale = ((groups.amax(2, keepdim=True) - low) / 15).half().float()
    low = low.half().float()
    return (((groups - low) / scale).round().clamp(0, 15) * scale + low).reshape(n, k)


BARS = {"w8a16": 0.005, "w4a16_g32_fz": 0.01}
"""Allowed relative difference from the 16-bit perplexity: 0.5 % for 8 bits. 1 % for 4 bits with floating-point zeros in groups
of 32, the grid in which the demo model is stored.
"""


@pytest.mark.parametrize("scheme", demo.SCHEMES)
def test_perplexity_equals_a_plain_simulation(smollm2, ids, scheme, plain, reference, monkeypatch):
    """Few tokens suffice to detect wrong weights; the schemes with a bound are measured on all tokens."""
    config = LowbitConfig(scheme)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32, quantization_config=config)
    if scheme in BARS:
        value = measure(model, ids)
        assert abs(value / reference - 1) < BARS[scheme], (scheme, value, reference)
    for name, module in plain.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            monkeypatch.setattr(module.weight, "data", simulate(module.weight.data, scheme))
    got, expected = measure(model, ids[:128]), measure(plain, ids[:128])
    assert abs(got / expected - 1) < 5e-5, (got, expected)


def test_explain_walks_a_real_weight(smollm2, tmp_path):
    quantize_checkpoint(smollm2, tmp_path / "q", "w4a16_g64")
    text = render(explain(tmp_path / "q", "model.layers.12.mlp.gate_proj", 700, 300))
    assert "lop3.b32" in text and "lowbit/ops/table.py" in text


@torch.inference_mode()
def test_the_engine_draws_the_tokens_of_transformers(smollm2):
    """Greedy tokens in float32 of the engine, with three sequences at once, equal those of Transformers with one at a time."""
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    engine = Engine(model, max_concurrent=3, max_length=256)
    assert engine.difference < 1e-5, engine.report()
    prompts = ["The capital of France is", "def fibonacci(n):", "Once upon a time"]
    for sequence in engine.generate([Request(tokenizer(text).input_ids, 16) for text in prompts]):
        out = model.generate(
            torch.tensor([sequence.request.prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert [drawn.token for drawn in sequence.sampled] == out[0, len(sequence.request.prompt) :].tolist()
