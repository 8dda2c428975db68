"""Open connections: how many there may be, which one is closed for a new one, and half-closed ones. Bytes that are not HTTP get
JSON."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import resource
import socket
import subprocess
import sys
import time

import pytest

from lowbit.serve import listener
from lowbit.serve.limits import Limits
from lowbit.serve.listener import Listener, network_of, raise_file_limit
from lowbit.serve.prompts import Prompts
from tests.serve.hostile import status_of
from tests.serve.running import NAME, PATIENCE, raw, running

ASKED = {"model": NAME, "prompt": "ab", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"


def post(body=ASKED, version=b"1.1"):
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/%s\r\nhost: localhost\r\ncontent-type: application/json\r\n" % version
    return head + b"content-length: %d\r\n\r\n" % len(data) + data


def error_in(answer, status):
    """The error in the JSON body of the only response."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert answer.count(b"HTTP/1.1 %d" % status) == 1 and status_of(answer) == status, answer[:500]
    assert b"content-type: application/json" in head.lower() and b"connection: close" in head.lower(), head
    error = json.loads(body)["error"]
    assert {"message", "type", "param", "code"} == set(error) and error["message"]
    return error


@contextlib.contextmanager
def idle(server, count, data=b""):
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(server.address, timeout=PATIENCE)) for _ in range(count)]
        for each in connections:
            with contextlib.suppress(ConnectionError):
                each.sendall(data)
        yield connections


CLIENT = """
import http.client, socket, sys, time
port = int(input())
idle = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(200)]
begun = time.monotonic()
for _ in range(3):
    asking = http.client.HTTPConnection("127.0.0.1", port, timeout=8)
    asking.request("GET", "/health")
    assert asking.getresponse().status == 200
print(time.monotonic() - begun)
"""


def test_idle_connections_do_not_exhaust_file_descriptors(caplog):
    """200 idle connections with a limit of 30 files do not stop the server. Other clients are answered, and the log has one
    line about it."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    client = subprocess.Popen([sys.executable, "-I", "-c", CLIENT], **pipes)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with running() as server:
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 30, hard))
            seconds, _ = client.communicate(f"{server.address[1]}\n", PATIENCE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        client.kill()
        client.communicate()
    assert client.returncode == 0 and float(seconds) < 5
    assert caplog.text.count("cannot accept a connection while") == 1 and len(caplog.text) < 1000


def test_a_new_connection_is_answered(caplog):
    """The connections that were idle for the longest are closed for a new one. Connections with a running request stay open."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running(max_connections=8, max_connections_per_address=6))
        stack.enter_context(server.engine._lock)
        with socket.create_connection(server.address, timeout=PATIENCE) as busy:
            busy.sendall(post({**ASKED, "max_tokens": 2}))
            server.wait_until(lambda: server.service.quota.taken)
            with idle(server, 40, b"GET /") as connections:
                assert status_of(raw(server, HEALTH + b"connection: close\r\n\r\n")) == 200
                with contextlib.suppress(ConnectionResetError):
                    assert connections[0].recv(1) == b""
                server.wait_until(lambda: len(server.server.server_state.connections) <= 6)
                server.engine._lock.release()
                try:
                    assert b" 200 OK" in busy.recv(1000)
                finally:
                    server.engine._lock.acquire()
    assert [each.getMessage() for each in caplog.records if "idle connection" in each.getMessage()] == [
        "closed an idle connection to accept another one: 6 are open, 6 of them by 127.0.0.1; "
        "more warnings about connections follow after 60 s at the earliest"
    ]


@pytest.mark.parametrize("bounds", [{"max_connections": 2}, {"max_connections": 3, "max_connections_per_address": 2}])
def test_one_connection_too_many(bounds, monkeypatch):
    """A connection beyond the limit gets status 503 as JSON, even if it sends its request late. A later connection is
    answered."""
    monkeypatch.setattr(listener, "MOST_REFUSALS", 1)
    monkeypatch.setattr(listener, "REFUSAL_SECONDS", PATIENCE)
    bounds = {"max_connections_per_address": 2, **bounds}
    with running(**bounds) as server, server.client() as client:
        with server.engine._lock, contextlib.ExitStack() as stack:
            for _ in range(2):
                busy = stack.enter_context(socket.create_connection(server.address, timeout=PATIENCE))
                busy.sendall(post({**ASKED, "max_tokens": 2}))
            server.wait_until(lambda: server.service.quota.taken == 2)
            with socket.create_connection(server.address, timeout=PATIENCE) as late, server.client() as another:
                time.sleep(0.1)
                assert another.get("/health").status_code == 503  # the answer to a connection beyond MOST_REFUSALS
                late.sendall(HEALTH + b"\r\n")
                error = error_in(b"".join(iter(lambda: late.recv(1000), b"")), 503)
            assert error["code"] == "too_many_connections" and "2 connections of your address are open" in error["message"]
        server.wait_until_free()
        assert client.get("/health").status_code == 200


def test_bounds():
    assert Limits().connections == 2 * 320 + 64 and Limits().connections_per_address == 352
    assert Limits(max_connections=5).connections_per_address == 3
    with pytest.raises(ValueError, match="max_connections is at least 1, got 0"):
        Limits(max_connections=0)


