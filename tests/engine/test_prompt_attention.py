"""Attention of all prefill chunks of a step takes a few calls. The result is that of one call for each chunk."""

from __future__ import annotations

import pytest
import torch

from lowbit.engine import Engine, Request, Sequence
from lowbit.engine import prompt_attention as module
from lowbit.engine.prompt_attention import PromptAttention
from lowbit.engine.scheduler import PrefillChunk
from lowbit.engine.slots import Slots
from lowbit.formats.kv import KV16
from lowbit.kernels.choose.attention import PAGE, AttentionShape
from lowbit.pack.kv_pages import KVPages
from tests.tiny import eager_llama

VOCAB = 160
SHAPE = dict(heads=4, kv_heads=2, head_dim=16, scale=0.3, rotary_dim=16)


@pytest.fixture
def calls(monkeypatch):
    """Records the names of the calls of torch's attention."""
    noted = []

    def counted(name):
        inner = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: (noted.append(name), inner(*args))[1])

    for name in ("prompt_attention", "causal_attention"):
        counted(name)
    return noted


def case(lengths, begins):
    """Returns chunks of slots whose pages are in random order, and the operands of attention. Unused rows of pages are NaN."""
    generator = torch.Generator().manual_seed(0)
    slots = Slots(len(lengths), 3 * PAGE, VOCAB, (), torch.device("cpu"))
    order = iter((torch.randperm(3 * len(lengths), generator=generator) + 1).tolist())
    slots.update([(slot, place, next(order)) for slot in range(len(lengths)) for place in range(3)], [])
    chunks = []
    keys, values = (torch.full((3 * len(lengths) + 1, 2, PAGE, 16), torch.nan) for _ in range(2))
    for slot, (length, begin) in enumerate(zip(lengths, begins, strict=True)):
        chunks.append(PrefillChunk(Sequence(Request([0], 1), slot=slot), begin, (0,) * length, True))
        for position in range(begin + length):
            for part in (keys, values):
                part[slots.tables[slot, position // PAGE], :, position % PAGE] = torch.randn(2, 16, generator=generator)
    q = torch.randn(sum(lengths), 4, 16, generator=generator)
    return chunks, slots, q, KVPages(KV16, 16, keys, values)


@pytest.mark.parametrize(
    ("lengths", "begins", "expected"),
    [
        ([5, 16, 1, 12], [0, 0, 0, 0], (0, 1)),
        ([5, 17, 1, 30, 200, 140], [0] * 6, (0, 3)),
        ([5, 17, 1, 30, 200, 3], [0, 0, 0, 128, 0, 256], (4, 1)),
        ([5, 17, 3, 30, 9, 31, 20], [128, 128, 128, 128, 256, 0, 256], (3, 2)),
        ([40], [0], (1, 0)),
        ([300, 40, 33, 300], [0] * 4, (0, 2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("more", [{}, {"window": 320}, {"window": 9}, {"softcap": 20.0}], ids=str)
def test_grouped_chunks_match_single_ones(calls, lengths, begins, expected, more):
    chunks, slots, q, pages = case(lengths, begins)
    shape = AttentionShape(**SHAPE, **more)
    found = PromptAttention(chunks, slots, invariant=False)(q, pages, shape)
    count = tuple(calls.count(name) for name in ("prompt_attention", "causal_attention"))
    # In one case a group has at most 5 tokens, so that a window of 9 masks nothing.
    one_by_one = "softcap" in more or (more.get("window") == 9 and expected != (4, 1))
    assert count == ((len(chunks), 0) if one_by_one else expected)
    calls.clear()
    alone = PromptAttention(chunks, slots, invariant=True)(q, pages, shape)
    assert calls == ["prompt_attention"] * len(chunks)
    assert not found.isnan().any()
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)


def test_memory_of_a_call_is_bounded(calls, monkeypatch):
    """The memory of a call is bounded by the number of keys that it gathers. A chunk that fits with no other is computed
    alone."""
    monkeypatch.setattr(module, "MOST_KEYS", 3 * (128 + 16))
    chunks, slots, q, pages = case([5, 7, 3, 2, 9, 4, 1, 20, 21], [128] * 7 + [256] * 2)
    attention = PromptAttention(chunks, slots, invariant=False)
    assert [group.numbers for group in attention.groups] == [[0, 1, 2], [3, 4, 5]] and attention.alone == [6, 7, 8]
    found = attention(q, pages, AttentionShape(**SHAPE))
    alone = PromptAttention(chunks, slots, invariant=True)(q, pages, AttentionShape(**SHAPE))
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)


def test_a_chunk_with_more_keys_than_a_call_gathers(monkeypatch):
    monkeypatch.setattr(module, "MOST_KEYS", 128)
    chunks, slots, *_ = case([5, 7], [256, 256])
    attention = PromptAttention(chunks, slots, invariant=False)
    assert not attention.groups and attention.alone == [0, 1]


@pytest.mark.parametrize("invariant", [False, True])
def test_calls_of_a_step(calls, invariant):
    """A step takes a few calls a layer for any number of prompts, unless it is batch-invariant. Greedy tokens are
    Transformers'."""
    model = eager_llama()
    engine = Engine(model, max_concurrent=24, cache_bytes=1 << 24, prefix_caching=False, batch_invariant=invariant)
    generator = torch.Generator().manual_seed(0)
    asked = [torch.randint(3, VOCAB, (1 + 3 * i % 40,), generator=generator).tolist() for i in range(24)]
    calls.clear()
    for sequence in (sequences := [engine.submit(Request(ids, 6)) for ids in asked]):
        assert sequence.finish_reason is None
    engine.step()
    layers = len(engine.program.layers)
    assert len(calls) == (24 if invariant else 3) * layers
    while any(sequence.finish_reason is None for sequence in sequences):
        engine.step()
    for sequence in sequences:
        with torch.no_grad():
            logits = model(torch.tensor([[*sequence.request.prompt, *(d.token for d in sequence.sampled)]])).logits[0]
        assert logits[len(sequence.request.prompt) - 1 : -1].argmax(1).tolist() == [d.token for d in sequence.sampled]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_grouped_chunks_match_single_ones_on_a_gpu(dtype):
    """By flash attention, grouped chunks equal single ones up to rounding, and give the same bits every time."""
    chunks, slots, q, pages = case([5, 17, 1, 30, 200, 140, 25, 3], [0, 0, 0, 128, 0, 0, 128, 256])
    for name in ("_all", "tables"):
        setattr(slots, name, getattr(slots, name).cuda())
    pages = KVPages(KV16, 16, *(t.cuda().to(dtype) for t in pages.tensors[:2]))
    given = q.cuda().to(dtype), pages, AttentionShape(**SHAPE)
    together, alone = (PromptAttention(chunks, slots, invariant=invariant) for invariant in (False, True))
    found = together(*given)
    assert torch.equal(found, together(*given)) and len(together.groups) == 3
    torch.testing.assert_close(found.float(), alone(*given).float(), rtol=2e-2, atol=2e-2)
