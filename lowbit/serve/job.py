"""Turns an HTTP request into sequences of the engine, each with its sampling settings, limit and seed."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lowbit.engine import CompiledGrammar, Detokenizer, Request, Sampling
from lowbit.serve.answer import AnswerParser
from lowbit.serve.errors import encoded, refused, too_long
from lowbit.serve.item_responses import ItemResponses
from lowbit.serve.response_schema import ResponsesRequest
from lowbit.serve.responses import ChatResponses, CompletionResponses, Responses
from lowbit.serve.schema import ChatCompletionRequest, CompletionRequest, GenerationBody, NamedToolChoice
from lowbit.serve.service import Service
from lowbit.serve.stream import Push
from lowbit.serve.tools import THINK, AnswerFormat
from lowbit.serve.worker import OutputCollector, SequenceOutput, ServedSequence

COMPLETION_TOKENS = 16
"""Default limit of new tokens of a completion, as in OpenAI's API. A chat is limited only by the context length."""

FEW_LOGPROBS = 8
"""Maximum number of tokens whose log-probabilities are encoded on the event loop, which takes up to 0.2 ms. More tokens, such
as those of a whole response, take up to a second, so they are encoded in a thread. If the thread encoded every token, 16
streams would lose 10 % of their tokens/s (a tiny model on two cores, 2026-11-23).
"""

REASONING_TOKENS = 16
"""Number of tokens at the end of a prompt in which the marker that begins reasoning is searched; it may be several tokens."""

NEXT_SEED = 0x9E3779B97F4A7C15
"""Difference between the seeds of a request's sequences: 2^64 divided by the golden ratio. The first sequence has the seed of
the request."""


@dataclass(eq=False)
class GenerationJob:
    """The sequences of a request, the collector of their outputs, and the form of the response."""

    service: Service
    params: GenerationBody
    sequences: list[ServedSequence]
    collector: OutputCollector
    answer: Responses
    closed: bool = False

    def start(self) -> None:
        """Submits the sequences to the engine."""
        self.service.worker.submit(self.sequences)

    def close(self) -> None:
        """Cancels unfinished sequences and gives back their quota."""
        if not self.closed:
            self.closed = True
            self.service.worker.cancel(self.sequences)
            self.service.quota.give_back(len(self.sequences))

    async def whole(self) -> bytes:
        """Waits for the whole response and returns it as JSON. Raises ApiError if one of its sequences fails."""
        joined: dict[int, SequenceOutput] = {}
        ended = 0
        while ended < len(self.sequences):
            for output in await self.outputs():
                before = joined.get(output.index)
                joined[output.index] = output if before is None else before.followed_by(output)
                ended += output.finish_reason is not None

        return await self._encode(lambda: encoded(self.answer.complete(joined)), joined.values())

    async def _encode(self, encode: Callable[[], bytes], outputs: Iterable[SequenceOutput]) -> bytes:
        """Returns the result of `encode`, called in a thread if the outputs have the log-probabilities of many tokens."""
        tokens = 0 if self.params.num_logprobs is None else sum(len(output.sampled) for output in outputs)
        return encode() if tokens <= FEW_LOGPROBS else await self.service.prompts.beside(encode)

    async def outputs(self) -> list[SequenceOutput]:
        """Waits for outputs and returns them; raises ApiError if a sequence failed."""
        outputs = await self.collector.fetch()
        for output in outputs:
            if output.error is not None:
                raise output.error
        return outputs

    def events(self, outputs: list[SequenceOutput]) -> Any:
        """Returns a function that sends the response as server-sent events, beginning with `outputs`."""

        def write(push: Push) -> Coroutine[Any, Any, None]:
            return self._write(push, outputs)

        return write

    async def _write(self, push: Push, outputs: list[SequenceOutput]) -> None:
        usage = self.params.includes_usage
        begun: set[int] = set()
        ended = 0
        while True:
            for output in outputs:
                if output.error is not None:
                    await push(self.answer.failure(output.error))
                    return
            start = b"" if begun else self.answer.begin()
            data = start + await self._encode(functools.partial(self._events, outputs, begun), outputs)
            ended += sum(output.finish_reason is not None for output in outputs)
            if data:
                await push(data)
            if ended == len(self.sequences):
                break
            outputs = await self.collector.fetch()
        await push(self.answer.end(usage))

    def _events(self, outputs: Sequence[SequenceOutput], begun: set[int]) -> bytes:
        """Returns the events of some outputs. `begun`: sequences that have had events; the sequences of `outputs` are added."""
        events = []
        for output in outputs:
            events.append(self.answer.events(output, output.index not in begun, self.params.includes_usage))
            begun.add(output.index)
        return b"".join(events)


def sequence_count(params: GenerationBody) -> int:
    """Returns the number of sequences of a request."""
    return params.choices * (len(params.prompts) if isinstance(params, CompletionRequest) else 1)


