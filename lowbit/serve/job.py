"""One HTTP request as texts for the engine: what was asked becomes settings, limits and seeds of each."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lowbit.engine import Request, Sampling, TextStream
from lowbit.serve.answer import Answer, ChatAnswer, CompletionAnswer
from lowbit.serve.errors import encoded, refused, too_long
from lowbit.serve.schema import Asked, ChatAsked, CompletionAsked
from lowbit.serve.service import Service
from lowbit.serve.stream import Push
from lowbit.serve.worker import Mailbox, Piece, Text

COMPLETION_TOKENS = 16
"""Of a completion that does not say how many; OpenAI's number. A chat may be as long as a text can."""

FEW_LOGPROBS = 8
"""Tokens whose log-probabilities are written on the event loop, in up to 0.2 ms. More, those of a long text, whole or for a
client that reads slowly, take up to a second; but every token in another thread costs 16 streams a tenth of their tokens a
second (a tiny model on two cores, 2026-11-23)."""

NEXT_SEED = 0x9E3779B97F4A7C15
"""Between the seeds of a request's texts, of which the first has the seed itself: 2^64 over the golden ratio."""


@dataclass(eq=False)
class Job:
    """The texts of a request, where they arrive, and the form of their answer."""

    service: Service
    asked: Asked
    texts: list[Text]
    mailbox: Mailbox
    answer: Answer
    closed: bool = False

    def start(self) -> None:
        """Hands the texts to the engine."""
        self.service.worker.submit(self.texts)

    def close(self) -> None:
        """Ends what has not ended, and gives the seats back."""
        if not self.closed:
            self.closed = True
            self.service.worker.cancel(self.texts)
            self.service.seats.give_back(len(self.texts))

    async def whole(self) -> bytes:
        """The whole answer as JSON; raises ApiError if one of its texts fails."""
        found: dict[int, Piece] = {}
        ended = 0
        while ended < len(self.texts):
            for piece in await self.pieces():
                before = found.get(piece.index)
                found[piece.index] = piece if before is None else before.followed_by(piece)
                ended += piece.end is not None

        return await self._made(lambda: encoded(self.answer.complete(found)), found.values())

    async def _made(self, make: Callable[[], bytes], pieces: Iterable[Piece]) -> bytes:
        """What `make` makes of some pieces, beside the event loop if they have the log-probabilities of many tokens."""
        tokens = 0 if self.asked.likeliest is None else sum(len(piece.drawn) for piece in pieces)
        return make() if tokens <= FEW_LOGPROBS else await self.service.prompts.beside(make)

    async def pieces(self) -> list[Piece]:
        """Some more pieces; raises ApiError if one of them says that its text failed."""
        pieces = await self.mailbox.fetch()
        for piece in pieces:
            if piece.error is not None:
                raise piece.error
        return pieces

    def events(self, pieces: list[Piece]) -> Any:
        """A function that pushes the answer as server-sent events, from its first pieces on."""

        def write(push: Push) -> Coroutine[Any, Any, None]:
            return self._write(push, pieces)

        return write

    async def _write(self, push: Push, pieces: list[Piece]) -> None:
        usage = self.asked.includes_usage
        begun: set[int] = set()
        ended = 0
        while True:
            for piece in pieces:
                if piece.error is not None:
                    await push(_event(piece.error.body()))
                    return
            data = await self._made(functools.partial(self._chunks, pieces, begun), pieces)
            ended += sum(piece.end is not None for piece in pieces)
            if data:
                await push(data)
            if ended == len(self.texts):
                break
            pieces = await self.mailbox.fetch()
        await push((_event(self.answer.last_chunk()) if usage else b"") + b"data: [DONE]\n\n")

    def _chunks(self, pieces: Sequence[Piece], begun: set[int]) -> bytes:
        """The events of some more pieces; `begun`: the texts that have had one, which those of `pieces` join."""
        chunks: list[dict[str, Any]] = []
        for piece in pieces:
            chunks += self.answer.chunks(piece, piece.index not in begun, self.asked.includes_usage)
            begun.add(piece.index)
        return b"".join(map(_event, chunks))


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + encoded(value) + b"\n\n"


