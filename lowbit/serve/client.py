"""The other side of the API, for `lowbit chat`: a dialogue with a server, or with a model in this process."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import httpx

from lowbit.engine import Request, Sampling, TextStream
from lowbit.pipeline import Pipeline
from lowbit.serve.chat import rendered
from lowbit.serve.service import configured

Messages = Sequence[Mapping[str, str]]


class Dialogue(Protocol):
    """Whoever answers; `name` is the model's."""

    name: str

    def answer(self, messages: Messages, temperature: float, max_tokens: int) -> Iterator[str]:
        """The next turn, piece by piece; raises ValueError where there is none, in words."""


class Remote:
    """A model behind an OpenAI-compatible server at `url`, with or without its /v1; the first that the server has unless `name`
    says which. Raises ValueError where nobody answers as such a server does."""

    def __init__(self, url: str, key: str | None = None, name: str | None = None) -> None:
        base = url.rstrip("/")
        self._base = base if base.endswith("/v1") else f"{base}/v1"
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(headers=headers, timeout=httpx.Timeout(10, read=600))
        found = self._asked("GET", "/models").get("data")
        names = [str(model.get("id")) for model in found if isinstance(model, dict)] if isinstance(found, list) else []
        if not names or (name is not None and name not in names):
            raise ValueError(f"{url}: there is no model {name or ''} here; it has {', '.join(names) or 'none'}")
        self.name = name or names[0]

    def answer(self, messages: Messages, temperature: float, max_tokens: int) -> Iterator[str]:
        """The next turn, as it comes."""
        asked = {"model": self.name, "messages": messages, "temperature": temperature, "max_tokens": max_tokens, "stream": True}
        try:
            with self._client.stream("POST", f"{self._base}/chat/completions", json=asked) as response:
                if response.is_error:
                    response.read()
                    raise ValueError(_refusal(response))
                for line in _lines(response.iter_text()):
                    yield from _piece(line)
        except httpx.HTTPError as error:
            raise ValueError(f"{self._base}: {error or type(error).__name__}") from error

    def _asked(self, method: str, path: str) -> dict[str, Any]:
        try:
            response = self._client.request(method, self._base + path)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ValueError(f"{self._base}: {error or type(error).__name__}; is a server running there?") from error
        if response.is_error:
            raise ValueError(_refusal(response))
        return _json(response.text)


class Local:
    """A model of this process."""

    def __init__(self, pipe: Pipeline, name: str) -> None:
        if pipe.tokenizer.chat_template is None:
            raise ValueError(f"{name}: this model has no chat template; `lowbit generate` continues texts with it")
        self.pipe, self.name = pipe, name
        self._configured = configured(pipe.model)

    def answer(self, messages: Messages, temperature: float, max_tokens: int) -> Iterator[str]:
        """The next turn, as it comes."""
        tokenizer, engine = self.pipe.tokenizer, self.pipe.engine
        text = rendered(tokenizer, [dict(message) for message in messages], None)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        room = engine.max_length - len(ids)
        if room < 1:
            raise ValueError(f"the dialogue has {len(ids):,} tokens, a text here at most {engine.max_length:,}")
        stream = TextStream(tokenizer, ids)
        sampling = Sampling(**{**self._configured, "temperature": temperature, "seed": secrets.randbits(63)})
        request = Request(ids, min(room, max_tokens), sampling, frozenset(engine.ends))
        try:
            for drawn in engine.stream(engine.submit(request)):
                if piece := stream.push(drawn.token):
                    yield piece
        except RuntimeError as error:
            raise ValueError(f"computing the answer failed: {error}") from error
        if rest := stream.finish():
            yield rest


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Lines of server-sent events, which end at no other characters than these."""
    rest = ""
    for text in texts:
        *lines, rest = (rest + text).split("\n")
        yield from (line.removesuffix("\r") for line in lines)
    yield rest


def _piece(line: str) -> Iterator[str]:
    """The text in a line of server-sent events."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return
    event = _json(line.removeprefix("data: "))
    if isinstance(event.get("error"), dict):
        raise ValueError(f"the server says: {event['error'].get('message')}")
    for choice in event.get("choices") or []:
        if piece := (choice.get("delta") or {}).get("content"):
            yield piece


def _refusal(response: httpx.Response) -> str:
    """What a server says instead of an answer."""
    error = _json(response.text).get("error")
    message = error.get("message") if isinstance(error, dict) else None
    return f"the server says {response.status_code}: {message or response.reason_phrase}"


def _json(text: str) -> dict[str, Any]:
    """The object in a text; empty if there is none."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
