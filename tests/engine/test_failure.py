"""One text that fails, while others go on to the bit; rounds that fail as a whole; a GPU that computes nothing any more."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from lowbit.engine import Engine, FinishReason, Request, Sampling, StepFailed
from lowbit.engine.failure import log_failure, logger
from tests.tiny import eager_llama

VOCAB = 160


@pytest.fixture(scope="module")
def model():
    return eager_llama()


def engine_of(model, **options):
    return Engine(
        model, **{"max_concurrent": 4, "chunk_tokens": 128, "cache_bytes": 1 << 24, "batch_invariant": True} | options
    )


def prompt(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


def bits(request):
    return [(drawn.token, drawn.logprob) for drawn in request.sampled]


def others(count=3):
    return [Request(prompt(20 + 30 * i, i), 12, Sampling(0.9 * (i % 2), seed=i)) for i in range(count)]


def alone(model, requests):
    """What they draw where nothing fails."""
    return [bits(engine_of(model).generate([Request(r.prompt, r.limit, r.sampling)])[0]) for r in requests]


def run(engine, requests):
    for _ in range(200):
        if all(request.finish_reason is not None for request in requests):
            break
        engine.step()
    engine.step()
    assert not engine.scheduler.running and not engine.scheduler.waiting
    assert engine.scheduler.pages.available == engine.scheduler.pages.count - 1


def test_a_watch_that_raises(model):
    """Its text ends, and whoever does the round goes on."""

    def watch(token):
        raise KeyError("not today")

    engine, well = engine_of(model), others()
    bad = Request(prompt(9), 10, on_token=watch)
    for request in (well[0], bad, *well[1:]):
        engine.submit(request)
    run(engine, [*well, bad])
    assert bad.finish_reason is FinishReason.FAILED and len(bad.sampled) == 1 and bad.error == "KeyError: 'not today'"
    assert [bits(r) for r in well] == alone(model, well)
    with pytest.raises(RuntimeError, match="this request failed after 1 tokens: KeyError: 'not today'"):
        list(engine.stream(bad))
    worse = Request(prompt(9), 10, on_token=watch)
    with pytest.raises(RuntimeError, match="this request failed after 1 tokens: KeyError: 'not today'"):
        engine.generate([*(more := others()), worse])
    assert [bits(r) for r in more] == alone(model, more), "once all have ended"


def test_a_watch_that_is_interrupted(model):
    def watch(token):
        raise KeyboardInterrupt

    engine = engine_of(model)
    bad = engine.submit(Request(prompt(9), 10, on_token=watch))
    with pytest.raises(KeyboardInterrupt):
        run(engine, [bad])
    assert bad.finish_reason is FinishReason.FAILED and bad.error == "KeyboardInterrupt"


def failing_prompts(engine, monkeypatch, *bad):
    """Pieces of these requests cannot be computed, nor any that are computed with one of them."""
    inner, seen = engine.program.prompt, []

    def prompt_(chunks, slots):
        seen.append([chunk.request for chunk in chunks])
        if any(chunk.request in bad for chunk in chunks):
            raise ValueError("this prompt is not for me")
        return inner(chunks, slots)

    monkeypatch.setattr(engine.program, "prompt", prompt_)
    return seen


def test_a_prompt_that_raises(model, monkeypatch):
    """Others that began with it, steps of the same round, and those who come later keep their bits."""
    engine = engine_of(model, max_concurrent=5)
    first, *well = others(4)
    bad = Request(prompt(40, 7), 10)
    seen = failing_prompts(engine, monkeypatch, bad)
    engine.submit(first)
    for _ in range(3):
        engine.step()
    for request in (well[0], bad, *well[1:]):
        engine.submit(request)
    run(engine, [first, *well, bad])
    assert any(len(chunks) > 1 and bad in chunks for chunks in seen), "they were to be computed together"
    assert bad.finish_reason is FinishReason.FAILED and bad.error == "ValueError: this prompt is not for me" and not bad.sampled
    assert [bits(r) for r in (first, *well)] == alone(model, [first, *well])


@pytest.mark.parametrize(("length", "together"), [(130, 4), (200, 1)])
def test_a_prompt_whose_pages_others_were_to_share(model, monkeypatch, length, together):
    """They compute them themselves, also those for whose prompt the round has no room."""
    engine = engine_of(model, chunk_tokens=256, batch_invariant=False)
    common = prompt(length)
    bad, *well = Request([*common, 3], 5), *(Request([*common, 4 + i], 8) for i in range(3))
    seen = failing_prompts(engine, monkeypatch, bad)
    for request in (bad, *well):
        engine.submit(request)
    engine.step()
    assert len(seen[0]) == together and not engine.scheduler.running and list(engine.scheduler.waiting) == well
    run(engine, [bad, *well])
    assert bad.finish_reason is FinishReason.FAILED and {r.finish_reason for r in well} == {FinishReason.LENGTH}
    assert [r.cached_tokens for r in well] == [0, 128, 128]
    for request in well:
        (expected,) = engine_of(model, prefix_caching=False).generate([Request(request.prompt, request.limit)])
        assert [d.token for d in request.sampled] == [d.token for d in expected.sampled]


def test_a_prompt_that_raises_in_a_model_that_no_program_knows(monkeypatch):
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=256, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).eval()
    engine, well = engine_of(model), others()
    bad = Request(prompt(40, 7), 10)
    failing_prompts(engine, monkeypatch, bad)
    for request in (well[0], bad, *well[1:]):
        engine.submit(request)
    run(engine, [*well, bad])
    assert bad.finish_reason is FinishReason.FAILED and [bits(r) for r in well] == alone(model, well)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("when", [0, 4])
def test_logits_that_are_no_numbers(model, monkeypatch, caplog, value, when):
    """In the prompt or in a step: the text ends, nobody shares its pages, and nobody else notices."""
    engine, well = engine_of(model), others()
    bad = Request(prompt(140, 7), 10)
    step, prompt_ = engine.program.step, engine.program.prompt

    def spoilt(logits, requests):
        for row, request in enumerate(requests):
            if request is bad and request.launched > when:
                logits[row, 5] = value
        return logits

    def steps(rows, slots, longest):
        of = {request.slot: request for request in engine.scheduler.running}
        return spoilt(step(rows, slots, longest), [of[row] for row in rows.tolist()])

    def prompts(chunks, slots):
        logits = prompt_(chunks, slots)
        return None if logits is None else spoilt(logits, [chunk.request for chunk in chunks if chunk.last])

    monkeypatch.setattr(engine.program, "step", steps)
    monkeypatch.setattr(engine.program, "prompt", prompts)
    for request in (well[0], bad, *well[1:]):
        engine.submit(request)
    run(engine, [*well, bad])
    assert (
        bad.finish_reason is FinishReason.FAILED
        and bad.error == "the model's logits are NaN or infinite"
        and len(bad.sampled) == when
    )
    assert [bits(r) for r in well] == alone(model, well)
    assert "a request failed: the model's logits are NaN or infinite" in caplog.text
    (again,) = engine.generate([Request(bad.prompt, 3)])
    assert again.cached_tokens == 0


def fail(*args):
    raise RuntimeError("out of\nmemory")


def test_a_round_that_fails_is_the_affair_of_its_requests_alone(model, monkeypatch):
    """Who waits for another text, in the queue, gets it; who does rounds is told."""
    engine = engine_of(model, max_concurrent=1)
    running = engine.submit(Request(prompt(9), 10))
    engine.step()
    step = engine.program.step

    def once(*args):
        monkeypatch.setattr(engine.program, "step", step)
        fail()

    monkeypatch.setattr(engine.program, "step", once)
    (other,) = engine.generate(others(1))
    assert running.finish_reason is FinishReason.FAILED and running.error == "RuntimeError: out of memory"
    assert bits(other) == alone(model, [other])[0]
    engine.submit(Request(prompt(9), 10))
    monkeypatch.setattr(engine.program, "step", fail)
    with pytest.raises(StepFailed, match="a step of 1 request failed: RuntimeError: out of memory"):
        for _ in range(3):
            engine.step()


def test_a_round_that_fails_after_a_prompt_of_it_did(model, monkeypatch):
    engine, well = engine_of(model), others(2)
    bad = Request(prompt(40, 7), 10)
    failing_prompts(engine, monkeypatch, bad)
    for request in (bad, *well):
        engine.submit(request)
    with monkeypatch.context() as patch:
        patch.setattr("lowbit.engine.engine.sample_tokens", fail)
        with pytest.raises(StepFailed, match="a step of 2 requests failed: RuntimeError: out of memory"):
            engine.step()
    assert {r.finish_reason for r in (bad, *well)} == {
        FinishReason.FAILED
    } and bad.error == "ValueError: this prompt is not for me"
    run(engine, [])
    assert [bits(r) for r in engine.generate(others(2))] == alone(model, others(2))


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 5),  # rounds before it comes
        st.integers(1, 200),  # tokens of the prompt, of two texts only, so that many share pages
        st.integers(0, 1),
        st.integers(1, 12),  # limit
        st.sampled_from(["well", "well", "prompt", "watch", "logits", "cancelled"]),
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=60)
@given(ARRIVALS, st.integers(1, 4), st.booleans(), st.booleans(), st.sampled_from([128, 256]))
def test_any_order_of_failures(model, arrivals, slots, ahead, invariant, chunk):
    """Whoever does not fail has the text that it has alone."""
    engine = engine_of(
        model, max_concurrent=slots, async_scheduling=ahead, batch_invariant=invariant, chunk_tokens=chunk, cache_bytes=1 << 20
    )
    step, prompt_, how = engine.program.step, engine.program.prompt, {}

    def watch(token):
        raise ValueError("not today")

    def spoilt(logits, requests):
        for row, request in enumerate(requests):
            if how[request] == "logits" and request.launched > 1:
                logits[row, 5] = math.nan
        return logits

    def steps(rows, slots, longest):
        of = {request.slot: request for request in engine.scheduler.running}
        return spoilt(step(rows, slots, longest), [of[row] for row in rows.tolist()])

    def prompts(chunks, slots):
        if any(how[chunk.request] == "prompt" and chunk.end > 60 for chunk in chunks):
            raise ValueError("this prompt is not for me")
        logits = prompt_(chunks, slots)
        return None if logits is None else spoilt(logits, [chunk.request for chunk in chunks if chunk.last])

    engine.program.step, engine.program.prompt = steps, prompts
    requests = []
    for now in range(7):
        for wait, length, seed, limit, kind in arrivals:
            if wait == now:
                requests.append(Request(prompt(length, seed), limit, on_token=watch if kind == "watch" else None))
                how[requests[-1]] = kind
                engine.submit(requests[-1])
        engine.step()
        for request in requests:
            if how[request] == "cancelled":
                engine.cancel(request)
    run(engine, requests)
    fresh = engine_of(model, max_concurrent=1, prefix_caching=False, batch_invariant=invariant)
    for request in requests:
        (expected,) = fresh.generate([Request(request.prompt, request.limit)])
        drawn = [d.token for d in request.sampled]
        assert drawn == [d.token for d in expected.sampled][: len(drawn)]
        assert (request.finish_reason is FinishReason.LENGTH) == (len(drawn) == request.limit and how[request] != "watch"), (
            request,
            how[request],
        )


def test_a_gpu_that_computes_nothing_any_more(model, monkeypatch):
    """All texts end, those that wait too, and what is submitted later is told why."""
    engine = engine_of(model, max_concurrent=1)
    running, waiting = (engine.submit(Request(prompt(9, i), 10)) for i in range(2))
    engine.step()

    def dead(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine.program, "step", fail)
    monkeypatch.setattr("lowbit.engine.engine._wait_for", dead)
    with pytest.raises(StepFailed, match="out of memory"):
        engine.step()
    assert running.finish_reason is waiting.finish_reason is FinishReason.FAILED and "illegal memory" in waiting.error
    engine.step()
    assert not engine.scheduler.running and not engine.scheduler.waiting
    with pytest.raises(RuntimeError, match="the GPU of this engine failed, start another process: RuntimeError: CUDA error"):
        engine.submit(Request(prompt(9), 10))


def test_an_error_is_logged_with_its_lines(caplog):
    try:
        fail()
    except RuntimeError as error:
        assert log_failure("a computation", error) == "RuntimeError: out of memory"
    assert "a computation failed" in caplog.text and "in fail" in caplog.text


def test_an_error_that_was_noted_holds_no_memory(monkeypatch):
    class Large:
        pass

    def compute():
        large = Large()
        seen.append(weakref.ref(large))
        raise ValueError("too large")

    monkeypatch.setattr(logger, "disabled", True)  # pytest keeps what is logged
    seen = []
    line = ""
    try:
        compute()
    except ValueError as error:
        line = log_failure("a computation", error)
    assert line and seen[0]() is None
