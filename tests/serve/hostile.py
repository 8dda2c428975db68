"""Requests that mean no good, drawn by hypothesis; `python -m tests.serve.hostile 1000` sends so many to a server of its own.

None of them may be answered with a status of 500 or more, hang, or leave anything behind.
"""

from __future__ import annotations

import json
import sys
import time

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.running import NAME, raw, running

FIELDS = (
    "model", "prompt", "messages", "n", "stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens",
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "logprobs", "top_logprobs", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "logit_bias", "echo", "user", "response_format", "tools", "tool_choice",
    "best_of", "suffix", "ignore_eos", "functions", "__proto__", "",
)  # fmt: skip
NUMBERS = st.sampled_from((
    0, -1, 1, 2, 1 << 31, 1 << 63, 1 << 64, 10**400, -(10**400), 0.0, -0.0, 1e-320, 1e308, -1e308, float("inf"), float("nan"),
))  # fmt: skip
PATIENCE_SECONDS = 9.0
"""Until an answer is there and the connection closed, on a busy machine; `raw` waits for longer."""

ODD_TEXTS = ("\0", "\ud7ff", "\uffff", "\u202e", "a" * 5000, "<s></s><unk>", "\r\n\r\n", "{{7*7}}")
ODD_TEXT = st.text(max_size=20) | st.sampled_from(ODD_TEXTS)
LEAVES = st.none() | st.booleans() | NUMBERS | st.integers() | st.floats() | ODD_TEXT
ANYTHING = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ODD_TEXT, inner, max_size=4), max_leaves=8
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(("user", "system", "assistant", "tool", "developer")) | ANYTHING, "content": ODD_TEXT | ANYTHING},
    optional={"tool_calls": ANYTHING, "name": ODD_TEXT, "tool_call_id": ODD_TEXT},
)
SOUND = {
    "n": st.integers(1, 4), "stream": st.booleans(), "temperature": st.floats(0.001, 2), "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 200), "min_p": st.floats(0, 1), "seed": st.integers(-(1 << 63), (1 << 63) - 1),
    "stop": ODD_TEXT | st.lists(st.text(min_size=1, max_size=5), max_size=4), "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2), "repetition_penalty": st.floats(0.001, 100), "ignore_eos": st.booleans(),
    "min_tokens": st.integers(0, 4), "user": ODD_TEXT,
    "logit_bias": st.dictionaries(st.integers(0, 159).map(str), st.floats(-100, 100), max_size=5),
}  # fmt: skip
"""Values of fields that may well be right, at the edges of what is."""


@st.composite
def bodies(draw):
    """The body of a request, right but for a few fields."""
    chat = draw(st.booleans())
    body = {"model": NAME, "max_tokens": draw(st.integers(1, 8))}
    if chat:
        body["messages"] = draw(st.lists(MESSAGE, min_size=1, max_size=3))
    else:
        body["prompt"] = draw(ODD_TEXT | st.lists(ODD_TEXT, max_size=3) | st.lists(st.integers(-1, 161), max_size=9) | ANYTHING)
    for name in draw(st.lists(st.sampled_from(sorted(SOUND)), max_size=5)):
        body[name] = draw(SOUND[name])
    for name in draw(st.lists(st.sampled_from(FIELDS), max_size=2)):
        body[name] = draw(ANYTHING)
    return ("/v1/chat/completions" if chat else "/v1/completions"), json.dumps(body).encode()


@st.composite
def damaged(draw):
    """A body with some bytes of it replaced, left out or repeated."""
    path, body = draw(bodies())
    found = bytearray(body)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(found) - 1))
        found[at : at + draw(st.integers(0, 4))] = draw(st.binary(max_size=4))
        if not found:
            return path, b""
    return path, bytes(found)


