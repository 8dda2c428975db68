"""Bodies of requests, field by field, with OpenAI's names. Unknown fields are errors.

Fields of OpenAI's API that are not supported accept only values that have no effect.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from lowbit.engine.engine import Pooling
from lowbit.engine.grammar import Grammar
from lowbit.engine.request import MOST_LOGPROBS
from lowbit.ops.sample import LEAST_TEMPERATURE
from lowbit.serve.errors import ApiError, refused
from lowbit.serve.limits import (
    MOST_BIASES,
    MOST_CHOICES,
    MOST_GRAMMAR_CHARACTERS,
    MOST_MESSAGES,
    MOST_PROMPTS,
    MOST_STOP_CHARACTERS,
    MOST_STOPS,
    MOST_TOOLS,
)

Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
Count = Annotated[int, Field(ge=1, lt=1 << 31)]
StopString = Annotated[str, Field(min_length=1, max_length=MOST_STOP_CHARACTERS)]
Name = Annotated[str, Field(max_length=256)]


class StrictModel(BaseModel):
    """A model of exactly the declared fields and types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class StreamOptions(StrictModel):
    """Options of a stream."""

    include_usage: bool | None = None


class JsonSchema(StrictModel):
    """A schema with its name and description, which are not used. The schema is always enforced, as with `strict`."""

    name: Name
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """The form of an answer: any text, any JSON object, or the JSON that a schema allows. The type json_schema without a schema
    allows any JSON object."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to type json_schema, and must be there")
        return self


GrammarText = Annotated[str, Field(min_length=1, max_length=MOST_GRAMMAR_CHARACTERS)]
Choices = Annotated[list[GrammarText], Field(min_length=1, max_length=MOST_GRAMMAR_CHARACTERS, fail_fast=True)]


class StructuredOutputs(StrictModel):
    """The same as the fields `guided_*`, with the names that vLLM has used since version 0.12."""

    json_: Annotated[dict[str, Any] | GrammarText | None, Field(alias="json")] = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None

    @model_validator(mode="after")
    def _has_one(self) -> StructuredOutputs:
        if sum(value is not None for value in (self.json_, self.regex, self.choice, self.grammar)) != 1:
            raise ValueError("one of json, regex, choice and grammar")
        return self


GUIDES = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
"""Fields that constrain the answer, besides `response_format`."""


class GenerationBody(StrictModel):
    """Fields that /v1/completions and /v1/chat/completions share. A field is None if the client omits it."""

    model: Name
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=LEAST_TEMPERATURE, le=100)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MOST_BIASES)] | None = None
    user: Name | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | GrammarText | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    structured_outputs: StructuredOutputs | None = None

    @field_validator("stop")
    @classmethod
    def _stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        strings = [stop] if isinstance(stop, str) else stop or []
        if len(strings) > MOST_STOPS or not all(0 < len(s) <= MOST_STOP_CHARACTERS for s in strings):
            raise ValueError(f"up to {MOST_STOPS} strings of 1 to {MOST_STOP_CHARACTERS} characters")
        return stop

    @field_validator("logit_bias")
    @classmethod
    def _logit_bias(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for token, value in (bias or {}).items():
            if not (token.isascii() and token.isdigit() and str(int(token[:12])) == token):
                raise ValueError("its keys are token numbers")
            if not -100 <= value <= 100:
                raise ValueError("its values are from -100 to 100")
        return bias

    @field_validator("temperature")
    @classmethod
    def _temperature(cls, temperature: float | None) -> float | None:
        if temperature is not None and 0 < temperature < LEAST_TEMPERATURE:
            raise ValueError(f"0 for the most likely token, or {LEAST_TEMPERATURE} and more")
        return temperature

    @model_validator(mode="after")
    def _goes_together(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: belongs to stream=true")
        used = self.grammar_fields
        if len(used) > 1:
            raise ValueError(f"{used[1]}: goes without {used[0]}, which also says what the answer is")
        for name in ("ignore_eos", "min_tokens") if used else ():
            if getattr(self, name):
                raise ValueError(f"{name}: goes without {used[0]}, whose answer ends when it is complete")
        return self

    @property
    def grammar_fields(self) -> list[str]:
        """Names of the fields that constrain the answer."""
        names = [name for name in GUIDES if getattr(self, name) is not None]
        plain = self.response_format is None or self.response_format.type == "text"
        return names if plain else ["response_format", *names]

    def grammar(self) -> Grammar | None:
        """Returns the grammar of the answer; None if it may be any text. Raises ApiError for a schema that is not JSON."""
        form = self.response_format
        if form is not None and form.json_schema is not None and form.json_schema.schema_ is not None:
            return Grammar.json_schema(form.json_schema.schema_)
        if form is not None and form.type != "text":
            return Grammar.json_object()
        nested = self.structured_outputs or StructuredOutputs.model_construct()
        schema, regex = self.guided_json or nested.json_, self.guided_regex or nested.regex
        choice, lark = self.guided_choice or nested.choice, self.guided_grammar or nested.grammar
        if self.guided_json is not None or nested.json_ is not None:
            return Grammar.json_schema(_schema_in(schema or {}, self.grammar_fields[0]))
        if regex is not None:
            return Grammar.regex(regex)
        if choice is not None:
            return Grammar.choice(choice)
        return None if lark is None else Grammar.lark(lark)

    @property
    def choices(self) -> int:
        """Number of sequences for each prompt."""
        return self.n or 1

    @property
    def limit(self) -> int | None:
        """Maximum number of new tokens; None if omitted."""
        return self.max_tokens

    @property
    def limit_name(self) -> str:
        """Name of the field that sets `limit`."""
        return "max_tokens"

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """True if the stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def num_logprobs(self) -> int | None:
        """Number of most likely tokens to report with each token; None for no log-probabilities."""
        raise NotImplementedError


