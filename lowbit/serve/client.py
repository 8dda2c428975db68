"""The client side of the API, for `lowbit chat`: a conversation with a server, or with a model in this process."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import httpx

from lowbit.engine import Detokenizer, EngineFailed, Request, RequestFailed, Sampling
from lowbit.pipeline import Pipeline
from lowbit.serve.chat import rendered
from lowbit.serve.service import configured

MOST_BODY = 1 << 24
"""Maximum number of bytes of a list of models or of an error response; routers list hundreds of models in less than 1 MiB."""
MOST_LINE = 1 << 20
"""Maximum number of bytes of one server-sent event."""
MOST_OF_A_TOKEN = 1 << 12
"""Maximum number of bytes per token of an answer; an event with one token has about 200."""
MOST_NAME, MOST_NAMES, MOST_SHOWN = 256, 8, 500
"""Maximum number of characters of a model's name, of names in an error message, and of characters cited from the server."""

Messages = Sequence[Mapping[str, str]]


class ChatBackend(Protocol):
    """A model that answers, locally or behind a server; `name` is the model's name."""

    name: str

    def answer(self, messages: Messages, temperature: float, max_tokens: int) -> Iterator[str]:
        """Yields the text of the next turn in parts; raises ValueError if that fails."""


class RemoteChat:
    """A model behind an OpenAI-compatible server at `url`, which may end with /v1. `name` is the server's first model by
    default. Raises ValueError if no such server answers.

    The server is not trusted: its responses are bounded and checked, and redirects are not followed.
    """

    def __init__(self, url: str, key: str | None = None, name: str | None = None) -> None:
        base = url.rstrip("/")
        self._base = base if base.endswith("/v1") else f"{base}/v1"
        headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {key}"} if key else {})
        self._client = httpx.Client(headers=headers, timeout=httpx.Timeout(10, read=600))
        with self._request("GET", "/models", read=30) as response:
            found = _json(_body(response, MOST_BODY)).get("data")
        models = [model.get("id") for model in found if isinstance(model, dict)] if isinstance(found, list) else []
        names = [model for model in models if isinstance(model, str) and 0 < len(model) <= MOST_NAME]
        if not names or (name is not None and name not in names):
            more = f" and {len(names) - MOST_NAMES:,} more" if len(names) > MOST_NAMES else ""
            raise ValueError(
                f"{url}: there is no model {name or ''} here; it has {', '.join(names[:MOST_NAMES]) or 'none'}{more}"
            )
        self.name = name or names[0]

    def answer(self, messages: Messages, temperature: float, max_tokens: int) -> Iterator[str]:
        """Yields the text of the next turn in parts."""
        body = {"model": self.name, "messages": messages, "temperature": temperature, "max_tokens": max_tokens, "stream": True}
        most = MOST_BODY + max_tokens * MOST_OF_A_TOKEN
        with self._request("POST", "/chat/completions", json=body) as response:
            for line in _lines(_bounded(response, most)):
                if line == "data: [DONE]":
                    return
                yield from _event_text(line)

    @contextlib.contextmanager
    def _request(self, method: str, path: str, read: float = 600, **body: Any) -> Iterator[httpx.Response]:
        """Yields the response to a request before its body is read. Raises ValueError for connection errors and error
        statuses.
        """
        timeout = httpx.Timeout(10, read=read)
        try:
            with self._client.stream(method, self._base + path, timeout=timeout, **body) as response:
                if response.is_redirect:
                    where = response.headers.get("location", "")[:MOST_NAME]
                    raise ValueError(
                        f"{self._base}: the server redirects to {where!r}; if you trust that address, give it instead"
                    )
                if response.is_error:
                    raise ValueError(_refusal(response))
                yield response
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            raise ValueError(f"{self._base}: {error or type(error).__name__}; is a server running there?") from error