def texts_asked(asked: Asked) -> int:
    """How many texts a request is for."""
    return asked.choices * (len(asked.prompts) if isinstance(asked, CompletionAsked) else 1)


def make_job(service: Service, asked: Asked) -> Job:
    """The texts of a request, whose prompts are encoded here; raises ApiError for what can never be computed."""
    fronts: list[str] = []
    if isinstance(asked, ChatAsked):
        tools = [tool.model_dump(exclude_none=True) for tool in asked.tools or ()] if asked.tool_choice != "none" else None
        prompts = [service.prompts.of_dialogue([message.for_template() for message in asked.messages], tools or None)]
    else:
        assert isinstance(asked, CompletionAsked)
        prompts = service.prompts.of_prompts(asked.prompts)
        fronts = [service.prompts.text_of(prompt) for prompt in asked.prompts] if asked.echo else []
    seed = secrets.randbits(63) if asked.seed is None else asked.seed
    mailbox = Mailbox()
    texts: list[Text] = []
    for ids in prompts:
        for _ in range(asked.choices):
            index = len(texts)
            sampling = _sampling(service, asked, (seed + index * NEXT_SEED) % (1 << 64))
            request = _request(service, asked, ids, sampling)
            texts.append(Text(request, TextStream(service.tokenizer, ids, asked.stops), mailbox, index))
    made = (
        service.name, [text.request for text in texts], asked.choices, service.token_texts, asked.likeliest is not None, fronts,
    )  # fmt: skip
    answer = ChatAnswer(*made) if isinstance(asked, ChatAsked) else CompletionAnswer(*made)
    return Job(service, asked, texts, mailbox, answer)


def _request(service: Service, asked: Asked, ids: list[int], sampling: Sampling) -> Request:
    """One text for the engine; raises ApiError if it can never run."""
    most = service.engine.max_length
    room = most - len(ids)
    param = "messages" if isinstance(asked, ChatAsked) else "prompt"
    if room < 1:
        raise too_long(param, f"a prompt of {len(ids):,} tokens", f"a text here has at most {most:,}, its answer included")
    limit = asked.limit or (room if isinstance(asked, ChatAsked) else min(room, COMPLETION_TOKENS))
    if limit > room:
        raise too_long(
            asked.limit_name, f"{limit:,} after a prompt of {len(ids):,}", f"a text here has at most {most:,} tokens"
        )
    if sampling.min_new_tokens > limit:
        raise refused("min_tokens", f"{sampling.min_new_tokens:,} are more than the {limit:,} that the text may have")
    ends = frozenset() if asked.ignore_eos else frozenset(service.engine.ends)
    request = Request(ids, limit, sampling, ends, likeliest=asked.likeliest or 0)
    reasons = service.engine.batch.refusals(request)
    if reasons:
        raise too_long(param, "; ".join(reasons), "ask for fewer tokens (max_tokens)")
    return request


def _sampling(service: Service, asked: Asked, seed: int) -> Sampling:
    """How the tokens of a text are drawn, the model's own settings where the request does not say."""

    def said(name: str, otherwise: float) -> Any:
        value = getattr(asked, name)
        return service.defaults.get(name, otherwise) if value is None else value

    bias = {int(token): value for token, value in (asked.logit_bias or {}).items()}
    for token in bias:
        if token >= service.vocab:
            raise refused("logit_bias", f"tokens are from 0 to {service.vocab - 1:,}, got {token:,}")
    return Sampling(
        temperature=said("temperature", 1.0), top_k=max(0, said("top_k", 0)), top_p=said("top_p", 1.0),
        min_p=said("min_p", 0.0), repetition_penalty=said("repetition_penalty", 1.0),
        presence_penalty=asked.presence_penalty or 0.0, frequency_penalty=asked.frequency_penalty or 0.0, seed=seed,
        logit_bias=tuple(bias.items()), min_new_tokens=0 if asked.ignore_eos else asked.min_tokens or 0,
    )  # fmt: skip
