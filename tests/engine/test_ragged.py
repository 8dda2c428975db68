"""Prefill chunks as tensors of one shape. Every token and key is at the place of its sequence, and all other places are
padding."""

from __future__ import annotations

import pytest
import torch

from lowbit.engine.prompt_attention import PromptAttention, RaggedAttention
from lowbit.engine.ragged import Ragged, RaggedShape, sizes
from lowbit.engine.slots import on_device
from lowbit.formats.kv import KV16
from lowbit.kernels.choose.attention import PAGE, AttentionShape
from lowbit.pack.kv_pages import KVPages
from tests.engine.test_prompt_attention import SHAPE, case

CASES = [
    ([5, 16, 1, 12], [0, 0, 0, 0]),
    ([5, 17, 1, 30, 200, 3], [0, 0, 0, 128, 0, 256]),
    ([40], [0]),
    ([1], [200]),
    ([128, 128], [128, 0]),
]


@pytest.mark.parametrize("most", [1, 8, 9, 100, 128, 129, 1000, 1024, 1025, 3000])
def test_sizes(most):
    """The padding is less than 8 tokens for up to 8 tokens, less than 32 for up to 96, less than 64 for up to 1,024, and less
    than 256 beyond."""
    found = sizes(most)
    assert found == tuple(sorted(set(found))) and found[-1] >= most and all(size < most for size in found[:-1])
    for tokens in range(1, most + 1):
        size = next(size for size in found if size >= tokens)
        assert size - tokens < (8 if tokens <= 8 else 32 if tokens <= 96 else 64 if tokens <= 1024 else 256)


@pytest.mark.parametrize("shape_", [None, RaggedShape(400, 15, 900)], ids=str)
@pytest.mark.parametrize(("lengths", "begins"), CASES, ids=str)
def test_tokens_and_keys_are_at_the_places_of_their_sequences(lengths, begins, shape_):
    chunks, slots, *_ = case(lengths, begins)
    if shape_ is None:
        ragged = Ragged.of(chunks, slots, sum(lengths))
    else:
        ragged = Ragged(shape_, on_device(shape_.numbers(chunks, slots.dummy_slot), slots.device), slots)
    total, keys = sum(lengths), sum(lengths) + sum(begins)
    slot_of = [slot for slot, length in enumerate(lengths) for _ in range(length)]
    positions = [begin + i for begin, length in zip(begins, lengths, strict=True) for i in range(length)]
    assert ragged.slot_of.tolist() == slot_of + [slots.dummy_slot] * (len(ragged.ids) - total)
    assert ragged.position_of.tolist() == positions + [0] * (len(ragged.ids) - total)
    assert ragged.slot_of.dtype == ragged.position_of.dtype == ragged.ids.dtype == ragged.q_begins.dtype == torch.int32
    seen = [(slot, place) for slot, chunk in enumerate(chunks) for place in range(chunk.end)]
    seen += [(slots.dummy_slot, 0)] * (ragged.shape.keys - keys)
    where = [int(slots.tables[slot, position // PAGE]) * 2 * PAGE + position % PAGE for slot, position in seen]
    assert ragged.keys(2).tolist() == where
    ends = torch.tensor(lengths).cumsum(0) - 1
    assert ragged.last.tolist() == [*ends.tolist(), *[0] * (ragged.shape.sequences - len(lengths))]


def test_only_last_chunks_are_sampled():
    chunks, slots, *_ = case([5, 7, 2], [0, 0, 0])
    chunks[1] = type(chunks[1])(chunks[1].sequence, 0, (1, 2, 3, 4, 5, 6, 7), False)
    ragged = Ragged.of(chunks, slots, 14)
    assert ragged.last.tolist() == [4, 13, 0] and ragged.ids.tolist() == [0] * 5 + [1, 2, 3, 4, 5, 6, 7] + [0] * 2


@pytest.mark.parametrize("more", [{}, {"window": 320}, {"window": 9}], ids=str)
@pytest.mark.parametrize(("lengths", "begins"), CASES, ids=str)
def test_attention_of_all_sequences_matches_that_of_each(lengths, begins, more):
    chunks, slots, q, pages = case(lengths, begins)
    shape = AttentionShape(**SHAPE, **more)
    shape_ = RaggedShape(400, 15, 900)
    ragged = Ragged(shape_, on_device(shape_.numbers(chunks, slots.dummy_slot), slots.device), slots)
    filled = torch.cat([q, torch.full((400 - len(q), 4, 16), torch.nan)])
    found = RaggedAttention(ragged, 2)(filled, pages, shape)
    expected = PromptAttention(chunks, slots, invariant=True)(q, pages, shape)
    assert found.shape == (400, 64) and torch.equal(found[: len(q)], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("more", [{}, {"window": 320}, {"window": 9}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("lengths", "begins"), CASES, ids=str)
def test_on_a_gpu(lengths, begins, dtype, more):
    """By flash attention, results are right up to rounding. A sequence has the same bits alone, in a larger shape and after
    others."""
    chunks, slots, q, pages = case(lengths, begins)
    shape = AttentionShape(**SHAPE, **more)
    expected = PromptAttention(chunks, slots, invariant=True)(q, pages, shape)
    for name in ("_all", "tables"):
        setattr(slots, name, getattr(slots, name).cuda())
    slots.device = slots.tables.device
    q, k, v = (x.cuda().to(dtype) for x in (q, pages.k, pages.v))
    pages = KVPages(KV16, 16, k, v)

    def computed(some, q, shape_):
        ragged = Ragged(shape_, on_device(shape_.numbers(some, slots.dummy_slot), slots.device), slots)
        filled = torch.cat([q, torch.full((shape_.tokens - len(q), 4, 16), torch.nan, dtype=dtype, device="cuda")])
        return RaggedAttention(ragged, 2)(filled, pages, shape)[: len(q)]

    found = computed(chunks, q, RaggedShape(400, 15, 900))
    torch.testing.assert_close(found.float().cpu(), expected, rtol=2e-2, atol=2e-2)
    begin = 0
    for chunk in chunks:
        end = begin + len(chunk.tokens)
        alone = computed([chunk], q[begin:end], RaggedShape(len(chunk.tokens), 1, chunk.end))
        assert torch.equal(alone, found[begin:end])
        begin = end
