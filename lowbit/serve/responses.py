"""Responses to chats and completions in OpenAI's form, whole or as server-sent events. item_responses.py has the responses of
/v1/responses.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lowbit.engine import FinishReason, SampledToken
from lowbit.serve.answer import AnswerParser, Piece
from lowbit.serve.chat import TokenTexts
from lowbit.serve.errors import ApiError, encoded
from lowbit.serve.worker import SequenceOutput, ServedSequence

LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""

BROKEN = "\ufffd"


def event(value: dict[str, Any]) -> bytes:
    """Returns a server-sent event without a name."""
    return b"data: " + encoded(value) + b"\n\n"


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


@dataclass
class Responses:
    """The response to one HTTP request. `each`: number of sequences per prompt. `logprobs`: True if log-probabilities are
    reported."""

    model: str
    sequences: Sequence[ServedSequence]
    each: int
    names: TokenTexts
    logprobs: bool
    fronts: Sequence[str] = ()
    """Text in front of each prompt's output: the prompt itself if it is echoed."""
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    prefix = whole = chunk = ""

    def usage(self) -> dict[str, Any]:
        """Returns the number of prompt tokens, each prompt counted once, and of generated tokens so far."""
        first_of_each = self.sequences[:: self.each]
        prompt = sum(len(sequence.request.prompt) for sequence in first_of_each)
        sampled = sum(len(sequence.submitted_state.sampled) for sequence in self.sequences)
        shared = sum(sequence.submitted_state.cached_tokens for sequence in first_of_each)
        return {
            "prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": shared},
        }  # fmt: skip

    def complete(self, outputs: dict[int, SequenceOutput]) -> dict[str, Any]:
        """Returns the whole response, from the joined output of each sequence."""
        choices = [self._choice(outputs[index]) for index in sorted(outputs)]
        return {**self._head(self.whole), "choices": choices, "usage": self.usage()}

    def chunks(self, output: SequenceOutput, first: bool, usage: bool) -> list[dict[str, Any]]:
        """Returns the chunks of an output in a stream. `usage`: True if the last chunk of the stream has the usage, so that all
        others have null.
        """
        blank = {"usage": None} if usage else {}
        head = self._head(self.chunk)
        return [{**head, "choices": [delta], **blank} for delta in self._deltas(output, first)]

    def last_chunk(self) -> dict[str, Any]:
        """The chunk with the usage."""
        return {**self._head(self.chunk), "choices": [], "usage": self.usage()}

    def begin(self) -> bytes:
        """Returns the events before the first output."""
        return b""

    def events(self, output: SequenceOutput, first: bool, usage: bool) -> bytes:
        """Returns the events of an output; arguments as in `chunks`."""
        return b"".join(map(event, self.chunks(output, first, usage)))

    def end(self, usage: bool) -> bytes:
        """Returns the events after the last output. `usage`: True adds an event with the usage."""
        return (event(self.last_chunk()) if usage else b"") + b"data: [DONE]\n\n"

    def failure(self, error: ApiError) -> bytes:
        """Returns the event of an error, which ends a stream."""
        return event(error.body())

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"{self.prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _reason(self, output: SequenceOutput) -> str | None:
        return None if output.finish_reason is None else output.finish_reason.value

    def _choice(self, output: SequenceOutput) -> dict[str, Any]:
        raise NotImplementedError

    def _deltas(self, output: SequenceOutput, first: bool) -> list[dict[str, Any]]:
        raise NotImplementedError


