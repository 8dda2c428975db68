"""A server's engine runs for months, so its memory must not depend on the number of sequences that it has generated."""

from __future__ import annotations

import collections
import gc
import tracemalloc
import weakref

import torch

from lowbit.engine import Detokenizer, Engine, FinishReason, Request, Sampling, failure
from lowbit.engine import engine as engine_module
from tests.tiny import eager_llama, tiny_tokenizer

VOCAB = 160


def some_sequences(engine, tokenizer, count, seed):
    """Runs short sequences of all kinds, 32 at a time: every sampling setting, streamed, cancelled, failing. Returns the count
    of each finish reason."""
    ends = collections.Counter()
    generator = torch.Generator().manual_seed(seed)
    for begin in range(0, count, 32):
        sequences = []
        for i in range(begin, begin + 32):
            length = int(torch.randint(1, 140, (), generator=generator))
            ids = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
            text = Detokenizer(tokenizer, ids, ["zz"])

            def on_token(sampled, text=text, i=i):
                if i % 16 == 5:
                    raise ValueError("no more")
                text.push(sampled.token)
                return text.stopped

            asked = Sampling(0.7 * (i % 3), top_p=0.9, seed=i, presence_penalty=0.1 * (i % 4), logit_bias={i % VOCAB: 1.0})
            sequences.append(engine.submit(Request(ids, 1 + i % 4, asked, on_token=on_token, top_logprobs=i % 3)))
        engine.step()
        for sequence in sequences[7::16]:
            engine.cancel(sequence)
        next(engine.stream(sequences[0]))
        while any(sequence.finish_reason is None for sequence in sequences):
            engine.step()
        ends.update(sequence.finish_reason for sequence in sequences)
    engine.step()
    return ends


def objects():
    return collections.Counter(type(each).__name__ for each in gc.get_objects())


def test_thousands_of_sequences_leave_nothing_behind(monkeypatch):
    """Thousands of sequences leave no objects, even without Python's collector of cycles, and no bytes."""
    for module in (failure, engine_module):
        monkeypatch.setattr(module.logger, "disabled", True)  # pytest keeps logged errors alive
    engine = Engine(eager_llama(), max_concurrent=8, chunk_tokens=128, cache_bytes=1 << 20, max_length=256)
    tokenizer = tiny_tokenizer()
    some_sequences(engine, tokenizer, 256, 0)
    gc.collect()
    gc.disable()
    try:
        before = objects()
        ends = some_sequences(engine, tokenizer, 512, 1)
        more = objects() - before
    finally:
        gc.enable()
    assert sum(ends.values()) == 512 and {FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.FAILED} <= set(ends)
    assert sum(more.values()) < 25, more.most_common(8)
    tracemalloc.start()
    try:
        some_sequences(engine, tokenizer, 128, 2)  # by now all pages have been used once
        gc.collect()  # frees Python's own lists of unused tuples, which would count as allocated
        bytes_ = tracemalloc.get_traced_memory()[0]
        some_sequences(engine, tokenizer, 512, 3)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - bytes_ < 100_000
    finally:
        tracemalloc.stop()
    request = Request([5, 6], 2)
    sequence = engine.submit(request)
    held = [weakref.ref(request), weakref.ref(sequence)]
    engine.generate([])
    while sequence.finish_reason is None:
        engine.step()
    engine.step()
    del sequence, request
    assert [each() for each in held] == [None, None]
