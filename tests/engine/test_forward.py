"""The engine through a model's own forward: the name of its cache argument, the memory budget, and freed caches."""

from __future__ import annotations

import pytest
import torch

from lowbit.engine import Engine, FinishReason, Request
from lowbit.engine.forward import ForwardProgram
from tests.tiny import eager_llama

PAGE_BYTES = 128 * 2 * 2 * 2 * 16 * 4
"""Bytes of keys and values for 128 tokens of 2 layers with 2 heads of 16 float32."""


@pytest.fixture(scope="module")
def model():
    return eager_llama()


def held_bytes(engine):
    return sum(layer.keys.nbytes + layer.values.nbytes for c in engine.program._caches.values() for layer in c.layers)


def requests(count, tokens=100, limit=60):
    return [Request([(5 * i + seed) % 160 for i in range(tokens)], limit) for seed in range(count)]


def test_the_cache_of_a_sequence_is_freed_when_it_ends(model):
    engine = Engine(model, forward=True, max_concurrent=4)
    engine.generate(requests(4))
    assert held_bytes(engine) == 0
    long, short = (engine.submit(requests(2, limit=limit)[seed]) for seed, limit in enumerate((60, 2)))
    while short.finish_reason is None:
        engine.step()
    assert 0 < held_bytes(engine) <= PAGE_BYTES
    engine.cancel(long)
    assert held_bytes(engine) == 0


def test_cache_bytes_bounds_what_sequences_hold_together(model):
    """The budget is 4 pages, for 3 sequences of 2 pages. The third is preempted or queued, and its tokens do not change."""
    roomy = Engine(model, forward=True, max_concurrent=3, max_length=256).generate(requests(3))
    engine = Engine(model, forward=True, max_concurrent=3, max_length=256, cache_bytes=5 * PAGE_BYTES)
    assert engine.program.page_bytes == PAGE_BYTES
    tight, most = [engine.submit(request) for request in requests(3)], 0
    while any(sequence.finish_reason is None for sequence in tight):
        engine.step()
        most = max(most, held_bytes(engine))
    assert 2 * PAGE_BYTES < most <= 4 * PAGE_BYTES and held_bytes(engine) == 0
    assert [[d.token for d in r.sampled] for r in tight] == [[d.token for d in r.sampled] for r in roomy]


def test_a_sequence_that_cache_bytes_cannot_hold_is_refused(model):
    engine = Engine(model, forward=True, cache_bytes=2 * PAGE_BYTES)
    assert engine.max_length == 128
    said = rf"at most 128 tokens here, this request has 120 tokens and asks for 9 more; .*\(cache_bytes={3 * PAGE_BYTES}\)"
    with pytest.raises(ValueError, match=said):
        engine.submit(Request([1] * 120, 9))
    assert engine.generate([Request([1] * 120, 8)])[0].finish_reason is FinishReason.LENGTH
    with pytest.raises(ValueError, match=rf"\(cache_bytes={2 * PAGE_BYTES}, --cache-gib of lowbit serve\)"):
        Engine(model, forward=True, cache_bytes=PAGE_BYTES)


class CacheModel:
    """A model with the interface of Transformers 5.24: an argument `cache`, and a warning for the older name."""

    config, device, dtype = None, torch.device("cpu"), torch.float32

    def eval(self):
        return self

    def forward(self, input_ids, cache=None, use_cache=False, **older):
        assert not older, "`past_key_values` is deprecated"
        self.seen = cache
        return self

    __call__ = forward

    @property
    def logits(self):
        return torch.zeros(1, 2, 160)


class PastModel(CacheModel):
    """A model with the interface of Transformers 5.17 to 5.23."""

    def forward(self, input_ids, past_key_values=None, use_cache=False):
        self.seen = past_key_values
        return self

    __call__ = forward


@pytest.mark.parametrize("kind", [CacheModel, PastModel])
def test_the_cache_is_passed_by_the_models_name_for_it(kind):
    model, cache = kind(), object()
    program = ForwardProgram(model, ())
    model.seen = None
    program._caches[0] = cache
    program._forward([1, 2], 0)
    assert model.seen is cache