JSON = b"content-type: application/json\r\ncontent-length: %d\r\n"
HEADS = st.sampled_from((
    b"POST %s HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n" + JSON + b"\r\n",
    b"POST %s HTTP/1.0\r\n" + JSON + b"\r\n",
    b"POST %s?a=%%00 HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n" + JSON + b"\r\n",
    b"POST %s HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\nconnection: close\r\n" + JSON + b"\r\n",
))  # fmt: skip
METHODS = (b"GET", b"POST", b"BREW", b"get", b"\x16\x03\x01", b"PRI", b"CONNECT", b"HEAD", b"OPTIONS")
PATHS = (b"/", b"/v1/models/..%2f", b"//", b"*", b"/\xff", b"/%zz", b"http://x/", b"/v1/models/" + b"a" * 300)
LINES = (
    b"host: localhost", b"content-length: -1", b"content-length: 99999999999999999999", b"content-length: 3",
    b"transfer-encoding: chunked", b"transfer-encoding: x", b"x" * 500 + b": y", b": empty", b"a\x00b: c", b" folded",
    b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: a", b"authorization: Bearer \xff\xfe", b"host: [::1",
    b"content-type: application/json", b"cookie: " + b"c" * 3000, b"connection: close",
)  # fmt: skip
TAILS = (b"", b"{}\r\n", b"5\r\nhello\r\n0\r\n\r\n", b"zz\r\n", b"ffffffffffffffff\r\n", b"GET / HTTP/1.1\r\n\r\n")


@st.composite
def heads(draw):
    """Bytes that are no request, or only nearly one."""
    method, path, tail = draw(st.tuples(st.sampled_from(METHODS), st.sampled_from(PATHS), st.sampled_from(TAILS)))
    lines = draw(st.lists(st.sampled_from(LINES), max_size=5))
    return method + b" " + path + b" HTTP/1.1\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + tail


def status_of(answer):
    """The last status in what a server sent; None for nothing."""
    found = [part.split(b" ", 2)[1] for part in answer.split(b"\n") if part.startswith(b"HTTP/1.1 ")]
    return int(found[-1]) if found else None


def answered(server, data, **options):
    """What the server sends until it closes the connection, which it does soon."""
    begun = time.monotonic()
    answer = raw(server, data, **options)
    assert time.monotonic() - begun < PATIENCE_SECONDS, f"neither answered nor closed: {data[:300]!r}"
    return answer


def send_body(server, head, path, body):
    """Sends a body and looks at what comes."""
    answer = answered(server, head % (path.encode(), len(body)) + body)
    status = status_of(answer)
    assert status is not None and (status == 200 or 400 <= status < 500), (status, body[:300])
    if status != 200:
        error = json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]
        assert error["message"] and error["type"] == "invalid_request_error" and {"param", "code"} <= set(error)
    elif b"text/event-stream" in answer:
        assert b"data: [DONE]" in answer and b'"error"' not in answer
    return status


def attack(server, count):
    """Sends `count` requests, in all three ways; how many were answered how."""
    seen: dict[object, int] = {}
    options = dict(suppress_health_check=list(HealthCheck), database=None)

    def saw(status):
        seen[status] = seen.get(status, 0) + 1

    @settings(max_examples=count // 2, **options)
    @given(HEADS, bodies())
    def with_bodies(head, asked):
        saw(send_body(server, head, *asked))

    @settings(max_examples=count // 4, **options)
    @given(HEADS, damaged())
    def with_damaged_ones(head, asked):
        saw(send_body(server, head, *asked))

    @settings(max_examples=count - count // 2 - count // 4, **options)
    @given(heads())
    def with_heads(data):
        status = status_of(answered(server, data, end=True))
        assert status is None or status == 200 or 400 <= status < 500 or status == 503, (status, data)
        saw(status)

    for each in (with_bodies, with_damaged_ones, with_heads):
        each()
    server.wait_until_free()
    return seen


if __name__ == "__main__":
    begun = time.monotonic()
    with running() as server:
        found = attack(server, int(sys.argv[1]))
    print(f"{sum(found.values()):,} requests in {time.monotonic() - begun:.1f} s, answered with", found)
