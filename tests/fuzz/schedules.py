"""Schedules of an engine on a CPU: submissions, cancellations, streams and steps in any order.

In any order, every request finishes. Tokens that were not cancelled equal those of the request computed alone. At the end no
slot or page is in use.
"""

from __future__ import annotations

import functools

from hypothesis import strategies as st

from lowbit.engine import Engine, FinishReason, Request, Sampling, Sequence
from tests.tiny import eager_llama

VOCAB = 160
MOST_STEPS = 2000
"""A schedule with more steps counts as a hang."""

OPTIONS = st.fixed_dictionaries({
    "max_concurrent": st.integers(1, 4), "chunk_tokens": st.sampled_from((128, 256)),
    "prefix_caching": st.booleans(), "async_scheduling": st.booleans(),
    "cache_bytes": st.sampled_from((1 << 18, 1 << 19, 1 << 20)), "forward": st.just(False),
})  # fmt: skip
SAMPLINGS = st.one_of(
    st.just(()),
    st.tuples(st.sampled_from((0.5, 1.0, 1000.0)), st.integers(0, 5)),
)
REQUESTS = st.tuples(
    st.just("submit"), st.integers(0, 3), st.sampled_from((1, 2, 63, 64, 65, 127, 128, 129, 200)), st.integers(1, 12),
    SAMPLINGS,
    st.sampled_from(("", "", "", "stop", "raise", "cancel self", "cancel other")),
)  # fmt: skip
"""(first prompt token, prompt length, token limit, sampling settings, action of the on_token callback at the second token)."""
ACTIONS = st.one_of(
    REQUESTS,
    REQUESTS,
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("stream"), st.integers(0, 20), st.integers(0, 3)),
    st.tuples(st.just("resubmit"), st.integers(0, 20)),
    st.tuples(st.just("invalid"), st.sampled_from(((), (VOCAB,), (-1,), (1,) * 4000))),
)
CASES = st.tuples(OPTIONS, st.lists(ACTIONS, max_size=14).map(tuple))


@functools.cache
def _model():
    return eager_llama()


def _request(action, watch=None):
    _, first, length, limit, drawn, _ = action
    prompt = [3 + (first + i * i) % 150 for i in range(length)]
    sampling = Sampling(drawn[0], seed=drawn[1]) if drawn else Sampling()
    return Request(prompt, limit, sampling, on_token=watch)


@functools.lru_cache(maxsize=4096)
def alone(action):
    """The tokens of a request computed alone, without an on_token callback."""
    engine = Engine(_model(), max_concurrent=1, max_length=256, cache_bytes=1 << 20)
    (sequence,) = engine.generate([_request(action)])
    return tuple(each.token for each in sequence.sampled)


def check(case):
    """Runs a schedule to its end."""
    options, actions = case
    engine = Engine(_model(), max_length=256, **options)
    requests: list[Request] = []
    sequences: list[tuple[tuple, Sequence]] = []
    streams = []

    def watch_of(action, index):
        def watch(drawn):
            if len(sequences[index][1].sampled) < 2:
                return False
            if action[5] == "raise":
                raise ValueError("a watch that fails")
            if action[5].startswith("cancel"):
                engine.cancel(sequences[index if action[5] == "cancel self" else 0][1])
            return action[5] == "stop"

        return watch if action[5] else None

    for action in actions:
        match action[0]:
            case "submit":
                requests.append(_request(action, watch_of(action, len(sequences))))
                sequences.append((action, engine.submit(requests[-1])))
            case "step":
                for _ in range(action[1]):
                    engine.step()
            case "cancel" if sequences:
                engine.cancel(sequences[action[1] % len(sequences)][1])
            case "stream" if sequences:
                stream = engine.stream(sequences[action[1] % len(sequences)][1])
                streams.append(stream)
                for _ in range(action[2]):
                    if _next(stream) is None:
                        break
                if action[1] % 2:
                    stream.close()
            case "resubmit" if requests:
                _refused(engine, requests[action[1] % len(requests)])
            case "invalid":
                if action[1]:
                    _refused(engine, Request(list(action[1]), 3))
    for _ in range(MOST_STEPS):
        if all(sequence.finish_reason is not None for _, sequence in sequences):
            break
        engine.step()
    engine.step()
    for stream in streams:
        stream.close()
    engine.step()
    _check_ended(engine, sequences)


def _next(stream):
    try:
        return next(stream, None)
    except RuntimeError:  # the sequence failed
        return None


def _refused(engine, request):
    """Submits a request that the engine must refuse with a one-line ValueError."""
    try:
        engine.submit(request)
    except ValueError as error:
        assert "\n" not in str(error)
        return
    raise AssertionError(f"taken: {request.prompt[:3]}")


def _check_ended(engine, sequences):
    scheduler = engine.scheduler
    assert not scheduler.running and not scheduler.waiting
    assert scheduler.pages.count - 1 == scheduler.pages.available, "pages are held"
    assert len(scheduler._free_slots) == engine.slots.count - 1 or len(scheduler._free_slots) == len(set(scheduler._free_slots))
    for action, sequence in sequences:
        assert sequence.finish_reason is not None, "a request never ends"
        tokens, whole = tuple(each.token for each in sequence.sampled), alone(action)
        assert tokens == whole[: len(tokens)], "the text depends on what is computed beside it"
        if sequence.finish_reason is FinishReason.LENGTH:
            assert len(tokens) == sequence.request.limit
        elif sequence.finish_reason is FinishReason.FAILED:
            assert action[5] == "raise" and "a watch that fails" in sequence.error
        elif sequence.finish_reason is FinishReason.STOP:
            assert action[5] == "stop" and len(tokens) == 2