class LocalChat:
    """A model in this process."""

    def __init__(self, pipe: Pipeline, name: str) -> None:
        if pipe.tokenizer.chat_template is None:
            raise ValueError(f"{name}: this model has no chat template; `lowbit generate` continues texts with it")
        self.pipe, self.name = pipe, name
        self._configured = configured(pipe.model)

    def answer(self, messages: Messages, temperature: float, max_tokens: int) -> Iterator[str]:
        """Yields the text of the next turn in parts."""
        tokenizer, engine = self.pipe.tokenizer, self.pipe.engine
        text = rendered(tokenizer, [dict(message) for message in messages], None)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        left = engine.max_length - len(ids)
        if left < 1:
            raise ValueError(f"the conversation has {len(ids):,} tokens, a sequence here at most {engine.max_length:,}")
        stream = Detokenizer(tokenizer, ids)
        sampling = Sampling(**{**self._configured, "temperature": temperature, "seed": secrets.randbits(63)})
        request = Request(ids, min(left, max_tokens), sampling, frozenset(engine.stop_token_ids))
        try:
            for sampled in engine.stream(engine.submit(request)):
                if piece := stream.push(sampled.token):
                    yield piece
        except (RequestFailed, EngineFailed) as error:
            raise ValueError(f"computing the answer failed: {error}") from error
        if rest := stream.finish():
            yield rest


def _bounded(response: httpx.Response, most: int) -> Iterator[bytes]:
    """Yields the body in parts. Raises ValueError if it is longer than `most` bytes, or compressed, since compressed bytes
    could expand to gigabytes."""
    if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
        raise ValueError(f"the server sends its answer as {encoding[:MOST_NAME]!r}, which was not asked for")
    total = 0
    for data in response.iter_raw():
        total += len(data)
        if total > most:
            raise ValueError(f"the server sends more than {most:,} bytes, which is no plausible answer")
        yield data


def _body(response: httpx.Response, most: int) -> str:
    """Returns the whole body, of at most `most` bytes, as text."""
    return b"".join(_bounded(response, most)).decode(errors="replace")


def _lines(parts: Iterable[bytes]) -> Iterator[str]:
    """Yields the lines of server-sent events, which end at line feeds only; raises ValueError for one that is too long."""
    rest: list[bytes] = []  # parts of the current line, joined once, since each concatenation would copy
    length = 0
    for part in parts:
        *ended, last = part.split(b"\n")
        for line in ended:
            yield b"".join((*rest, line)).removesuffix(b"\r").decode(errors="replace")
            rest, length = [], 0
        rest.append(last)
        length += len(last)
        if length > MOST_LINE:
            raise ValueError(f"the server sends a line of more than {MOST_LINE:,} bytes, which is no plausible answer")
    yield b"".join(rest).decode(errors="replace")


def _event_text(line: str) -> Iterator[str]:
    """Yields the text in a line of server-sent events; raises ValueError for an event that is not in OpenAI's form."""
    if not line.startswith("data:") or not (data := line.removeprefix("data:").strip()):
        return
    event = _json(data)
    if (error := event.get("error")) is not None:
        message = error.get("message") if isinstance(error, dict) else error
        raise ValueError(f"the server says: {str(message)[:MOST_SHOWN]}")
    choices = event.get("choices")
    if not isinstance(choices, list):
        raise ValueError(f"the server sends what is no answer: {data[:MOST_NAME]!r}")
    for choice in choices:
        delta = choice.get("delta") if isinstance(choice, dict) else ()
        piece = delta.get("content") if isinstance(delta, dict) else delta
        if piece is not None and not isinstance(piece, str):
            raise ValueError(f"the server sends what is no text: {data[:MOST_NAME]!r}")
        if piece:
            yield piece


def _refusal(response: httpx.Response) -> str:
    """Returns the error message of an error response."""
    error = _json(_body(response, MOST_BODY)).get("error")
    message = error.get("message") if isinstance(error, dict) else None
    return f"the server says {response.status_code}: {str(message or response.reason_phrase)[:MOST_SHOWN]}"


def _json(text: str) -> dict[str, Any]:
    """Returns the JSON object in a text; an empty one if there is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
