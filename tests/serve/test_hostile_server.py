"""`lowbit chat` with a hostile server: bounded time and memory, errors of one line, no control characters in the output."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
import zlib

import pytest
from typer.testing import CliRunner

from lowbit.cli.commands import app
from lowbit.serve import client
from lowbit.serve.client import RemoteChat

OK = b"HTTP/1.1 200 OK\r\nconnection: close\r\n"
MODELS = OK + b"\r\n" + json.dumps({"data": [{"id": "m"}]}).encode()
SECONDS = 20


@contextlib.contextmanager
def serving(models, chat=()):
    """A server that sends `models` to GET, and the parts of `chat` to POST until its client disconnects; yields its address."""
    listening = socket.create_server(("127.0.0.1", 0))
    sent = [0]

    def serve():
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                asked = b""
                while not _is_whole(asked):
                    asked += connection.recv(1 << 16)
                for part in [models] if asked.startswith(b"GET") else chat:
                    connection.sendall(part)
                    sent[0] += len(part)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", sent
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(SECONDS)
        assert not thread.is_alive()


def _is_whole(asked):
    head, end, body = asked.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    return bool(end) and len(body) >= (int(length[1]) if length else 0)


def talk(url):
    """The output of `lowbit chat` for one question."""
    begun = time.monotonic()
    done = CliRunner().invoke(app, ["chat", url], input="hi\n/exit\n")
    assert time.monotonic() - begun < SECONDS
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    assert "\x1b" not in done.output and "\x07" not in done.output
    return done


def event(value):
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def delta(content):
    return event({"choices": [{"delta": {"content": content}}]})


STREAM = OK + b"content-type: text/event-stream\r\n\r\n"
BOMB = zlib.compress(bytes(1 << 24), 9)

LISTS = {
    "no JSON": (OK + b"\r\n{", "there is no model"),
    "deep JSON": (OK + b"\r\n" + b"[" * 200_000, "there is no model"),
    "a list": (OK + b"\r\n[]", "there is no model"),
    "names that are none": (OK + b"\r\n" + b'{"data": [{"id": 3}, {"id": null}, {"id": ["x"]}, 7]}', "there is no model"),
    "a long name": (OK + b"\r\n" + json.dumps({"data": [{"id": "m" * 9999}]}).encode(), "there is no model"),
    "a redirect": (
        b"HTTP/1.1 307 x\r\nlocation: http://127.0.0.1:1/\x1b[2J\r\ncontent-length: 0\r\n\r\n", "Invalid URL in location",
    ),
    "another redirect": (b"HTTP/1.1 302 x\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n", "redirects to 'http"),
    "no HTTP": (b"\x16\x03\x01\x1b[2J\r\n\r\n", "is a server running there"),
    "nothing": (b"", "is a server running there"),
    "compressed": (OK + b"content-encoding: deflate\r\n\r\n" + BOMB, "'deflate', which was not asked for"),
    "a refusal that is no text": (b"HTTP/1.1 403 x\r\n\r\n" + b'{"error": {"message": {"a": 1}}}', "the server says 403"),
    "a long refusal": (
        b"HTTP/1.1 500 x\r\n\r\n" + json.dumps({"error": {"message": "\x1b[2J" * 10**6}}).encode(), "the server says 500",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", LISTS)
def test_lists_of_models(what):
    models, message = LISTS[what]
    with serving(models) as (url, _):
        done = talk(url)
    assert done.exit_code == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ") and len(line) < 9999
    assert any(part in line for part in message.split("|")), line


def test_an_endless_list_of_models():
    with serving(OK + b"\r\n" + bytes(client.MOST_BODY + 1)) as (url, _):
        done = talk(url)
    assert done.exit_code == 1 and "more than 16,777,216 bytes" in done.stderr


ANSWERS = {
    "no JSON": ([event(b"{")], "what is no answer"),
    "deep JSON": ([event(b"[" * 200_000)], "what is no answer"),
    "a number": ([event(3)], "what is no answer"),
    "choices a number": ([event({"choices": 3})], "what is no answer"),
    "a choice a number": ([event({"choices": [3]})], "what is no text"),
    "delta a list": ([event({"choices": [{"delta": [1]}]})], "what is no text"),
    "content a number": ([delta(3)], "what is no text"),
    "content an object": ([delta({"a": 1})], "what is no text"),
    "an error that is no object": ([event({"error": "\x1b]0;x\x07"})], "the server says: \\x1b]0;x\\x07"),
    "an error of megabytes": ([event({"error": {"message": "x" * 900_000}})], "the server says: xxx"),
    "cut off": ([b'data: {"choices": ['], "what is no answer"),
}


@pytest.mark.parametrize("what", ANSWERS)
def test_answers(what):
    parts, message = ANSWERS[what]
    with serving(MODELS, [STREAM, *parts]) as (url, _):
        done = talk(url)
    line = next(line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert message in line and len(line) < 9999
    assert done.exit_code == 0


def test_escape_sequences_are_escaped():
    with serving(MODELS, [STREAM, delta("\x1b[2J[/b]:smile:"), delta("\x9b1m ok"), event(b"[DONE]")]) as (url, _):
        done = talk(url)
    assert "\\x1b[2J[/b]:smile:\\x9b1m ok" in done.stdout and done.exit_code == 0


ENDLESS = {
    "a line": (b"x" * 65536, "a line of more than 1,048,576 bytes"),
    "a line in small parts": (b"data: x", "a line of more than|more than"),
    "comments": (b": ping\n" * 4096, "more than 5,242,880 bytes"),
    "answers": (delta("") * 512, "more than 5,242,880 bytes"),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_endless_answers(what, monkeypatch):
    monkeypatch.setattr(client, "MOST_BODY", 1 << 20)
    part, message = ENDLESS[what]
    with serving(MODELS, _headed(part)) as (url, sent):
        done = talk(url)
    line = next(line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert any(each in line for each in message.split("|")), line
    assert sent[0] < 1 << 26 and done.exit_code == 0


def _headed(part):
    yield STREAM
    while True:
        yield part


def test_a_redirect_of_an_answer_sends_no_key():
    moved = b"HTTP/1.1 307 x\r\nlocation: http://127.0.0.1:1/v1\r\ncontent-length: 0\r\n\r\n"
    with serving(MODELS, [moved]) as (url, _), pytest.raises(ValueError, match="redirects to 'http://127"):
        list(RemoteChat(url, "secret").answer([{"role": "user", "content": "hi"}], 0.7, 8))
