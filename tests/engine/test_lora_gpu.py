"""LoRA adapters on a GPU: in graphs of steps, prompts, both together and guesses; bits under `batch_invariant`; the cost of a
step.
"""

from __future__ import annotations

import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lowbit.engine import Engine, Request
from lowbit.engine.chain import Chain
from lowbit.models.head import quantize_head
from lowbit.nn import convert
from lowbit.nn.linear import make_batch_invariant
from tests.adapters import ALL, merged, write_adapter
from tests.engine.test_chain import dequantized
from tests.engine.test_gpu import check_greedy, model_of, prompt, tokens
from tests.engine.test_mixed import arriving
from tests.engine.test_speculation_gpu import engine_of, guess

pytestmark = pytest.mark.gpu

OPT = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")


def references(family, scheme, dtype, root):
    """The model, folders of two adapters, and the model with each merged into its dequantized weights, by name."""
    model = model_of(family, dtype, scheme)
    plain = dequantized(model, dtype)
    targets = OPT if family == "OPT" else ALL
    folders = {
        "all": write_adapter(root / "all", plain, targets, rank=16, seed=1),
        "some": write_adapter(root / "some", plain, targets[:2], rank=40, seed=2, size=2.0),
    }
    return model, folders, {None: plain, **{name: merged(plain, folder) for name, folder in folders.items()}}


def some_requests(limit=40):
    names = [None, "all", "some", "all", None, "some"]
    return [Request(prompt(33 + 97 * i, i), limit, adapter=name) for i, name in enumerate(names)]


def check_merged(of_adapter, sequences):
    for name, model in of_adapter.items():
        check_greedy(model, [sequence for sequence in sequences if sequence.request.adapter == name])
    texts = {tuple(tokens(sequence)) for sequence in sequences}
    assert len(texts) == len(sequences)


@pytest.mark.parametrize(
    ("family", "scheme", "dtype"),
    [
        ("Llama", "w4a16_g128", torch.float16), ("Llama", "w4a16_g128", torch.bfloat16), ("Qwen2", "w4a16_g128", torch.float16),
        ("Qwen3", "w6e3m2a16", torch.bfloat16), ("Llama", None, torch.float16), ("OPT", "w8a16", torch.float16),
    ],
    ids=str,
)  # fmt: skip
def test_greedy_tokens(family, scheme, dtype, tmp_path):
    """Several adapters and none in one batch, then each alone, in graphs."""
    model, folders, of_adapter = references(family, scheme, dtype, tmp_path)
    engine = Engine(model, max_concurrent=16, max_length=1024, chunk_tokens=256, lora=folders)
    assert isinstance(engine.program.chain, Chain) == (family != "OPT"), engine.report()
    check_merged(of_adapter, engine.generate(some_requests()))
    check_merged(of_adapter, [engine.generate([request])[0] for request in some_requests()])
    assert engine.decode_runner.captures and engine.prefill_runner.captures


def test_beside_prompts(tmp_path):
    model, folders, of_adapter = references("Llama", "w4a16_g128", torch.float16, tmp_path)
    sequences, mixed = arriving(Engine(model, max_concurrent=8, max_length=1024, lora=folders), some_requests())
    assert mixed
    check_merged(of_adapter, sequences)


def test_guesses(tmp_path, monkeypatch):
    model, folders, of_adapter = references("Llama", "w4a16_g128", torch.float16, tmp_path)
    guess(engine_of(model, lora=folders).generate(some_requests()), monkeypatch)
    engine = engine_of(model, lora=folders, speculate=4)
    check_merged(of_adapter, engine.generate(some_requests()))
    assert engine.speculation.accepted


def test_batch_invariant_sequences_have_the_same_bits(tmp_path):
    model, folders, _ = references("Llama", "w4a16_g128", torch.float16, tmp_path)
    make_batch_invariant(model, model.dtype)
    engine = engine_of(model, batch_invariant=True, lora=folders)
    together = engine.generate(some_requests())
    for sequence, request in zip(together, some_requests(), strict=True):
        (alone,) = engine_of(model, batch_invariant=True, lora=folders).generate([request])
        assert alone.sampled == sequence.sampled


def test_after_warm_up_nothing_is_captured(tmp_path):
    model, folders, _ = references("Llama", "w4a16_g128", torch.float16, tmp_path)
    engine = Engine(model, max_concurrent=8, max_length=1024, lora=folders)
    list(engine.warm_up())
    before = engine.decode_runner.captures, engine.prefill_runner.captures, engine.mixed_runner.captures
    engine.generate(some_requests(8))
    assert before == (engine.decode_runner.captures, engine.prefill_runner.captures, engine.mixed_runner.captures)


@pytest.mark.parametrize("context", [512])
def test_how_long_a_step_takes(context, tmp_path):
    """Llama-3-8B's shape with 4 layers and head, rank 16 in all seven layers: printed, for 1, 16 and 64 rows of 4 adapters."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=2048, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).half().eval()
    folders = {str(i): write_adapter(tmp_path / str(i), model, ALL, rank=16, seed=i, size=0.01) for i in range(4)}
    convert(model, "w4a16_g128")
    quantize_head(model)
    times = {}
    for name, options in (("plain", {}), ("lora", {"lora": folders})):
        engine = Engine(model, max_concurrent=64, max_length=1024, cache_bytes=2 << 30, **options)
        for rows in (1, 16, 64):
            runner, slots = engine.decode_runner, list(range(rows))
            engine.slots.update([], [(slot, context) for slot in slots])
            if options:
                engine.slots.update([], [], [(slot, slot % 5 - 1) for slot in slots] if rows > 1 else [(0, 0)])
            for _ in range(5):
                runner.launch(slots, False, context + 1)
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(50):
                runner.launch(slots, False, context + 1)
                engine.slots.update([], [(slot, context) for slot in slots])
            torch.cuda.synchronize()
            times[name, rows] = 1e6 * (time.perf_counter() - begun) / 50
        del engine
    for rows in (1, 16, 64):
        plain, lora = times["plain", rows], times["lora", rows]
        print(f"{rows} rows: {plain:.0f} us plain, {lora:.0f} us with adapters, {lora / plain:.3f} x")
        assert lora < 2 * plain