Prompts = (
    str
    | Tokens
    | Annotated[
        Annotated[list[str], Field(fail_fast=True)] | Annotated[list[Tokens], Field(fail_fast=True)],
        Field(min_length=1, max_length=MOST_PROMPTS),
    ]
)


def prompts_of(given: str | list[Any]) -> list[str | list[int]]:
    """Returns each prompt of a field that may have one or several, as text or as tokens."""
    return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)


class CompletionRequest(GenerationBody):
    """The body of POST /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None

    @model_validator(mode="after")
    def _echoes(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo: of a prompt no log-probabilities are computed, ask without logprobs")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """The value of `logprobs`."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or as tokens."""
        return prompts_of(self.prompt)


class TextContentPart(StrictModel):
    """A text part of a message's content, the only supported type."""

    type: Literal["text"]
    text: str


class FunctionCall(StrictModel):
    """Name and arguments of a tool call; `arguments` is JSON."""

    name: Name
    arguments: str


class ToolCall(StrictModel):
    """A tool call of an earlier assistant message."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(StrictModel):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextContentPart], Field(fail_fast=True, max_length=MOST_MESSAGES)] | None = None
    name: Name | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_TOOLS)] | None = None
    tool_call_id: Name | None = None
    # The official client has these fields in the messages of responses. Such messages may be sent back unchanged.
    annotations: None = None
    audio: None = None
    function_call: None = None
    refusal: None = None

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.content is None and not self.tool_calls:
            raise ValueError("content is a text, or a list of parts of type text")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls belong to messages of role assistant")
        return self

    def for_template(self) -> dict[str, Any]:
        """Returns the message for a chat template, with the content as one string and the arguments of calls as objects."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        message |= {
            name: value for name in ("name", "tool_call_id", "reasoning_content") if (value := getattr(self, name)) is not None
        }
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
            for call in message["tool_calls"]:
                call["function"]["arguments"] = _object_in(call["function"]["arguments"])
        return message


