"""A failure of one request fails only that request. Answers to others keep every bit, and the server continues."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import socket
import threading
import time

import openai
import pytest

from lowbit.engine import Detokenizer
from lowbit.serve.limits import Limits
from lowbit.serve.responses import CompletionResponses
from lowbit.serve.service import State
from lowbit.serve.worker import MOST_FAILURES, OutputCollector
from tests.serve.running import NAME, PATIENCE, Running, running, tiny_pipeline

ASKED = {"model": NAME, "prompt": "ab", "max_tokens": 12, "temperature": 0}


def ask(server, *bodies):
    """Answers of the official client to several requests at once; errors are returned."""

    async def one(client, body):
        if not body.get("stream"):
            return (await client.completions.create(**body)).choices[0].text
        return "".join([part.choices[0].text async for part in await client.completions.create(**body)])

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
            return await asyncio.gather(*(one(client, body) for body in bodies), return_exceptions=True)

    return asyncio.run(all_of_them())


@pytest.fixture
def failing():
    """A server whose program and detokenizer the tests may break."""
    with running(tiny_pipeline(max_concurrent=8), max_concurrent=8) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_cannot_be_decoded(stream, failing, monkeypatch):
    """The detokenizer raises in the middle of one sequence's text."""
    push = Detokenizer.push

    def broken(self, token):
        if self.stop == ("broken",) and len(self.text) > 3:
            raise ValueError("no such token")
        return push(self, token)

    alone = ask(failing, ASKED)[0]
    monkeypatch.setattr(Detokenizer, "push", broken)
    found = ask(failing, ASKED, {**ASKED, "stop": "broken", "stream": stream}, {**ASKED, "stream": True}, ASKED)
    error = found.pop(1)
    assert found == [alone] * 3
    if stream:  # its status was already sent
        assert isinstance(error, openai.APIError) and "computing this text failed" in str(error)
    else:
        assert isinstance(error, openai.InternalServerError) and error.code == "failed"
    assert failing.service.healthy


def test_a_text_that_cannot_be_finished(failing, monkeypatch):
    """The detokenizer raises after the last token. The error is raised after the engine's step."""
    finish = Detokenizer.finish

    def broken(self):
        if self.stop == ("broken",):
            raise ValueError("no such token")
        return finish(self)

    alone = ask(failing, ASKED)[0]
    monkeypatch.setattr(Detokenizer, "finish", broken)
    found = ask(failing, {**ASKED, "stop": "broken"}, ASKED, {**ASKED, "stream": True})
    assert isinstance(found[0], openai.InternalServerError) and found[1:] == [alone] * 2


def test_a_step_that_fails(failing, monkeypatch):
    """The requests of the step get an error; later ones are answered as before."""
    alone = ask(failing, ASKED)[0]
    program = failing.engine.program
    step, broken = program.step, []

    def breaks(rows, *arguments):
        if len(rows) == 2 and not broken:
            broken.append(rows)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return step(rows, *arguments)

    monkeypatch.setattr(program, "step", breaks)
    long = {**ASKED, "max_tokens": 200, "extra_body": {"ignore_eos": True}}
    errors = ask(failing, long, {**long, "stream": True})
    assert all(isinstance(error, openai.APIError) for error in errors)
    failing.wait_until_free()
    assert ask(failing, ASKED, {**ASKED, "stream": True}) == [alone] * 2
    assert failing.service.healthy
    with failing.client() as client:
        assert 'lowbit_texts_total{end="failed"} 2.0' in client.get("/metrics").text


def test_an_error_without_a_sequence_at_fault(failing, monkeypatch):
    """The scheduler raises while every sequence is queued. All of them fail, since the next step would raise again."""
    alone = ask(failing, ASKED)[0]

    def broken():
        raise RuntimeError("no schedule")

    with monkeypatch.context() as patch:
        patch.setattr(failing.engine.scheduler, "schedule", broken)
        errors = ask(failing, ASKED, {**ASKED, "stream": True})
    assert all(isinstance(error, openai.APIError) for error in errors)
    failing.wait_until_free()
    assert ask(failing, ASKED) == [alone] and failing.service.healthy


def test_a_failed_gpu(failing, monkeypatch):
    """After a failure of the GPU, the engine refuses every request, and /health reports it."""
    with monkeypatch.context() as patch, failing.client() as client:
        patch.setattr(failing.engine, "_gpu_error", "RuntimeError: CUDA error")
        for _ in range(MOST_FAILURES):
            assert client.post("/v1/completions", json=ASKED).status_code == 500
        assert client.get("/health").status_code == 503
        patch.undo()
        assert client.post("/v1/completions", json=ASKED).status_code == client.get("/health").status_code == 200


def test_repeated_failures(failing, monkeypatch):
    """/health reports repeated failures, so that a supervisor can restart the server. After a success it is healthy again."""
    with monkeypatch.context() as patch, failing.client() as client:
        patch.setattr(failing.engine.program, "prompt", lambda *_: [][0])
        for count in range(MOST_FAILURES):
            assert client.get("/health").status_code == 200, count
            assert client.post("/v1/completions", json=ASKED).status_code == 500
        assert client.get("/health").status_code == client.get("/ready").status_code == 503
        patch.undo()
        assert client.post("/v1/completions", json=ASKED).status_code == 200
        assert client.get("/health").status_code == 200