def make_job(service: Service, params: GenerationBody, asked: ResponsesRequest | None = None) -> GenerationJob:
    """Encodes the prompts of a request and makes its sequences. `asked`: the request to /v1/responses from which `params` was
    made. Raises ApiError if a sequence can never run.
    """
    fronts: list[str] = []
    if isinstance(params, ChatCompletionRequest):
        form = service.answer_format
        messages = [message.for_template() for message in params.messages]
        prompts = [service.prompts.of_conversation(messages, params.offered or None)]
    else:
        assert isinstance(params, CompletionRequest)
        form = AnswerFormat()
        prompts = service.prompts.of_prompts(params.prompts)
        fronts = [service.prompts.text_of(prompt) for prompt in params.prompts] if params.echo else []
    opened = form.thinks and _opens_reasoning(service, prompts[0])
    grammar = _grammar(service, params, form, opened)
    seed = secrets.randbits(63) if params.seed is None else params.seed
    collector = OutputCollector()
    sequences: list[ServedSequence] = []
    for ids in prompts:
        for _ in range(params.choices):
            index = len(sequences)
            sampling = _sampling(service, params, (seed + index * NEXT_SEED) % (1 << 64))
            request = _request(service, params, ids, sampling, grammar)
            stream = Detokenizer(service.tokenizer, ids, params.stops, skip_special_tokens=not form.shown)
            sequences.append(ServedSequence(request, stream, collector, index, hidden=form.hidden))
    arguments = (
        params.model, sequences, params.choices, service.token_texts,
        params.num_logprobs is not None, fronts,
    )  # fmt: skip
    if isinstance(params, ChatCompletionRequest):
        names = [function.name for function in params.callable_functions]
        parsers = [AnswerParser(form, names, opened) for _ in sequences]
        if asked is not None:
            items = ItemResponses(*arguments, parser=parsers[0], asked=asked, tokenizer=service.tokenizer)
            return GenerationJob(service, params, sequences, collector, items)
        return GenerationJob(service, params, sequences, collector, ChatResponses(*arguments, parsers=parsers))
    return GenerationJob(service, params, sequences, collector, CompletionResponses(*arguments))


def _opens_reasoning(service: Service, prompt: list[int]) -> bool:
    """True if a prompt ends with the beginning of reasoning, as some templates do."""
    text: str = service.tokenizer.decode(prompt[-REASONING_TOKENS:])  # type: ignore[assignment]
    return text.rstrip().endswith(THINK)


def _grammar(service: Service, params: GenerationBody, form: AnswerFormat, opened: bool) -> CompiledGrammar | None:
    """Returns the grammar of a request's answers; None if they may be any text. Raises ApiError for a grammar that is wrong or
    cannot be enforced.
    """
    grammar = params.grammar()
    if grammar is not None:
        return service.grammars.compile(form.answer(grammar, opened), params.grammar_fields[0])
    if not isinstance(params, ChatCompletionRequest) or not params.callable_functions:
        return None
    strict = any(function.strict for function in params.callable_functions)
    single = params.parallel_tool_calls is False
    if not (params.must_call or strict or single):
        return None
    param = "tool_choice" if params.must_call else "tools" if strict else "parallel_tool_calls"
    if form.tools is None:
        raise refused(param, "this model's chat template has no format of calls that is known here, so none can be enforced")
    if not params.must_call and not form.marks_calls:
        if strict:
            why = (
                f"calls in the format of {form.tools.value} can only be strict with tool_choice required, or with one function"
            )
            raise refused(param, why)
        return None  # an answer of these formats has at most one call
    functions = [function.model_dump(exclude_none=True) for function in params.callable_functions]
    many = not single and not isinstance(params.tool_choice, NamedToolChoice)
    calls = form.calls(functions, many, opened, text=not params.must_call)
    return service.grammars.compile(calls, "tools")


def _request(
    service: Service, params: GenerationBody, ids: list[int], sampling: Sampling, grammar: CompiledGrammar | None
) -> Request:
    """Returns the engine's request for one sequence. Raises ApiError if it can never run."""
    most = service.engine.max_length
    left = most - len(ids)
    param = "messages" if isinstance(params, ChatCompletionRequest) else "prompt"
    if left < 1:
        raise too_long(param, f"a prompt of {len(ids):,} tokens", f"a sequence here has at most {most:,}, its answer included")
    limit = params.limit or (left if isinstance(params, ChatCompletionRequest) else min(left, COMPLETION_TOKENS))
    if limit > left:
        raise too_long(
            params.limit_name, f"{limit:,} after a prompt of {len(ids):,}", f"a sequence here has at most {most:,} tokens"
        )
    if sampling.min_new_tokens > limit:
        raise refused("min_tokens", f"{sampling.min_new_tokens:,} are more than the {limit:,} that the sequence may have")
    stops = frozenset() if params.ignore_eos else frozenset(service.engine.stop_token_ids)
    adapter = service.adapter_of(params.model)
    return Request(ids, limit, sampling, stops, top_logprobs=params.num_logprobs or 0, grammar=grammar, adapter=adapter)


def _sampling(service: Service, params: GenerationBody, seed: int) -> Sampling:
    """Returns the sampling settings of a sequence; unset fields take the model's values."""

    def setting(name: str, default: float) -> Any:
        value = getattr(params, name)
        return service.defaults.get(name, default) if value is None else value

    bias = {int(token): value for token, value in (params.logit_bias or {}).items()}
    for token in bias:
        if token >= service.vocab:
            raise refused("logit_bias", f"tokens are from 0 to {service.vocab - 1:,}, got {token:,}")
    return Sampling(
        temperature=setting("temperature", 1.0), top_k=max(0, setting("top_k", 0)), top_p=setting("top_p", 1.0),
        min_p=setting("min_p", 0.0), repetition_penalty=setting("repetition_penalty", 1.0),
        presence_penalty=params.presence_penalty or 0.0, frequency_penalty=params.frequency_penalty or 0.0, seed=seed,
        logit_bias=tuple(bias.items()), min_new_tokens=0 if params.ignore_eos else params.min_tokens or 0,
    )  # fmt: skip