def test_a_low_limit_on_open_files_lowers_the_number_of_connections(monkeypatch, caplog):
    async def most(files):
        monkeypatch.setattr(resource, "getrlimit", lambda which: (files, files))
        with socket.create_server(("127.0.0.1", 0)) as sock:
            made = Listener(sock, Limits(), lambda _: None)
            made.close()
            return made.most, made.most_per_address

    assert asyncio.run(most(1 << 20)) == (704, 352) and not caplog.records
    assert asyncio.run(most(512)) == (256, 256) and "ulimit -n) is 512" in caplog.text
    assert asyncio.run(most(64)) == (16, 16)


def test_the_limit_on_open_files_is_raised():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_networks():
    """An IPv6 client counts by its /64 network, an IPv4 client by its address, also if an IPv6 socket reports it."""
    hosts = ["127.0.0.1", "::ffff:127.0.0.1", "2001:db8::1:2:3:4", "2001:db8::5", "fe80::1%eth0"]
    assert [network_of(host) for host in hosts] == ["127.0.0.1"] * 2 + ["2001:db8::/64"] * 2 + ["fe80::/64"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"no request\r\n\r\n", "this is no request of HTTP/1.1"),
        (b"GET / HTTP/1.1\r\n\r\n", "host: a request of HTTP/1.1 has exactly one Host header, this one has 0"),
        (HEALTH + b"host: localhost\r\n\r\n", "exactly one Host header, this one has 2"),
        (b"GET / HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n", "exactly one Host header, this one has 2"),
        (HEALTH + b"a: " + b"b" * 40_000 + b"\r\n\r\n", "the head of a request has at most 32,768 bytes"),
        (HEALTH + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", "this is no request of HTTP/1.1"),
        (
            post().partition(b"content-length")[0] + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
            "this is no request of HTTP/1.1",
        ),
    ],
)
def test_bytes_that_are_not_http_get_json(data, message, free):
    error = error_in(raw(free, data), 400)
    assert error["code"] == "invalid_http" and message in error["message"]


def test_http_1_0_needs_no_host(free):
    assert b"200 OK" in raw(free, b"GET /health HTTP/1.0\r\n\r\n")


def test_bytes_after_a_request_do_not_change_its_answer(free):
    """Bytes that are not HTTP follow a request. Its answer is complete, and then the connection ends."""
    answer = raw(free, post({**ASKED, "stream": True}) + b"no request\r\n\r\n")
    assert answer.count(b"HTTP/1.1 ") == 1 and answer.endswith(b"0\r\n\r\n") and b"[DONE]" in answer


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_half_closed_clients_get_their_answer(stream, version, free):
    """A client closes its sending side after the request, as `nc -N` and older clients do. An interim response may precede the
    answer; all clients ignore it."""
    with free.client() as client:
        whole = client.post("/v1/completions", json=ASKED).json()["choices"][0]["text"]
    begun = time.monotonic()
    answer = raw(free, post({**ASKED, "stream": stream}, version), end=True, seconds=PATIENCE)
    assert time.monotonic() - begun < PATIENCE / 2
    body = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert body.startswith(b"HTTP/1.1 200") and body.count(b"HTTP/1.1 ") == 1
    if stream:
        assert b"data: [DONE]" in body
    else:
        assert json.loads(body.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == whole


def test_half_closed_with_pipelined_requests(free):
    """A client sends four requests at once, the last one incomplete, and closes its side: three are answered."""
    short = post({**ASKED, "max_tokens": 2})
    answer = raw(free, short * 3 + short[:-5], end=True)
    assert answer.count(b"HTTP/1.1 200") == 3 and answer.count(b"text_completion") == 3
    assert answer.replace(b"HTTP/1.1 100 Continue", b"").count(b"HTTP/1.1 ") == 3


def test_http_client_after_a_half_close(free):
    """Python's http.client ignores the interim response before the answer."""
    asking = http.client.HTTPConnection(*free.address, timeout=PATIENCE)
    asking.request("POST", "/v1/completions", json.dumps(ASKED), {"content-type": "application/json"})
    asking.sock.shutdown(socket.SHUT_WR)
    assert json.load(asking.getresponse())["choices"][0]["finish_reason"] == "length"
    asking.close()


class Panic(BaseException):
    """The error that a library written in Rust raises for unexpected input. It is not an Exception."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_panic_of_the_tokenizer_gets_json(free, monkeypatch):
    def panics(*_):
        raise Panic("called `Option::unwrap()` on a `None` value")

    monkeypatch.setattr(Prompts, "of_prompts", panics)
    error = error_in(raw(free, post()), 500)
    assert error["type"] == "server_error" and "its log describes" in error["message"]
    monkeypatch.undo()
    with free.client() as client:
        assert client.post("/v1/completions", json={**ASKED, "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ('{"model": "tiny", "prompt": "a", "max_tokens": 2, "prompt": "b"}', "prompt"),
        ('{"model": "tiny", "prompt": "a", "max_tokens": 2, "logit_bias": {"1": 0, "1": 100}}', "1"),
        ('{"model": "tiny", "prompt": "a", "max_tokens": 2, "promp\\u0074": "b"}', "prompt"),
    ],
)
def test_duplicate_keys(body, name, free):
    with free.client() as client:
        answer = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "duplicate_key", name)


def test_a_tools_schema_may_have_any_numbers(free):
    """The search for duplicate keys does not convert numbers to Python's."""
    call = {"type": "function", "function": {"name": "f", "parameters": {"maximum": 0}}}
    asked = {"model": NAME, "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "tools": [call]}
    with free.client() as client:
        for number in ("9" * 5000, "1e999", "-0.0"):
            body = json.dumps(asked).replace('"maximum": 0', f'"maximum": {number}')
            answer = client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
            assert answer.status_code in (200, 400), answer.text
