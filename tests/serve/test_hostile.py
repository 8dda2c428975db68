"""Hostile clients: no request causes a status of 500, a hang or a leak."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time

import pytest

from lowbit.serve import connection, limits, stream
from tests.adapters import write_adapter
from tests.serve.hostile import ADAPTERS, MODELS, attack, status_of
from tests.serve.running import NAME, PATIENCE, raw, running, tiny_pipeline
from tests.tiny import eager_llama

ASKED = {"model": NAME, "prompt": "ab", "max_tokens": 200, "ignore_eos": True}


def post(body, *more):
    """A request as bytes."""
    data = json.dumps(body).encode()
    lines = (b"POST /v1/completions HTTP/1.1", b"host: localhost", b"content-type: application/json", *more)
    return b"\r\n".join((*lines, b"content-length: %d" % len(data), b"", data))


def test_generated_requests(free):
    """Sends 200 requests; `python -m tests.serve.hostile 1000` sends more."""
    seen = attack(free, 200)
    assert seen[200] > 5 and seen[400] > 50, seen
    with free.client() as client:
        assert client.get("/health").status_code == 200 and client.get("/metrics").status_code == 200


def test_generated_requests_that_name_adapters(tmp_path):
    """Names of adapters, and names that are almost theirs, which are 404."""
    folders = {name: write_adapter(tmp_path / name, eager_llama(), seed=i) for i, name in enumerate(ADAPTERS)}
    with running(tiny_pipeline(lora=folders)) as server:
        seen = attack(server, 100, MODELS)
        assert seen[200] > 3 and seen[404] and seen[400] > 30, seen
        with server.client() as client:
            lines = client.get("/metrics").text.splitlines()
        counts = [float(line.split()[-1]) for line in lines if line.startswith("lowbit_adapter_texts_total")]
        assert len(counts) == len(ADAPTERS) and sum(counts) > 0


def test_pipelined_requests_are_answered_in_order(free):
    body = {**ASKED, "max_tokens": 2}
    answer = raw(free, post(body) * 3 + b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200") == 4 and answer.count(b"text_completion") == 3
    assert answer.rstrip().endswith(b'{"status":"ok"}')


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_disconnect_with_pipelined_requests(streams, at_once, slow):
    """uvicorn reports a disconnect only to the last pipelined request. While the first one runs, it reads nothing further."""
    with socket.create_connection(slow.address) as connected:
        first, behind = post({**ASKED, "stream": streams}), post(ASKED)
        connected.sendall(first + behind if at_once else first)
        slow.wait_until(lambda: slow.engine.scheduler.running)
        if not at_once:
            connected.sendall(behind)
            time.sleep(0.05)
        if streams:
            assert b"200" in connected.recv(20)
    before = slow.steps
    slow.wait_until_free()
    assert slow.steps - before < 100


@pytest.mark.parametrize("data", [b"", b"POST /v1/comp", post(ASKED)[:40], b"\r\n", b"GET / HTTP/1.1\r\nhost: loc"])
def test_half_a_head(data, free, monkeypatch):
    """A connection whose request head is not complete in time is closed, whether it sends nothing or byte by byte."""
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.3)
    begun = time.monotonic()
    assert raw(free, data, seconds=PATIENCE) == b"" and 0.2 < time.monotonic() - begun < limits.HEAD_SECONDS
    with socket.create_connection(free.address) as slow_loris:
        begun = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - begun < limits.HEAD_SECONDS:
                slow_loris.sendall(b"x" if data else b"")
                time.sleep(0.05)
                slow_loris.settimeout(0.01)
                with contextlib.suppress(TimeoutError):
                    if not slow_loris.recv(1):
                        break
        assert time.monotonic() - begun < limits.HEAD_SECONDS


def test_a_second_request_has_no_more_time(free, monkeypatch):
    """The time limit for the head of a request also holds after an answer."""
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.3)
    with socket.create_connection(free.address, timeout=PATIENCE) as connected:
        connected.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b'{"status":"ok"}'):
            answer += connected.recv(1000)
        begun = time.monotonic()
        connected.sendall(b"GET /hea")
        assert connected.recv(1000) == b"" and 0.2 < time.monotonic() - begun < limits.HEAD_SECONDS


def test_protocol_upgrades_are_ignored(free):
    """Some clients ask for a protocol upgrade before their first request."""
    data = post(ASKED, b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAMAAABk")
    answer = raw(free, data)
    assert status_of(answer) == 400 and b"send them without this header" in answer and answer.count(b"HTTP/1.1 ") == 1


def test_half_a_body(free, monkeypatch):
    monkeypatch.setattr(stream, "BODY_SECONDS", 0.3)
    answer = raw(free, post(ASKED)[:-5])
    assert status_of(answer) == 408 and b"connection: close" in answer.lower()
    raw(free, post(ASKED)[:-5], end=True, seconds=1)  # the connection is closed


def test_heads_are_bounded(free):
    head = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
    assert status_of(raw(free, head + b"connection: close\r\na: " + b"b" * 8000 + b"\r\n\r\n")) == 200
    large = raw(free, head + b"a: " + b"b" * (1 << 20))
    assert status_of(large) in (400, None)  # None, if the connection was reset while this client was sending
    assert status_of(raw(free, head + b"a: b\r\n" * 100_000)) in (400, None)
    assert status_of(raw(free, head + b"a: " + b"b" * 40_000 + b"\r\n\r\n")) == 400
    assert status_of(raw(free, b"GET /" + b"b" * 40_000 + b" HTTP/1.1\r\n\r\n")) == 400


@pytest.mark.parametrize("key", [None, "sesame"])
def test_trailers_are_bounded(key):
    """Trailers are bounded, also without the key. The answer to a missing key is sent before the body has arrived."""
    with running(key=key) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n"
        opening = head + b"content-type: application/json\r\n\r\n1\r\n{\r\n0\r\n"
        with socket.create_connection(server.address, timeout=PATIENCE) as connected:
            connected.sendall(opening)
            with pytest.raises(ConnectionError):
                for _ in range(4000):  # 80 MB, more than the system buffers for a server that stops reading
                    connected.sendall(b"a: b\r\n" * 3500)
                    time.sleep(0.001)
        data = json.dumps({**ASKED, "max_tokens": 2}).encode() + b" " * 100_000
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (data[:3], data[3:]))
        opening = opening.partition(b"\r\n\r\n")[0] + b"\r\nconnection: close\r\n\r\n"
        assert status_of(raw(server, opening + chunks + b"0\r\na: b\r\n\r\n")) == (401 if key else 200)


class Slow:
    """A server whose steps take at least 10 ms; it counts them."""

    def __init__(self, server):
        self.server, self.steps = server, 0
        program = server.engine.program
        step = program.step

        def slowly(*arguments):
            self.steps += 1
            time.sleep(0.01)
            return step(*arguments)

        program.step = slowly

    def __getattr__(self, name):
        return getattr(self.server, name)


@pytest.fixture(scope="module")
def slow():
    with running(tiny_pipeline(max_concurrent=4)) as server:
        yield Slow(server)


@pytest.mark.parametrize("streams", [True, False])
def test_a_disconnect_stops_the_computation(streams, slow):
    """Sequences have 200 tokens. How many are computed before the server notices the disconnect depends on the machine's
    load."""
    with socket.create_connection(slow.address) as connected:
        connected.sendall(post({**ASKED, "stream": streams, "n": 3}))
        slow.wait_until(lambda: slow.engine.scheduler.running)
        if streams:
            assert connected.recv(20)
    before = slow.steps
    slow.wait_until_free()
    assert slow.steps - before < 100, "a cancelled sequence was computed further"


def test_a_disconnect_frees_the_pages_within_a_step(slow, monkeypatch):
    """Once the server notices the disconnect, the running step is the last one for the sequence."""
    worker, pages = slow.service.worker, slow.engine.scheduler.pages
    cancel, release, told, released = worker.cancel, pages.free, [], []
    monkeypatch.setattr(worker, "cancel", lambda texts: (told.append(slow.steps), cancel(texts)))
    monkeypatch.setattr(pages, "free", lambda held: (released.append(slow.steps) if held else None, release(held)))
    with socket.create_connection(slow.address) as connected:
        connected.sendall(post({**ASKED, "stream": True}))
        slow.wait_until(lambda: slow.engine.scheduler.running)
        assert connected.recv(20)
    slow.wait_until(lambda: told and slow.free())
    assert len(told) == len(released) == 1 and 0 < told[0] <= released[0] <= told[0] + 1


def test_a_disconnect_frees_a_place_in_the_queue(slow):
    with slow.client() as client:
        done = []
        others = [threading.Thread(target=lambda: done.append(client.post("/v1/completions", json=ASKED))) for _ in range(4)]
        for thread in others:
            thread.start()
        slow.wait_until(lambda: len(slow.engine.scheduler.running) == 4)
        with socket.create_connection(slow.address) as connected:
            connected.sendall(post(ASKED))
            slow.wait_until(lambda: slow.engine.scheduler.waiting)
        slow.wait_until(lambda: not slow.engine.scheduler.waiting)
        assert len(slow.engine.scheduler.running) == 4
        for thread in others:
            thread.join()
    assert [answer.status_code for answer in done] == [200] * 4


def test_disconnects_at_random_moments(free):
    """Sixty connections are closed or reset while they send, wait or read. Another client is answered correctly meanwhile."""
    draw = random.Random(0)
    body = {**ASKED, "max_tokens": 40, "temperature": 0}
    with free.client() as client:
        alone = client.post("/v1/completions", json=body).json()["choices"]
        found = []

        def stay():
            found.extend(client.post("/v1/completions", json=body).json()["choices"] for _ in range(8))

        staying = threading.Thread(target=stay)
        staying.start()
        for _ in range(60):
            data = post({**ASKED, "stream": draw.random() < 0.5, "n": draw.randint(1, 3)})
            with socket.create_connection(free.address) as connected:
                if draw.random() < 0.5:
                    connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # resets the connection
                connected.sendall(data[: draw.randint(1, len(data))] if draw.random() < 0.3 else data)
                time.sleep(draw.random() * 0.03)
                if draw.random() < 0.5:
                    connected.settimeout(0.01)
                    with contextlib.suppress(TimeoutError):
                        connected.recv(draw.randint(1, 300))
        staying.join()
    assert found == [alone] * 8
    free.wait_until_free()


def test_a_client_that_does_not_read(monkeypatch):
    """A client does not read its answer. The sequence is computed nevertheless, and other clients are not delayed."""
    monkeypatch.setattr(connection, "STALL_SECONDS", 0.5)
    with running() as server, contextlib.ExitStack() as stack:
        # the option also applies to connections accepted later
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        many = {**ASKED, "stream": True, "n": 4, "logprobs": 20}
        stalled = []
        for _ in range(3):
            connected = stack.enter_context(socket.socket())
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connected.connect(server.address)
            connected.sendall(post(many))
            stalled.append(connected)
        with server.client() as client:
            assert client.post("/v1/completions", json=ASKED).status_code == 200
        server.wait_until(lambda: not server.server.server_state.connections, limits.STALL_SECONDS / 2)
        server.wait_until_free()
        for connected in stalled:
            connected.settimeout(PATIENCE)
            with contextlib.suppress(ConnectionError):
                while part := connected.recv(1 << 16):
                    assert b"[DONE]" not in part, "the whole answer was sent"


@pytest.mark.parametrize("ending", [b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", b"no request\r\n\r\n"])
def test_an_unread_last_answer(ending, monkeypatch):
    """Some answers are unread when the connection is to end. They are too short to block the writer."""
    monkeypatch.setattr(connection, "STALL_SECONDS", 0.5)
    with running() as server, socket.socket() as connected:
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connected.connect(server.address)
        connected.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 2)
        server.wait_until(lambda: server.server.server_state.total_requests == 2)
        connected.sendall(ending)
        server.wait_until(lambda: not server.server.server_state.connections, limits.STALL_SECONDS / 2)