def test_more_sequences_than_pages():
    """Sequences that need more pages than the cache has are preempted, and have the text that they have alone."""
    with running(tiny_pipeline(max_concurrent=6, cache_bytes=9 << 16), max_concurrent=6) as server:
        pages, page = server.engine.scheduler.pages.count - 1, 128
        bodies = [
            {**ASKED, "prompt": letter, "max_tokens": 250, "stream": letter < "d", "extra_body": {"ignore_eos": True}}
            for letter in "abcdef"
        ]
        alone = [ask(server, body)[0] for body in bodies]
        assert pages < sum(-(-250 // page) for _ in bodies)
        assert ask(server, *bodies) == alone


class Fatal(BaseException):
    """An error that is not an Exception."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_server_ends_with_its_engine_thread(monkeypatch):
    """The server ends with its engine thread, so that no client waits for an answer that cannot come."""
    server = Running(tiny_pipeline(), Limits(max_concurrent=4))
    try:
        server.wait_until(lambda: server.service.state is State.READY)

        def die(*_):
            raise Fatal

        monkeypatch.setattr(server.engine.program, "step", die)
        errors = ask(server, ASKED, {**ASKED, "stream": True})
        assert all(isinstance(error, openai.APIError) for error in errors), errors
        server.thread.join(PATIENCE)
        assert not server.thread.is_alive() and server.service.worker.dead and server.service.quota.taken == 0
    finally:
        server.stop()


def test_a_warm_up_that_fails(monkeypatch):
    pipe = tiny_pipeline()

    def fails():
        raise RuntimeError("out of memory")
        yield

    monkeypatch.setattr(pipe.engine, "warm_up", fails)
    server = Running(pipe, Limits(max_concurrent=4))
    server.thread.join(PATIENCE)
    assert not server.thread.is_alive() and server.service.worker.dead and server.service.state is not State.READY


@pytest.mark.parametrize("signals", [1, 2])
def test_a_step_that_does_not_return(signals, monkeypatch, caplog):
    """If a step never returns, the server ends without it, after some time or at a second signal."""
    monkeypatch.setattr("lowbit.serve.server.AFTER_GRACE_SECONDS", 1 if signals == 1 else 2 * PATIENCE)
    server, goes_on = Running(tiny_pipeline(), Limits(max_concurrent=4, grace_seconds=0)), threading.Event()
    try:
        server.wait_until(lambda: server.service.state is State.READY)
        monkeypatch.setattr(server.engine.program, "prompt", lambda *_: goes_on.wait(3 * PATIENCE))
        with socket.create_connection(server.address) as waiting:
            data = json.dumps(ASKED).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            waiting.sendall(head + b"content-length: %d\r\n\r\n" % len(data) + data)
            server.wait_until(lambda: server.engine.scheduler.running)
            server.service.worker._loop.call_soon_threadsafe(server.server._told, signal.SIGTERM)
        if signals == 2:
            time.sleep(0.5)
            server.service.worker._loop.call_soon_threadsafe(server.server._told, signal.SIGTERM)
        server.thread.join(PATIENCE)
        assert not server.thread.is_alive() and server.service.worker.running
        assert ("does not return" in caplog.text) == (signals == 1)
    finally:
        goes_on.set()
        server.stop()


def test_requests_after_the_grace_time():
    """A request whose body was still arriving at the end of the grace time gets the same error as the others."""
    with running() as server:
        server.service.worker._loop.call_soon_threadsafe(server.server._end_all)
        (error,) = ask(server, ASKED)
        assert isinstance(error, openai.InternalServerError) and error.status_code == 503 and "shutting down" in str(error)


def test_a_stop_string_that_ends_with_the_last_character(failing, monkeypatch):
    """A character that lacks its last byte becomes text only at the end. It may then complete a stop string."""
    decode = failing.pipe.tokenizer.decode
    monkeypatch.setattr(
        Detokenizer, "_decode", lambda self, tokens: decode(tokens)[: len(tokens) - 1] + "\ufffd" * bool(tokens)
    )
    with failing.client() as client:
        (choice,) = client.post("/v1/completions", json={**ASKED, "max_tokens": 3, "stop": "\ufffd"}).json()["choices"]
    assert choice["finish_reason"] == "stop" and "\ufffd" not in choice["text"]


def test_a_fault_ends_its_connection(failing, monkeypatch):
    """The response to a fault closes the connection, so the client sends nothing more on it."""
    monkeypatch.setattr(failing.service, "check_model", lambda name: 1 // 0)
    with failing.client() as client:
        answer = client.post("/v1/completions", json=ASKED)
        assert answer.status_code == 500 and answer.headers["connection"] == "close"
        assert client.get("/health").status_code == 200


def test_log_probabilities_are_encoded_in_a_thread(failing, monkeypatch):
    """Encoding the log-probabilities of a long answer takes a second, during which the event loop would be blocked."""
    part, threads = CompletionResponses._part, []

    def watched(self, *arguments):
        threads.append(threading.current_thread())
        return part(self, *arguments)

    fetch = OutputCollector.fetch

    async def late(self):
        await asyncio.sleep(0.5)  # like a client that reads slowly, so that many tokens are one output
        return await fetch(self)

    monkeypatch.setattr(CompletionResponses, "_part", watched)
    monkeypatch.setattr(OutputCollector, "fetch", late)
    with failing.client() as client:
        for stream in (False, True):
            for more in ({}, {"logprobs": 2}):
                threads.clear()
                assert client.post("/v1/completions", json={**ASKED, **more, "stream": stream}).status_code == 200
                beside = [each.name.startswith("lowbit-beside") for each in threads]
                assert beside and all(beside if more else [each is failing.thread for each in threads]), (stream, more)


def test_requests_start_no_threads(failing):
    """A thread for each request would take time from the engine's thread."""
    with failing.client() as client:
        assert client.post("/v1/completions", json=ASKED).status_code == 200
    assert not [each.name for each in threading.enumerate() if each.name.startswith("AnyIO")]


def test_the_garbage_collector_skips_a_warm_server():
    """While requests run, garbage collections do not scan the model. After the server has ended, they do again."""
    with running():
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0
