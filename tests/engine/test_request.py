"""Every field of a request and of its sampling settings is checked when it is created: no wrong type reaches a step."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lowbit import engine
from lowbit.engine import Request, Sampling
from lowbit.pipeline.params import GenerateParams
from tests.tiny import eager_llama

NAN, INF = float("nan"), float("inf")
REQUESTS = [
    ({"prompt": "text"}, "a prompt is a list of token numbers, got a str: encode text first"),
    ({"prompt": b"12"}, "a prompt is a list of token numbers, got a bytes"),
    ({"prompt": 3}, "a prompt is a list of token numbers, got a int"),
    ({"prompt": {1}}, "a prompt is a list of token numbers, got a set"),
    ({"prompt": [1, 2.0]}, "a prompt has token numbers, got 2.0"),
    ({"prompt": [1, None]}, "a prompt has token numbers, got None"),
    ({"prompt": [True]}, "a prompt has token numbers, got True"),
    ({"prompt": []}, "a prompt has at least one token"),
    ({"limit": 2.5}, "the limit of a request is a whole number of tokens, got 2.5"),
    ({"limit": 2.0}, "the limit of a request is a whole number of tokens, got 2.0"),
    ({"limit": NAN}, "the limit of a request is a whole number of tokens, got nan"),
    ({"limit": INF}, "the limit of a request is a whole number of tokens, got inf"),
    ({"limit": "3"}, "the limit of a request is a whole number of tokens, got '3'"),
    ({"limit": None}, "the limit of a request is a whole number of tokens, got None"),
    ({"limit": True}, "the limit of a request is a whole number of tokens, got True"),
    ({"sampling": None}, "sampling is a lowbit.engine.Sampling, got None"),
    ({"stop_token_ids": 2}, "stop_token_ids is a frozenset of token numbers, got 2"),
    ({"stop_token_ids": "2"}, "stop_token_ids is a frozenset of token numbers, got '2'"),
    ({"stop_token_ids": frozenset({"2"})}, "stop_token_ids has token numbers, got '2'"),
    ({"on_token": 3}, "on_token is a function of each token, got 3"),
    ({"top_logprobs": 2.5}, "up to 20, got 2.5"),
    ({"top_logprobs": None}, "up to 20, got None"),
    ({"top_logprobs": -1}, "up to 20, got -1"),
]


@pytest.mark.parametrize(("fields", "message"), REQUESTS, ids=lambda value: str(value)[:40])
def test_requests(fields, message):
    with pytest.raises(ValueError, match=message):
        Request(**{"prompt": [1], "limit": 2, **fields})


def test_the_engines_fields_are_no_arguments():
    with pytest.raises(TypeError, match="end"):
        Request([1], 2, end="stop")


NUMBERS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "min_new_tokens",
)  # fmt: skip


@pytest.mark.parametrize("value", [NAN, INF, -INF, "1", None, True, [1], 1j, -(10**400)], ids=lambda value: repr(value)[:9])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_sampling(name, value):
    with pytest.raises(ValueError, match=f"sampling: {name} is "):
        Sampling(**{name: value})


@pytest.mark.parametrize("name", ["top_k", "seed", "min_new_tokens"])
def test_whole_numbers_of_sampling(name):
    with pytest.raises(ValueError, match=f"sampling: {name} is .*, got 2.5"):
        Sampling(**{name: 2.5})


BIASES = (None, 3, "x", {"1": 1.0}, {1.5: 1.0}, {1: "x"}, {1: NAN}, {-1: 1.0}, [(1,)], [1], [(1, 2, 3)], {True: 1.0})


@pytest.mark.parametrize("bias", BIASES, ids=repr)
def test_biases(bias):
    with pytest.raises(ValueError, match="sampling: logit_bias is token numbers from 0 on with finite numbers, got "):
        Sampling(logit_bias=bias)


def test_numbers_of_numpy_are_numbers():
    sampling = Sampling(temperature=np.float32(0.5), top_k=np.int64(3), logit_bias={np.int64(1): np.float32(2)})
    assert Request([np.int64(1), 2], np.int32(3), sampling, stop_token_ids=frozenset({np.int64(0)})).limit == 3


PARAMS = [
    *({name: value} for name in ("top_p", "temperature") for value in (NAN, INF, "1", True, [1])),
    *({name: value} for name in ("max_length", "max_new_tokens", "min_new_tokens", "top_k", "seed")
      for value in (2.5, NAN, INF, "1", True, 10**30)),
    *({name: "no"} for name in ("ignore_eos", "return_full_text", "do_sample")),
    {"top_p": None}, {"stop": 5}, {"stop": None}, {"stop": "x"}, {"stop": [b"x"]}, {"stop": {"x"}},
]  # fmt: skip


@pytest.mark.parametrize("fields", PARAMS, ids=str)
def test_arguments_of_pipelines(fields):
    (name,) = fields
    with pytest.raises(ValueError, match=f"^{name} is "):
        GenerateParams(**fields)


def test_a_request_is_immutable():
    request = Request([1], 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.limit = 3
    assert dataclasses.replace(request, limit=3).limit == 3 and request.limit == 2


@pytest.fixture(scope="module")
def tiny_engine():
    return engine.Engine(eager_llama(), max_concurrent=2, chunk_tokens=128, cache_bytes=1 << 20, max_length=64)


def test_the_state_of_a_request_by_its_names_until_2026_11(tiny_engine):
    """Until 2026-11 a request had the state that its sequence has now. The old attributes still work."""
    request, other = Request([5, 6], 3, top_logprobs=1), Request([5], 9)
    with pytest.warns(DeprecationWarning, match="Request.sampled is now Sequence.sampled, of the sequence that Engine.submit"):
        assert request.sampled == []
    tiny_engine.generate([request])  # the returned sequence is not kept here; the request keeps its state alive
    for name in ("sampled", "drawn"):
        with pytest.warns(DeprecationWarning, match=f"Request.{name} is now Sequence.sampled"):
            assert len(getattr(request, name)) == 3
    for name in ("finish_reason", "end"):
        with pytest.warns(DeprecationWarning, match=f"Request.{name} is now Sequence.finish_reason"):
            assert getattr(request, name) is engine.FinishReason.LENGTH
    with pytest.warns(DeprecationWarning, match="Request.shared is now Sequence.cached_tokens"):
        assert request.shared == 0
    with pytest.warns(DeprecationWarning, match="Request.tokens is now"):
        assert request.tokens[:2] == [5, 6] and len(request.tokens) == 5
    with pytest.warns(DeprecationWarning, match="Request.check is now"):
        request.check()
    tiny_engine.submit(other)
    with pytest.warns(DeprecationWarning, match="The argument of Engine.stream and Engine.cancel is now the sequence"):
        tiny_engine.cancel(other)
    with pytest.warns(DeprecationWarning, match="Request.end is now"):
        assert other.end is engine.FinishReason.CANCELLED
    with pytest.warns(DeprecationWarning, match="The argument of"), pytest.raises(ValueError, match="was not submitted: "):
        tiny_engine.stream(Request([1], 2))


def test_a_sequence_by_the_names_of_its_request(tiny_engine):
    """`submit` and `generate` used to return the request itself, so a sequence has its attributes."""
    (sequence,) = tiny_engine.generate([Request([5, 6], 3)])
    for name, value in (("prompt", [5, 6]), ("limit", 3), ("top_logprobs", 0), ("stop_token_ids", frozenset())):
        with pytest.warns(DeprecationWarning, match=f"Sequence.{name} is now Sequence.request.{name}"):
            assert getattr(sequence, name) == value


def test_names_until_2026_11():
    """Renamed arguments, attributes and classes still work, with a warning."""
    with pytest.warns(DeprecationWarning, match="Request.ends is now Request.stop_token_ids"):
        request = Request([1], 2, ends=frozenset({3}))
    assert request.stop_token_ids == frozenset({3})
    with pytest.warns(DeprecationWarning, match="Request.ends is now Request.stop_token_ids"):
        assert request.ends is request.stop_token_ids
    with pytest.warns(DeprecationWarning, match="Request.watch is now Request.on_token"):
        assert Request([1], 2, watch=print).on_token is print
    with pytest.warns(DeprecationWarning, match="SampledToken.likeliest is now"):
        assert engine.SampledToken(7, -1.0, ((7, -1.0),)).likeliest == ((7, -1.0),)
    with pytest.warns(DeprecationWarning, match="lowbit.engine.TextFailed is now lowbit.engine.RequestFailed"):
        assert engine.TextFailed is engine.RequestFailed
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = engine.Nothing
