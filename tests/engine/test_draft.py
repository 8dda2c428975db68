"""A draft model on a CPU. The engine's tokens are those of plain decoding, whatever the draft model guesses, and its cache
follows the engine's."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lowbit.engine import Engine, FinishReason, Request, Sampling
from lowbit.engine.speculation import Speculation, draft_step_cost
from tests.engine.test_engine import engine_of, expected, prompt, tokens
from tests.engine.test_speculation import requests_of, running
from tests.tiny import eager_llama


@pytest.fixture(scope="module")
def model():
    return eager_llama()


@pytest.fixture(autouse=True)
def cheap(monkeypatch):
    """Makes draft models cost as little as small ones. In these tests they are as large as the model."""
    monkeypatch.setattr("lowbit.engine.engine.draft_step_cost", lambda draft_bytes, model_bytes: 2.0)


def nudged(model, scale):
    """Returns a copy of a model with changed weights, which guesses only some of the model's tokens."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    for parameter in other.parameters():
        if parameter.dim() == 2:
            parameter.data += scale * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return other


@pytest.mark.parametrize("scale", [0.0, 0.05, 3.0])
def test_tokens_are_those_of_plain_decoding(model, scale):
    """The draft model is the model itself, one with weights near it, or one with very different weights."""
    plain = engine_of(model).generate(requests_of())
    engine = engine_of(model, speculate=4, draft=nudged(model, scale))
    assert engine.report()[-1] == "steps verify up to 4 guessed tokens of a sequence, by a draft model"
    for got, wanted in zip(engine.generate(requests_of()), plain, strict=True):
        assert tokens(got) == tokens(wanted) and got.finish_reason is FinishReason.LENGTH
    counts = engine.speculation
    assert counts.steps > 0 and (counts.accepted > 0.2 * counts.drafted) == (scale < 1)
    assert engine.scheduler.pages.available == engine.scheduler.pages.count - 1


def test_the_model_itself_is_always_right(model):
    """Every guess is right if the draft model is the model itself. So its keys and values are right across pages, chunks and
    cached prefixes, and after plain steps."""
    engine = engine_of(model, speculate=4, draft=copy.deepcopy(model), max_length=256)
    common = prompt(140)
    for ids in (prompt(120, 1), [*common, 5], [*common, 6, 7], prompt(200, 2)):
        (sequence,) = engine.generate([Request(ids, 40)])
        assert tokens(sequence) == expected(model, ids, 40)
    assert sequence.request.prompt != common and engine.speculation.accepted == engine.speculation.drafted > 100
    plan, plain_steps = engine.speculation.plan, 10

    def sometimes(sequences, **more):
        nonlocal plain_steps
        plain_steps -= 1
        return {} if plain_steps % 12 > 6 else plan(sequences, **more)

    engine.speculation.plan = sometimes
    before = engine.speculation.drafted
    (sequence,) = engine.generate([Request(prompt(30, 3), 100)])
    assert tokens(sequence) == expected(model, sequence.request.prompt, 100)
    assert engine.speculation.accepted == engine.speculation.drafted > before


def test_preemption_and_few_pages(model):
    """The caches of both models have the same number of pages, and share the memory that was given."""
    page = engine_of(model).program.cache_spec.page_bytes
    asked = [dict(prompt=prompt(100, i), limit=60, sampling=Sampling(0.3, seed=i)) for i in range(3)]
    plain = engine_of(model).generate([Request(**each) for each in asked])
    options = {"max_length": 256, "prefix_caching": False, "speculate": 5, "draft": nudged(model, 0.05)}
    engine = engine_of(model, cache_bytes=2 * 5 * page, **options)
    assert engine.page_bytes == 2 * page and engine.scheduler.pages.count == 5
    assert [tokens(s) for s in engine.generate([Request(**each) for each in asked])] == [tokens(s) for s in plain]


def test_sequences_come_and_go(model):
    engine, chosen = engine_of(model, speculate=3, draft=nudged(model, 0.05)), random.Random(1)
    sequences = [engine.submit(Request(prompt(10 + 13 * i, i), 10 + i)) for i in range(10)]
    while any(s.finish_reason is None for s in sequences):
        engine.step()
        if chosen.random() < 0.1:
            engine.cancel(chosen.choice(sequences))
    for got in sequences:
        assert tokens(got) == expected(model, got.request.prompt, len(got.sampled))