class FunctionDefinition(StrictModel):
    """A function that a model may call; `parameters`: a JSON schema, passed to the template unchanged."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    """A tool; functions are the only supported type."""

    type: Literal["function"]
    function: FunctionDefinition


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
Tools = Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)]


class NamedFunction(StrictModel):
    """The name of a function."""

    name: Name


class NamedToolChoice(StrictModel):
    """The one function that the answer calls."""

    type: Literal["function"]
    function: NamedFunction


class ChatCompletionRequest(GenerationBody):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: Tools | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: None = None
    function_call: None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    audio: None = None
    metadata: None = None
    prediction: None = None
    reasoning_effort: None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    verbosity: None = None
    web_search_options: None = None

    @model_validator(mode="after")
    def _agrees(self) -> ChatCompletionRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_completion_tokens: differs from max_tokens, which means the same")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: belongs to logprobs=true")
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        choice = self.tool_choice
        if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
            raise ValueError(f"tool_choice: no function of tools is called {choice.function.name!r}")
        if choice == "required" and not names:
            raise ValueError("tool_choice: required belongs to tools")
        if len(set(names)) < len(names):
            raise ValueError("tools: two functions have the same name")
        if self.must_call and self.grammar_fields:
            raise ValueError(f"tool_choice: a call goes without {self.grammar_fields[0]}, which says what else the answer is")
        if self.must_call and (self.ignore_eos or self.min_tokens):
            raise ValueError("tool_choice: a call ends by itself, it goes without ignore_eos and min_tokens")

    @property
    def must_call(self) -> bool:
        """True if the answer has to call a function."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedToolChoice)

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the model may call, for its chat template."""
        return [] if self.tool_choice == "none" else [tool.model_dump(exclude_none=True) for tool in self.tools or ()]

    @property
    def callable_functions(self) -> list[FunctionDefinition]:
        """The functions that the answer may call: the one that `tool_choice` names, or all that are offered."""
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedToolChoice) else None
        offered = [] if self.tool_choice == "none" else [tool.function for tool in self.tools or ()]
        return [function for function in offered if named in (None, function.name)]

    @property
    def limit(self) -> int | None:
        """max_completion_tokens, or else max_tokens."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def limit_name(self) -> str:
        """Name of the field that sets `limit`."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def num_logprobs(self) -> int | None:
        """`top_logprobs` if `logprobs` is true."""
        return (self.top_logprobs or 0) if self.logprobs else None


class EmbeddingRequest(StrictModel):
    """The body of POST /v1/embeddings. `pooling`: which hidden states become the embedding."""

    model: Name
    input: Prompts
    pooling: Pooling | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: None = None
    user: Name | None = None


class TokenizeRequest(StrictModel):
    """The body of POST /tokenize: a text, or a conversation as the chat template renders it."""

    model: Name
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _has_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: one of prompt and messages")
        for name in ("tools",) if self.messages is None else ("add_special_tokens",):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: belongs to {'messages' if name == 'tools' else 'prompt'}")
        return self


class DetokenizeRequest(StrictModel):
    """The body of POST /detokenize."""

    model: Name
    tokens: Tokens


PARTS: list[type[StrictModel]] = [
    ChatMessage, Tool, FunctionDefinition, ToolCall, FunctionCall, TextContentPart, StreamOptions, ResponseFormat, JsonSchema,
    NamedToolChoice, NamedFunction, StructuredOutputs,
]  # fmt: skip
"""Models whose fields may be named in errors, besides those of the body."""

Body = TypeVar("Body", bound=StrictModel)


def parse(kind: type[Body], body: bytes) -> Body:
    """Parses a body; raises ApiError, which names the first wrong field."""
    try:
        parsed = kind.model_validate_json(body)
    except ValidationError as error:
        raise _in_words(kind, error) from None
    # Duplicate keys are refused: pydantic takes the last one, while a proxy or filter may take the first.
    json.loads(body, object_pairs_hook=_without_duplicates, parse_int=str)
    return parsed


def _without_duplicates(pairs: list[tuple[str, object]]) -> None:
    """Raises ApiError for an object with duplicate keys; returns nothing."""
    names = set()
    for name, _ in pairs:
        if name in names:
            key = name[:_LONGEST_SHOWN]
            raise refused(key, "this key is there twice in one object; send it once", "duplicate_key")
        names.add(name)


_LONGEST_SHOWN = 60


def _in_words(kind: type[StrictModel], error: ValidationError) -> ApiError:
    # A field with several types has an error for each. The one with the longest path is of the type that the client most likely
    # meant.
    first = max(error.errors(include_url=False, include_context=False), key=lambda each: len(each["loc"]))
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is one JSON object: {first['msg']}", code="invalid_json")
    names = {field.alias or name for each in (kind, *PARTS) for name, field in each.model_fields.items()}
    extra = first["type"] == "extra_forbidden"
    path = [str(part) for part in first["loc"] if isinstance(part, int) or part in names]
    if extra:
        path.append(str(first["loc"][-1])[:_LONGEST_SHOWN])
        return refused(".".join(path), "this field is not known here; docs/serve.md lists those that are", "unknown_field")
    message = first["msg"].removeprefix("Value error, ")
    if not path:  # an error of a combination of fields
        name, _, why = message.partition(": ")
        return refused(name, why) if why else ApiError(400, message)
    given = "" if first["type"] == "missing" else f", got {_shown(first['input'])}"
    return refused(".".join(path), f"{message}{given}")


def _shown(value: object) -> str:
    """Returns a value as text of at most 60 characters."""
    if isinstance(value, (dict, list, str)) and len(value) > _LONGEST_SHOWN:
        return f"{type(value).__name__} of length {len(value):,}"
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}.."


def _schema_in(given: dict[str, Any] | str, param: str) -> dict[str, Any] | bool:
    """Returns a schema given as an object or as JSON text."""
    if isinstance(given, dict):
        return given
    try:
        schema = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise refused(param, f"a schema is an object, or JSON text ({error})") from error
    if not isinstance(schema, (dict, bool)):
        raise refused(param, f"a schema is an object, true or false, got {_shown(schema)}")
    return schema


def _object_in(text: str) -> object:
    """Returns the JSON object in a string, or the string if it contains none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
