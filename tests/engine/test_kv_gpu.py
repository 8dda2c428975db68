"""Keys and values in few bits in the engine on a GPU: the tokens of a forward over stored rows, graphs, bits, memory."""

from __future__ import annotations

import pytest
import torch
from triton import knobs

from lowbit.engine import Engine, FinishReason, Request, Sampling
from lowbit.engine.balance import factors_of
from lowbit.engine.program import DecodeProgram
from lowbit.eval.kv import stored_kv
from lowbit.formats.kv import parse_kv
from lowbit.nn.linear import make_batch_invariant
from tests.engine.pages import fill_unwritten, zero
from tests.engine.test_gpu import LENGTHS, model_of, prompt, tokens

pytestmark = pytest.mark.gpu

NARROW = ("fp8", "int8", "int4", "k8v4")
NUDGES = 4


@torch.inference_mode()
def check_stored(model, sequences, kv):
    """Checks that each token is the most likely one of the forward over rows as pages of `kv` store them, up to rounding.
    Returns the number of tokens that are not the most likely.

    When the embeddings move by a last bit, logits move by more than in 16 bits, since codes change, and each of them changes
    codes in later layers. So rounding is twice the largest move.
    """
    others, passing = 0, []
    with stored_kv(model, parse_kv(kv)):
        for sequence in sequences:
            ids = torch.tensor([[*sequence.request.prompt, *tokens(sequence)]], device="cuda")
            embedded = model.get_input_embeddings()(ids)
            signs = torch.randint(-1, 2, (NUDGES, *embedded.shape[1:]), generator=torch.Generator().manual_seed(0)).to(embedded)
            given = torch.cat([embedded, embedded * (1 + signs * torch.finfo(embedded.dtype).eps)])
            logits, *moved = (
                model(inputs_embeds=x[None]).logits[0, len(sequence.request.prompt) - 1 : -1].float() for x in given
            )
            sampled = torch.tensor(tokens(sequence), device="cuda")
            near = 2 * torch.stack([(other - logits).abs().amax(1) for other in moved]).amax(0)
            above = logits.amax(1) - logits.mean(1)
            limit = near.minimum(0.7 * above)
            below = logits.amax(1, keepdim=True) - logits
            assert (below.gather(1, sampled[:, None])[:, 0] <= limit).all(), len(sequence.request.prompt)
            passing.append((below <= limit[:, None]).float().mean(1))
            others += int((sampled != logits.argmax(1)).sum())
    assert torch.cat(passing).mean() < 0.25, "too many tokens would pass"
    return others


def with_key_biases(model):
    """Makes a few biases of k far larger than other elements of keys, as in Qwen2.5."""
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data[5::37] = 16.0
    return model


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "OPT"])
@pytest.mark.parametrize("kv", NARROW)
def test_greedy_tokens(kv, family, dtype):
    """Tokens are the most likely ones over rows as they are stored, for prompts in chunks and steps, one sequence alone and
    many. Qwen2 has balanced keys with RoPE."""
    model = with_key_biases(model_of(family, dtype)) if family == "Qwen2" else model_of(family, dtype)
    engine = Engine(model, max_concurrent=16, max_length=1024, chunk_tokens=256, kv=kv)
    assert isinstance(engine.program, DecodeProgram) and f"keys and values in {parse_kv(kv)}" in engine.report()[1]
    if family == "Qwen2":
        factors = [factors_of(layer.self_attn.k_proj) for layer in model.model.layers]
        assert all(each is not None and each.min() <= 0.5 for each in factors)
    answered = engine.generate([Request(prompt(length, length), 40) for length in LENGTHS])
    answered += engine.generate([Request(prompt(33), 40)])
    assert all(sequence.finish_reason is FinishReason.LENGTH and len(set(tokens(sequence))) > 15 for sequence in answered)
    check_stored(model, answered, kv)


