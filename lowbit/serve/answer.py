"""Answers in OpenAI's form, whole or in chunks, of chats and of completions."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lowbit.engine import Drawn, Request
from lowbit.serve.chat import TokenTexts
from lowbit.serve.worker import Piece

LEAST_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON has not."""

BROKEN = "\ufffd"


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


@dataclass
class Answer:
    """The answer to one HTTP request: texts 0, 1, .. of `requests`, `each` of them for each prompt."""

    model: str
    requests: Sequence[Request]
    each: int
    names: TokenTexts
    logprobs: bool
    fronts: Sequence[str] = ()
    """What stands in front of the text of each prompt: itself, if it is echoed."""
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    prefix = whole = chunk = ""

    def usage(self) -> dict[str, Any]:
        """Tokens of prompts, each once, and of all texts as far as they are."""
        prompt = sum(len(request.prompt) for request in self.requests[:: self.each])
        drawn = sum(len(request.drawn) for request in self.requests)
        shared = sum(request.shared for request in self.requests[:: self.each])
        return {
            "prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn,
            "prompt_tokens_details": {"cached_tokens": shared},
        }  # fmt: skip

    def complete(self, pieces: dict[int, Piece]) -> dict[str, Any]:
        """The whole answer, from a whole piece of each text."""
        choices = [self._choice(pieces[index]) for index in sorted(pieces)]
        return {**self._head(self.whole), "choices": choices, "usage": self.usage()}

    def chunks(self, piece: Piece, first: bool, usage: bool) -> list[dict[str, Any]]:
        """What a stream says of one more piece; `usage`: whether the stream ends with its usage, which earlier chunks lack."""
        nothing = {"usage": None} if usage else {}
        head = self._head(self.chunk)
        return [{**head, "choices": [delta], **nothing} for delta in self._deltas(piece, first)]

    def last_chunk(self) -> dict[str, Any]:
        """The chunk of the usage."""
        return {**self._head(self.chunk), "choices": [], "usage": self.usage()}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"{self.prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _reason(self, piece: Piece) -> str | None:
        return None if piece.end is None else piece.end.value

    def _choice(self, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def _deltas(self, piece: Piece, first: bool) -> list[dict[str, Any]]:
        raise NotImplementedError


@dataclass
class ChatAnswer(Answer):
    """Of /v1/chat/completions."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _choice(self, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        logprobs = self._logprobs(piece.drawn) if self.logprobs else None
        return {"index": piece.index, "message": message, "logprobs": logprobs, "finish_reason": self._reason(piece)}

    def _deltas(self, piece: Piece, first: bool) -> list[dict[str, Any]]:
        made = []
        if first:
            made.append(self._delta(piece, {"role": "assistant", "content": ""}))
        if piece.text or (self.logprobs and piece.drawn):
            logprobs = self._logprobs(piece.drawn) if self.logprobs else None
            made.append(self._delta(piece, {"content": piece.text}, logprobs))
        if piece.end is not None:
            made.append({**self._delta(piece, {}), "finish_reason": self._reason(piece)})
        return made

    def _delta(self, piece: Piece, delta: dict[str, Any], logprobs: object = None) -> dict[str, Any]:
        return {"index": piece.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, drawn: Sequence[Drawn]) -> dict[str, Any]:
        content = [
            {**self._entry(each.token, each.logprob), "top_logprobs": [self._entry(*pair) for pair in each.likeliest]}
            for each in drawn
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.names[token]
        bytes_ = None if BROKEN in text else list(text.encode())  # a part of a character has no text of its own
        return {"token": text, "logprob": _finite(logprob), "bytes": bytes_}


@dataclass
class CompletionAnswer(Answer):
    """Of /v1/completions."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def _choice(self, piece: Piece) -> dict[str, Any]:
        return self._part(piece, self._front(piece) + piece.text)

    def _deltas(self, piece: Piece, first: bool) -> list[dict[str, Any]]:
        text = (self._front(piece) if first else "") + piece.text
        said = text or piece.end is not None or (self.logprobs and piece.drawn)
        return [self._part(piece, text)] if said else []

    def _front(self, piece: Piece) -> str:
        return self.fronts[piece.index // self.each] if self.fronts else ""

    def _part(self, piece: Piece, text: str) -> dict[str, Any]:
        logprobs = self._logprobs(piece) if self.logprobs else None
        return {"index": piece.index, "text": text, "logprobs": logprobs, "finish_reason": self._reason(piece)}

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        return {
            "tokens": [self.names[each.token] for each in piece.drawn],
            "token_logprobs": [_finite(each.logprob) for each in piece.drawn],
            "top_logprobs": [
                {self.names[token]: _finite(logprob) for token, logprob in each.likeliest} for each in piece.drawn
            ],
            "text_offset": list(piece.places),
        }  # fmt: skip
