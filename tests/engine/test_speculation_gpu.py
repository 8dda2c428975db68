"""Speculation on a GPU: graphs of verified steps, the bits of plain decoding under `batch_invariant`, the cost of a verified
step."""

from __future__ import annotations

import random
import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lowbit.engine import Engine, Request, Sampling
from lowbit.engine.verify_runner import VerifyRow
from lowbit.models.head import quantize_head
from lowbit.nn import convert
from lowbit.nn.linear import make_batch_invariant
from tests.engine.test_gpu import check_greedy, model_of, prompt, tokens
from tests.engine.test_speculation import Oracle

pytestmark = pytest.mark.gpu


def requests_of(limit=60):
    asked = [
        Sampling(),
        Sampling(temperature=0.8, top_p=0.95, seed=4),
        Sampling(),
        Sampling(repetition_penalty=1.1),
        Sampling(),
    ]
    return [Request(prompt(40 + 90 * i, i), limit, sampling) for i, sampling in enumerate(asked)]


def engine_of(model, **options):
    return Engine(model, **{"max_concurrent": 8, "max_length": 1024, "cache_bytes": 1 << 28} | options)


def guess(sequences, monkeypatch, wrong=0.2):
    """Makes engines guess the tokens of finished sequences, some of them wrong."""
    Oracle.truth, Oracle.wrong = {tuple(s.request.prompt): s.tokens for s in sequences}, wrong
    Oracle.source = random.Random(3)
    monkeypatch.setattr("lowbit.engine.speculation.PromptLookup", Oracle)
    monkeypatch.setattr(Oracle, "vocab", 4096)


@pytest.mark.parametrize(
    ("family", "scheme", "kv"),
    [("Llama", "w4a16_g128", "16"), ("Qwen3", "w4a16_g128", "16"), ("Llama", None, "16"), ("OPT", "w6e3m2a16", "16"),
     ("Qwen3", "w4a16_g128", "int4"), ("Llama", "w8a8", "fp8")],
)  # fmt: skip
def test_batch_invariant_sequences_have_the_same_bits(family, scheme, kv, monkeypatch):
    model = model_of(family, scheme=scheme)
    make_batch_invariant(model, model.dtype)
    plain = engine_of(model, batch_invariant=True, kv=kv).generate(requests_of())
    guess(plain, monkeypatch)
    engine = engine_of(model, batch_invariant=True, kv=kv, speculate=7)
    for got, wanted in zip(engine.generate(requests_of()), plain, strict=True):
        assert got.sampled == wanted.sampled, "tokens and log-probabilities, bit for bit"
    assert engine.speculation.tokens_per_step > 2 and engine.runner.verify_runner.captures > 0


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "OPT"])
def test_greedy_tokens(family, monkeypatch):
    """Steps of another size round differently, so each token must be the most likely one up to rounding."""
    model = model_of(family, ends=True)
    plain = engine_of(model).generate([Request(prompt(length, length), 40) for length in (1, 77, 128, 600)])
    guess(plain, monkeypatch)
    engine = engine_of(model, speculate=7)
    found = engine.generate([Request(s.request.prompt, 40) for s in plain])
    assert engine.speculation.accepted > 0
    check_greedy(model, found)


def test_after_warm_up_nothing_is_captured():
    engine = engine_of(model_of(), speculate=3)
    stages = [stage.what for stage in engine.warm_up()]
    assert "verified step of 4, up to 1,024 tokens" in stages
    runner = engine.runner.verify_runner
    assert runner.captures == len(runner.variants())
    repeated = [Request(prompt(9, i) * 12, 40, Sampling(0.3 * i, seed=i)) for i in range(4)]
    answers = engine.generate(repeated)
    assert engine.speculation.steps > 0 and runner.captures == len(runner.variants())
    assert all(len(tokens(answer)) == 40 for answer in answers)


def test_a_draft_model_in_graphs():
    """The model has int4 weights; its draft model is the same model in 16 bits. After the warm-up nothing is captured."""
    model, draft = model_of(), model_of(scheme=None)
    engine = engine_of(model, speculate=3, draft=draft)
    engine.speculation.draft_cost = 5.0  # the cost that a small draft model has
    list(engine.warm_up())
    runners = engine._draft.decode_runner, engine._draft.prefill_runner, engine.runner.verify_runner
    captures = [runner.captures for runner in runners]
    found = engine.generate([Request(prompt(length, length), 40) for length in (1, 77, 128, 600)])
    assert engine.speculation.accepted > 20 and [runner.captures for runner in runners] == captures
    check_greedy(model, found)


def times_us(layers, context):
    """Returns the microseconds of a step of one token, and of verified steps of 2, 4 and 8 tokens, for one sequence. The model
    has Llama-3-8B's shape in int4, with a head in 8 bits."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192,
    )  # fmt: skip
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).half().eval()
    convert(model, "w4a16_g128")
    quantize_head(model)
    engine = Engine(model, max_concurrent=8, max_length=2048, cache_bytes=1 << 29, speculate=7)
    engine.submit(Request([5] * context, 200))
    for _ in range(3):
        engine.step()
    slot, position = engine.scheduler.running[0].slot, context + 4

    @torch.inference_mode()
    def timed(launch):
        for _ in range(20):
            step = launch()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(200):
            step.graph.replay()
        torch.cuda.synchronize()
        return 1e6 * (time.perf_counter() - begun) / 200

    found = [timed(lambda: engine.decode_runner.launch([slot], False, 1500))]
    for count in (2, 4, 8):
        rows = [VerifyRow(slot, 5, position + i, i) for i in range(count)]
        found.append(timed(lambda rows=rows: engine.runner.verify_runner.launch(rows, False, 1500)))
    return found


@pytest.mark.parametrize("context", [256, 1024])
def test_how_long_a_verified_step_takes(context):
    """Prints the times for 32 layers, extrapolated from models of 2 and 6 layers. No limit is asserted."""
    few, more = times_us(2, context), times_us(6, context)
    plain, *verified = [a + (b - a) * 30 / 4 for a, b in zip(few, more, strict=True)]
    print(f"\n{torch.cuda.get_device_name()}, context {context}, us with 2 layers {few}, with 6 layers {more}")
    print(f"32 layers: a step of one token {plain:.1f} us")
    for count, taken in zip((2, 4, 8), verified, strict=True):
        print(f"32 layers: verified, {count} tokens: {taken:.1f} us, {taken / plain:.3f} x")