@pytest.mark.parametrize("kv", ["fp8", "int4"])
def test_after_warm_up_nothing_is_captured_compiled_or_allocated(kv):
    engine = Engine(model_of(), max_concurrent=16, max_length=1024, kv=kv)
    list(engine.warm_up())
    compiled = []
    knobs.compilation.listener = lambda src, **given: compiled.append(src.name)
    try:
        engine.generate([Request(prompt(50 + 9 * i, i), 30) for i in range(20)])
        segments = torch.cuda.memory_stats()["num_device_alloc"]
        engine.generate([Request(prompt(50 + 9 * i, 100 + i), 30) for i in range(20)])
    finally:
        knobs.compilation.listener = None
    captures = (len(engine.decode_runner.variants()), len(engine.prefill_runner.graph_shapes))
    assert (engine.decode_runner.captures, engine.prefill_runner.captures) == captures
    assert torch.cuda.memory_stats()["num_device_alloc"] == segments and not compiled


@pytest.mark.parametrize("kv", NARROW)
def test_batch_invariant_sequences_have_the_same_bits(kv):
    model = model_of()
    make_batch_invariant(model, model.dtype)
    engine = Engine(model, max_concurrent=32, max_length=1024, chunk_tokens=256, batch_invariant=True, kv=kv)
    asked = dict(prompt=prompt(300, 7), limit=60, sampling=Sampling(temperature=0.9, top_p=0.95, seed=5))
    (alone,) = engine.generate([Request(**asked)])
    others = [Request(prompt(20 + 31 * i, i), 80, Sampling(1.0, seed=i)) for i in range(24)]
    among = engine.generate([*others[:11], Request(**asked), *others[11:]])[11]
    assert [(d.token, d.logprob) for d in among.sampled] == [(d.token, d.logprob) for d in alone.sampled]


@pytest.mark.parametrize("kv", NARROW)
def test_prefixes_and_preempted_sequences(kv):
    """A follow-up that reuses pages, and sequences that are preempted in a small cache, have the tokens of computing everything
    again."""
    model = model_of()
    make_batch_invariant(model, model.dtype)
    # A batch-invariant engine reuses only whole chunks of a prompt.
    engine = Engine(model, max_concurrent=4, max_length=1024, chunk_tokens=128, batch_invariant=True, kv=kv)
    common = prompt(400, 3)
    (first,) = engine.generate([Request([*common, 5], 40)])
    (second,) = engine.generate([Request([*common, 5, *tokens(first)], 40)])
    assert second.cached_tokens == 384
    page = engine.program.page_bytes
    tight = Engine(model, max_concurrent=8, max_length=512, cache_bytes=12 * page, prefix_caching=False, kv=kv)
    sequences = tight.generate([Request(prompt(100, seed), 200) for seed in range(8)])
    assert all(r.finish_reason is FinishReason.LENGTH and len(r.sampled) == 200 for r in sequences)
    assert tight.scheduler.pages.available == tight.scheduler.pages.count - 1
    check_stored(model, [first, second, *sequences[:3]], kv)


@pytest.mark.parametrize("kv", NARROW)
def test_unwritten_pages_are_never_read(kv):
    engine = Engine(model_of(), max_concurrent=5, max_length=512, prefix_caching=False, kv=kv)
    asked = [(prompt(100 + i, i), 60) for i in range(5)]  # five rows are padded to eight
    fill_unwritten(engine.program.cache)
    poisoned = [tokens(sequence) for sequence in engine.generate([Request(*each) for each in asked])]
    zero(engine.program.cache)
    assert poisoned == [tokens(sequence) for sequence in engine.generate([Request(*each) for each in asked])]


@pytest.mark.parametrize("kv", ["16", *NARROW])
def test_the_cache_takes_the_memory_that_it_counts(kv):
    model = model_of()
    Engine(model, max_concurrent=2, max_length=256, cache_bytes=1 << 24)  # the weights are packed now
    before = torch.cuda.memory_allocated()
    engine = Engine(model, max_concurrent=16, max_length=1024, cache_bytes=1 << 24, kv=kv)
    grown = torch.cuda.memory_allocated() - before
    assert 0 <= grown - engine.program.cache.nbytes < 8e6 and engine.program.cache.nbytes <= 1 << 24
