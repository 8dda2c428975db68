"""Errors of one sequence, of a whole step, and of the GPU. An error of one sequence leaves the bits of the others unchanged."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from lowbit.engine import Engine, EngineFailed, FinishReason, Request, Sampling, StepFailed
from lowbit.engine.failure import StuckStep, log_failure, logger
from lowbit.engine.model_runner import InFlightStep
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


def bits(sequence):
    return [(sampled.token, sampled.logprob) for sampled in sequence.sampled]


def others(count=3):
    return [Request(prompt(20 + 30 * i, i), 12, Sampling(0.9 * (i % 2), seed=i)) for i in range(count)]


def alone(model, requests):
    """The tokens of requests when nothing fails."""
    return [bits(engine_of(model).generate([Request(r.prompt, r.limit, r.sampling)])[0]) for r in requests]


def submitted(engine, *requests):
    return [engine.submit(request) for request in requests]


def run(engine, sequences):
    for _ in range(200):
        if all(sequence.finish_reason is not None for sequence in sequences):
            break
        engine.step()
    engine.step()
    assert not engine.scheduler.running and not engine.scheduler.waiting
    assert engine.scheduler.pages.available == engine.scheduler.pages.count - 1


def test_an_on_token_that_raises(model, monkeypatch):
    """If on_token raises, its sequence fails, and the thread that runs the step continues."""

    def on_token(token):
        raise KeyError("not today")

    engine, asked = engine_of(model), others()
    first, bad, *more = submitted(engine, asked[0], Request(prompt(9), 10, on_token=on_token), *asked[1:])
    run(engine, [first, bad, *more])
    assert bad.finish_reason is FinishReason.FAILED and len(bad.sampled) == 1 and bad.error == "KeyError: 'not today'"
    assert [bits(r) for r in (first, *more)] == alone(model, asked)
    with pytest.raises(RuntimeError, match="this request failed after 1 tokens: KeyError: 'not today'"):
        list(engine.stream(bad))
    made, submit = [], engine.submit
    monkeypatch.setattr(engine, "submit", lambda request: (made.append(submit(request)), made[-1])[1])
    with pytest.raises(RuntimeError, match="this request failed after 1 tokens: KeyError: 'not today'"):
        engine.generate([*others(), Request(prompt(9), 10, on_token=on_token)])
    assert [bits(r) for r in made[:-1]] == alone(model, asked), "the error came before all sequences had finished"


def test_an_on_token_that_is_interrupted(model):
    def on_token(token):
        raise KeyboardInterrupt

    engine = engine_of(model)
    bad = engine.submit(Request(prompt(9), 10, on_token=on_token))
    with pytest.raises(KeyboardInterrupt):
        run(engine, [bad])
    assert bad.finish_reason is FinishReason.FAILED and bad.error == "KeyboardInterrupt"


def failing_prompts(engine, monkeypatch, *bad):
    """Makes prefill fail for the prompts `bad`, and for every batch that has one of them. Returns a list to which the prompts
    of each batch are added."""
    seen = []

    def failing(inner):
        def computed(chunks, *others):
            seen.append([chunk.sequence.request.prompt for chunk in chunks])
            if any(prompt in bad for prompt in seen[-1]):
                raise ValueError("this prompt is not for me")
            return inner(chunks, *others)

        return computed

    # prompts are computed apart from a decode step by the first, together with it by the second
    for name in ("prompt", "mixed_prompt"):
        monkeypatch.setattr(engine.program, name, failing(getattr(engine.program, name)))
    return seen


def test_a_prompt_that_raises(model, monkeypatch):
    """A prompt raises. Other sequences keep their bits: those with the same prefix, those of the same step, and later ones."""
    engine = engine_of(model, max_concurrent=5)
    asked = others(4)
    seen = failing_prompts(engine, monkeypatch, prompt(40, 7))
    first = engine.submit(asked[0])
    for _ in range(3):
        engine.step()
    second, bad, *more = submitted(engine, asked[1], Request(prompt(40, 7), 10), *asked[2:])
    run(engine, [first, second, bad, *more])
    assert any(len(prompts) > 1 and prompt(40, 7) in prompts for prompts in seen), "they were to be computed together"
    assert bad.finish_reason is FinishReason.FAILED and bad.error == "ValueError: this prompt is not for me" and not bad.sampled
    assert [bits(r) for r in (first, second, *more)] == alone(model, asked)


@pytest.mark.parametrize(("length", "together"), [(130, 4), (200, 1)])
def test_a_failed_prompt_whose_pages_others_were_to_reuse(model, monkeypatch, length, together):
    """The other sequences compute the pages themselves, including those whose prompts did not fit into the failed step."""
    engine = engine_of(model, chunk_tokens=256, batch_invariant=False)
    common = prompt(length)
    seen = failing_prompts(engine, monkeypatch, [*common, 3])
    bad, *well = submitted(engine, Request([*common, 3], 5), *(Request([*common, 4 + i], 8) for i in range(3)))
    engine.step()
    assert len(seen[0]) == together and not engine.scheduler.running and list(engine.scheduler.waiting) == well
    run(engine, [bad, *well])
    assert bad.finish_reason is FinishReason.FAILED and {r.finish_reason for r in well} == {FinishReason.LENGTH}
    assert [r.cached_tokens for r in well] == [0, 128, 128]
    for sequence in well:
        (expected,) = engine_of(model, prefix_caching=False).generate(
            [Request(sequence.request.prompt, sequence.request.limit)]
        )
        assert [d.token for d in sequence.sampled] == [d.token for d in expected.sampled]


def test_a_prompt_that_raises_without_a_decode_program(monkeypatch):
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=256, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).eval()
    engine, asked = engine_of(model), others()
    failing_prompts(engine, monkeypatch, prompt(40, 7))
    first, bad, *more = submitted(engine, asked[0], Request(prompt(40, 7), 10), *asked[1:])
    run(engine, [first, bad, *more])
    assert bad.finish_reason is FinishReason.FAILED and [bits(r) for r in (first, *more)] == alone(model, asked)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("when", [0, 4])
def test_nan_and_infinite_logits(model, monkeypatch, caplog, value, when):
    """Logits become NaN or infinite after the prompt or a decode step. The sequence fails, its pages are not reused, and other
    sequences are unchanged."""
    engine, asked = engine_of(model), others()
    step, prompt_, mixed = engine.program.step, engine.program.prompt, engine.program.mixed_prompt

    def spoilt(logits, sequences):
        for row, sequence in enumerate(sequences):
            if sequence.request.limit == 10 and sequence.launched_tokens > when:  # only `bad` has this limit
                logits[row, 5] = value
        return logits

    def steps(rows, slots, longest):
        of = {sequence.slot: sequence for sequence in engine.scheduler.running}
        return spoilt(step(rows, slots, longest), [of[row] for row in rows.tolist()])

    def prompts(chunks, slots):
        logits = prompt_(chunks, slots)
        return None if logits is None else spoilt(logits, [chunk.sequence for chunk in chunks if chunk.last])

    def both(chunks, rows, *options):
        of = {sequence.slot: sequence for sequence in engine.scheduler.running}
        decoded, prompted = mixed(chunks, rows, *options)
        last = [chunk.sequence for chunk in chunks if chunk.last]
        return spoilt(decoded, [of[row] for row in rows.tolist()]), None if prompted is None else spoilt(prompted, last)

    monkeypatch.setattr(engine.program, "step", steps)
    monkeypatch.setattr(engine.program, "prompt", prompts)
    monkeypatch.setattr(engine.program, "mixed_prompt", both)
    first, bad, *more = submitted(engine, asked[0], Request(prompt(140, 7), 10), *asked[1:])
    run(engine, [first, bad, *more])
    assert (
        bad.finish_reason is FinishReason.FAILED
        and bad.error == "the model's logits are NaN or infinite"
        and len(bad.sampled) == when
    )
    assert [bits(r) for r in (first, *more)] == alone(model, asked)
    assert "a request failed: the model's logits are NaN or infinite" in caplog.text
    (again,) = engine.generate([Request(bad.request.prompt, 3)])
    assert again.cached_tokens == 0


def fail(*args):
    raise RuntimeError("out of\nmemory")


def test_a_failed_step_fails_only_its_own_sequences(model, monkeypatch):
    """A queued request is still generated after a failed step. The thread that runs the step gets StepFailed."""
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
    assert bits(other) == alone(model, others(1))[0]
    engine.submit(Request(prompt(9), 10))
    monkeypatch.setattr(engine.program, "step", fail)
    with pytest.raises(StepFailed, match="a step of 1 request failed: RuntimeError: out of memory"):
        for _ in range(3):
            engine.step()


def test_a_step_that_fails_after_one_of_its_prompts(model, monkeypatch):
    engine = engine_of(model)
    failing_prompts(engine, monkeypatch, prompt(40, 7))
    bad, *well = submitted(engine, Request(prompt(40, 7), 10), *others(2))
    with monkeypatch.context() as patch:
        patch.setattr("lowbit.engine.model_runner.sample_tokens", fail)
        with pytest.raises(StepFailed, match="a step of 2 requests failed: RuntimeError: out of memory"):
            engine.step()
    assert {r.finish_reason for r in (bad, *well)} == {
        FinishReason.FAILED
    } and bad.error == "ValueError: this prompt is not for me"
    run(engine, [])
    assert [bits(r) for r in engine.generate(others(2))] == alone(model, others(2))


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 5),  # steps before it is submitted
        st.integers(1, 200),  # tokens of the prompt; there are only two prompts, so that many requests share pages
        st.integers(0, 1),
        st.integers(1, 12),  # limit
        st.sampled_from(["well", "well", "prompt", "on_token", "logits", "cancelled"]),
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=60)
@given(ARRIVALS, st.integers(1, 4), st.booleans(), st.booleans(), st.sampled_from([128, 256]))
def test_any_order_of_failures(model, arrivals, slots, ahead, invariant, chunk):
    """Every sequence that does not fail has the tokens that it has alone."""
    engine = engine_of(
        model, max_concurrent=slots, async_scheduling=ahead, batch_invariant=invariant, chunk_tokens=chunk, cache_bytes=1 << 20
    )
    step, prompt_, mixed, how = engine.program.step, engine.program.prompt, engine.program.mixed_prompt, {}

    def on_token(token):
        raise ValueError("not today")

    def spoilt(logits, sequences):
        for row, sequence in enumerate(sequences):
            if how[sequence.request] == "logits" and sequence.launched_tokens > 1:
                logits[row, 5] = math.nan
        return logits

    def steps(rows, slots, longest):
        of = {sequence.slot: sequence for sequence in engine.scheduler.running}
        return spoilt(step(rows, slots, longest), [of[row] for row in rows.tolist()])

    def prompts(chunks, slots):
        if any(how[chunk.sequence.request] == "prompt" and chunk.end > 60 for chunk in chunks):
            raise ValueError("this prompt is not for me")
        logits = prompt_(chunks, slots)
        return None if logits is None else spoilt(logits, [chunk.sequence for chunk in chunks if chunk.last])

    def both(chunks, rows, *options):
        if any(how[chunk.sequence.request] == "prompt" and chunk.end > 60 for chunk in chunks):
            raise ValueError("this prompt is not for me")
        of = {sequence.slot: sequence for sequence in engine.scheduler.running}
        decoded, prompted = mixed(chunks, rows, *options)
        last = [chunk.sequence for chunk in chunks if chunk.last]
        return spoilt(decoded, [of[row] for row in rows.tolist()]), None if prompted is None else spoilt(prompted, last)

    engine.program.step, engine.program.prompt, engine.program.mixed_prompt = steps, prompts, both
    sequences = []
    for now in range(7):
        for wait, length, seed, limit, kind in arrivals:
            if wait == now:
                request = Request(prompt(length, seed), limit, on_token=on_token if kind == "on_token" else None)
                sequences.append(engine.submit(request))
                how[sequences[-1].request] = kind
        engine.step()
        for sequence in sequences:
            if how[sequence.request] == "cancelled":
                engine.cancel(sequence)
    run(engine, sequences)
    fresh = engine_of(model, max_concurrent=1, prefix_caching=False, batch_invariant=invariant)
    for sequence in sequences:
        (expected,) = fresh.generate([Request(sequence.request.prompt, sequence.request.limit)])
        sampled = [d.token for d in sequence.sampled]
        assert sampled == [d.token for d in expected.sampled][: len(sampled)]
        whole = len(sampled) == sequence.request.limit and how[sequence.request] != "on_token"
        assert (sequence.finish_reason is FinishReason.LENGTH) == whole, (sequence, how[sequence.request])


def test_a_cuda_error_fails_everything(model, monkeypatch):
    """After a CUDA error all sequences fail, also those in the queue. From then on `submit` raises EngineFailed."""
    engine = engine_of(model, max_concurrent=1)
    running, waiting = (engine.submit(Request(prompt(9, i), 10)) for i in range(2))
    engine.step()

    def dead(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine.program, "step", fail)
    monkeypatch.setattr("lowbit.engine.engine._synchronize", dead)
    with pytest.raises(StepFailed, match="out of memory"):
        engine.step()
    assert running.finish_reason is waiting.finish_reason is FinishReason.FAILED and "illegal memory" in waiting.error
    engine.step()
    assert not engine.scheduler.running and not engine.scheduler.waiting
    with pytest.raises(EngineFailed, match="the GPU of this engine failed, start another process: RuntimeError: CUDA error"):
        engine.submit(Request(prompt(9), 10))


def test_a_stuck_step_fails_everything(model, monkeypatch):
    """A step gives up and leaves its memory in an unknown state, which later launches would read. So all sequences fail, also
    those in the queue."""
    engine = engine_of(model, max_concurrent=1)
    running, waiting = (engine.submit(Request(prompt(9, i), 10)) for i in range(2))
    engine.step()

    def stuck(step):
        raise StuckStep("stopped in layer 3")

    monkeypatch.setattr(InFlightStep, "wait", stuck)
    with pytest.raises(StepFailed, match="a step failed, and with it this engine: StuckStep: stopped in layer 3"):
        for _ in range(3):
            engine.step()
    assert running.finish_reason is waiting.finish_reason is FinishReason.FAILED
    engine.step()
    assert not engine.scheduler.running and not engine.scheduler.waiting
    with pytest.raises(EngineFailed, match="layer 3"):
        engine.submit(Request(prompt(9), 10))


def test_an_error_is_logged_with_its_traceback(caplog):
    try:
        fail()
    except RuntimeError as error:
        assert log_failure("a computation", error) == "RuntimeError: out of memory"
    assert "a computation failed" in caplog.text and "in fail" in caplog.text


def test_a_logged_error_holds_no_memory(monkeypatch):
    class Large:
        pass

    def compute():
        large = Large()
        seen.append(weakref.ref(large))
        raise ValueError("too large")

    monkeypatch.setattr(logger, "disabled", True)  # pytest keeps logged errors alive, and with them their memory
    seen = []
    line = ""
    try:
        compute()
    except ValueError as error:
        line = log_failure("a computation", error)
    assert line and seen[0]() is None