@dataclass
class ChatResponses(Responses):
    """Responses of /v1/chat/completions."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    parsers: Sequence[AnswerParser] = ()
    """Reads the answer of each sequence."""

    def _reason(self, output: SequenceOutput) -> str | None:
        stopped = output.finish_reason is FinishReason.STOP
        return "tool_calls" if stopped and self.parsers[output.index].has_calls else super()._reason(output)

    def _choice(self, output: SequenceOutput) -> dict[str, Any]:
        pieces = self.parsers[output.index].feed(output.text, last=True)
        content, reasoning = ("".join(getattr(piece, name) for piece in pieces) for name in ("content", "reasoning"))
        calls = [_call(piece, _arguments(pieces, piece.index)) for piece in pieces if piece.name is not None]
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        logprobs = self._logprobs(output.sampled) if self.logprobs else None
        return {"index": output.index, "message": message, "logprobs": logprobs, "finish_reason": self._reason(output)}

    def _deltas(self, output: SequenceOutput, first: bool) -> list[dict[str, Any]]:
        deltas = []
        if first:
            deltas.append(self._delta(output, {"role": "assistant", "content": ""}))
        pieces = self.parsers[output.index].feed(output.text, last=output.finish_reason is not None)
        logprobs = self._logprobs(output.sampled) if self.logprobs and output.sampled else None
        if logprobs is not None and not pieces:
            pieces = [Piece()]
        for piece in pieces:
            deltas.append(self._delta(output, _delta_of(piece), logprobs))
            logprobs = None  # only the first piece of an output has the log-probabilities
        if output.finish_reason is not None:
            deltas.append({**self._delta(output, {}), "finish_reason": self._reason(output)})
        return deltas

    def _delta(self, output: SequenceOutput, delta: dict[str, Any], logprobs: object = None) -> dict[str, Any]:
        return {"index": output.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, sampled: Sequence[SampledToken]) -> dict[str, Any]:
        content = [
            {**self._entry(each.token, each.logprob), "top_logprobs": [self._entry(*pair) for pair in each.top_logprobs]}
            for each in sampled
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.names[token]
        bytes_ = None if BROKEN in text else list(text.encode())  # a token that is part of a character has no text by itself
        return {"token": text, "logprob": _finite(logprob), "bytes": bytes_}


def _call(piece: Piece, arguments: str) -> dict[str, Any]:
    """Returns a call that begins with a piece."""
    return {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": arguments}}


def _arguments(pieces: Sequence[Piece], index: int) -> str:
    """Returns the arguments of a call, whose pieces may be among others."""
    return "".join(piece.arguments for piece in pieces if piece.index == index)


def _delta_of(piece: Piece) -> dict[str, Any]:
    """Returns a piece as the delta of a chunk."""
    if piece.name is not None:
        return {"tool_calls": [{"index": piece.index, **_call(piece, "")}]}
    if piece.arguments:
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.arguments}}]}
    return {"reasoning_content": piece.reasoning} if piece.reasoning else {"content": piece.content}


@dataclass
class CompletionResponses(Responses):
    """Responses of /v1/completions."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def _choice(self, output: SequenceOutput) -> dict[str, Any]:
        return self._part(output, self._front(output) + output.text)

    def _deltas(self, output: SequenceOutput, first: bool) -> list[dict[str, Any]]:
        text = (self._front(output) if first else "") + output.text
        is_new = text or output.finish_reason is not None or (self.logprobs and output.sampled)
        return [self._part(output, text)] if is_new else []

    def _front(self, output: SequenceOutput) -> str:
        return self.fronts[output.index // self.each] if self.fronts else ""

    def _part(self, output: SequenceOutput, text: str) -> dict[str, Any]:
        logprobs = self._logprobs(output) if self.logprobs else None
        return {"index": output.index, "text": text, "logprobs": logprobs, "finish_reason": self._reason(output)}

    def _logprobs(self, output: SequenceOutput) -> dict[str, Any]:
        return {
            "tokens": [self.names[each.token] for each in output.sampled],
            "token_logprobs": [_finite(each.logprob) for each in output.sampled],
            "top_logprobs": [
                {self.names[token]: _finite(logprob) for token, logprob in each.top_logprobs} for each in output.sampled
            ],
            "text_offset": list(output.text_offsets),
        }  # fmt: skip