def test_another_vocabulary_and_head_size(model):
    """Tokens that only the draft model has are never guessed. Its cache has another layout than the model's."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=192, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=512,
    )  # fmt: skip
    engine = engine_of(model, speculate=3, draft=LlamaForCausalLM(config).eval())
    guess, guessed = engine._draft.guess, []
    engine._draft.guess = lambda counts: guessed.append(guess(counts)) or guessed[-1]
    (sequence,) = engine.generate([Request(prompt(50), 30)])
    assert tokens(sequence) == expected(model, sequence.request.prompt, 30)
    assert guessed and all(token < 160 for each in guessed for row in each.values() for token in row)


def test_pages_of_plain_steps(model):
    """Pages that plain steps filled have no keys and values of the draft model. These are computed when a later turn of the
    conversation is guessed. That also holds for a turn that shares only the first pages, and after another text has taken pages
    over."""
    engine = engine_of(model, speculate=4, draft=copy.deepcopy(model), max_length=256)
    plan = engine.speculation.plan
    engine.speculation.plan = lambda sequences, **more: {}
    first = prompt(100)
    (turn,) = engine.generate([Request(first, 60)])
    engine.speculation.plan = plan
    for ids in ([*turn.tokens, 7], [*turn.tokens[:130], 9, 10], prompt(140, 3), [*turn.tokens, 8]):
        before = engine.speculation.drafted, engine.speculation.accepted
        (sequence,) = engine.generate([Request(ids, 30)])
        assert tokens(sequence) == expected(model, ids, 30)
        drafted, accepted = engine.speculation.drafted - before[0], engine.speculation.accepted - before[1]
        assert drafted == accepted > 10 and (sequence.cached_tokens == 128) == (ids[:100] == first)
    assert engine._draft._complete and len(engine._draft._complete) < engine.scheduler.pages.count


def test_a_smaller_vocabulary(model):
    """Prompts and sampled tokens may lie beyond the draft model's vocabulary, for which its embedding has no rows."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=512,
    )  # fmt: skip
    engine = engine_of(model, speculate=3, draft=LlamaForCausalLM(config).eval())
    ids = [99, 100, 159, *prompt(50), 159]
    found = engine.generate([Request(ids, 30), Request(ids, 30, Sampling(logit_bias={150: 100.0}))])
    assert tokens(found[0]) == expected(model, ids, 30) and set(tokens(found[1])) == {150}
    assert engine.speculation.steps > 0


@pytest.mark.parametrize("when", ["prefill", "guess"])
def test_a_draft_model_that_fails_ends_guessing(model, monkeypatch, caplog, when):
    """If the draft model fails, sequences continue without guesses, even those of a step with guesses that is in flight."""
    engine = engine_of(model, speculate=4, draft=copy.deepcopy(model))
    first = engine.submit(Request(prompt(40), 40))
    while engine.speculation.steps < 2:
        engine.step()

    def fails(*given):
        raise MemoryError("no memory for a graph")

    monkeypatch.setattr(engine._draft, when, fails)
    (second,) = engine.generate([Request(prompt(60, 1), 20)])
    while first.finish_reason is None:
        engine.step()
    steps = engine.speculation.steps
    (third,) = engine.generate([Request(prompt(30, 2), 20)])
    for sequence, count in ((first, 40), (second, 20), (third, 20)):
        assert tokens(sequence) == expected(model, sequence.request.prompt, count), when
    assert engine.speculation.steps == steps and "guessing tokens, which ends for this engine" in caplog.text
    assert engine.scheduler.pages.available == engine.scheduler.pages.count - 1


def test_what_cannot_guess_is_refused(model):
    with pytest.raises(ValueError, match="a draft model guesses tokens for speculation: set speculate"):
        engine_of(model, draft=model)
    other = GPT2LMHeadModel(GPT2Config(vocab_size=160, n_embd=64, n_layer=1, n_head=4, n_positions=256)).eval()
    with pytest.raises(ValueError, match="a draft model needs a decode program"):
        engine_of(model, speculate=2, draft=other)
    short = LlamaForCausalLM(LlamaConfig(vocab_size=160, hidden_size=32, intermediate_size=64, max_position_embeddings=64))
    with pytest.raises(ValueError, match="the draft model has 64 positions, sequences have up to 256: .* max_length=64"):
        Engine(model, speculate=2, draft=short, cache_bytes=1 << 24)


def test_guesses_of_a_draft_model_are_verified_if_they_pay():
    """Guesses are verified only if they save more than the draft model's steps cost; all sequences share that cost. A low share
    of right guesses is forgotten with time, so that guessing is tried again."""
    assert draft_step_cost(1, 100) == 5 and draft_step_cost(100, 10) == 50
    speculation = Speculation(7, object(), 5.0)

    def rows(*shares):
        sequences = [running(share) for share in shares]
        for sequence, share in zip(sequences, shares, strict=True):
            sequence.share, sequence.sampled = share, [None]
        return [*speculation.plan(sequences).values()]

    assert rows(0.95) == [7] and rows(0.1) == rows(0.3) == []
    assert 1 <= rows(0.7)[0] <= 5, "a step of the draft model must pay too"
    assert rows(0.95, 0.95, 0.05)[:2] == [7, 7]
    sequence = running(0.5)
    sequence.share = 0.0
    for _ in range(300):
        speculation.follow(sequence)
    assert sequence.share > 0.4
    speculation.count([sequence], [4], [4])
    assert sequence.share > 0.6
    speculation.count([sequence], [4], [0])
    assert sequence.share < 0.65
