"""The body of POST /v1/responses: the parts of OpenAI's Responses API that concern text. It is converted to a chat request.

Nothing is stored. Fields that refer to stored responses, files, images or tools of OpenAI accept only values without effect.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from lowbit.serve.errors import ApiError, encoded
from lowbit.serve.limits import MOST_MESSAGES, MOST_TOOLS
from lowbit.serve.schema import PARTS, ChatCompletionRequest, Count, Name, StrictModel, parse


class InputPart(StrictModel):
    """A text part of an item's content. It may be copied from an earlier response."""

    type: Literal["input_text", "output_text", "reasoning_text", "text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = None


Parts = Annotated[list[InputPart], Field(fail_fast=True, max_length=MOST_MESSAGES)]

FIELDS = {
    "message": {"role", "content"},
    "function_call": {"call_id", "name", "arguments"},
    "function_call_output": {"call_id", "output"},
    "reasoning": {"summary"},
}
"""Fields that an item of each type must have."""


class InputItem(StrictModel):
    """An item of a conversation: a message, a function call of an earlier answer, its output, or earlier reasoning."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: Name | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Parts | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: str | None = None
    output: str | Parts | None = None
    summary: Annotated[list[Any], Field(max_length=0)] | None = None
    encrypted_content: None = None

    @model_validator(mode="after")
    def _is_whole(self) -> InputItem:
        own = FIELDS[self.type]
        for name in sorted(own):
            if getattr(self, name) is None:
                raise ValueError(f"an item of type {self.type} has {', '.join(sorted(own))}; {name} is missing")
        for name in sorted(set.union(*FIELDS.values()) - own - ({"content"} if self.type == "reasoning" else set())):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} does not belong to an item of type {self.type}")
        return self

    @property
    def text(self) -> str:
        """Its content or output as one text."""
        given = self.output if self.type == "function_call_output" else self.content
        return given if isinstance(given, str) else "".join(part.text for part in given or ())


class TextFormat(StrictModel):
    """Any text, any JSON object, or the JSON that a schema allows. `ResponseFormat` of schema.py nests the same fields."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None) or (self.type == "json_schema") != (
            self.name is not None
        ):
            raise ValueError("name and schema belong to type json_schema, and must be there")
        return self


class TextOptions(StrictModel):
    """Options of the text of an answer."""

    format: TextFormat | None = None
    verbosity: None = None


class FunctionTool(StrictModel):
    """A function that the model may call, the only supported type of tool."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(StrictModel):
    """The one function that the answer calls."""

    type: Literal["function"]
    name: Name


Items = Annotated[list[InputItem], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]


class ResponsesRequest(StrictModel):
    """The body of POST /v1/responses."""

    model: Name
    input: str | Items
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    user: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    # Fields that ask for features that this server does not have.
    background: Literal[False] | None = None
    conversation: None = None
    include: Annotated[list[str], Field(max_length=0)] | None = None
    max_tool_calls: None = None
    metadata: Annotated[dict[str, str], Field(max_length=0)] | None = None
    previous_response_id: None = None
    prompt: None = None
    reasoning: None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    stream_options: None = None
    top_logprobs: Literal[0] | None = None
    truncation: Literal["disabled"] | None = None

    def chat(self) -> ChatCompletionRequest:
        """Returns the chat request that has the same answer. Raises ApiError, with the field names of the chat request, for
        fields that contradict each other."""
        body: dict[str, Any] = {
            "model": self.model, "messages": self._messages(), "stream": self.stream, "max_tokens": self.max_output_tokens,
            "temperature": self.temperature, "top_p": self.top_p, "user": self.user,
            "parallel_tool_calls": self.parallel_tool_calls,
        }  # fmt: skip
        if self.tools:
            body["tools"] = [
                {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)} for tool in self.tools
            ]
        choice = self.tool_choice
        named = isinstance(choice, FunctionChoice)
        body["tool_choice"] = {"type": "function", "function": {"name": choice.name}} if named else choice  # type: ignore[union-attr]
        form = None if self.text is None else self.text.format
        if form is not None:
            schema = form.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
            body["response_format"] = {"type": form.type} | ({"json_schema": schema} if form.type == "json_schema" else {})
        return parse(ChatCompletionRequest, encoded(body))

    def _messages(self) -> list[dict[str, Any]]:
        """Returns the conversation as messages of a chat. A function call is added to the assistant's message before it, and
        reasoning to the assistant's message after it."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        reasoning = ""
        for item in self.input:
            if item.type == "reasoning":
                reasoning += item.text
                continue
            if item.type == "function_call_output":
                messages.append({"role": "tool", "content": item.text, "tool_call_id": item.call_id})
                continue
            role = "assistant" if item.type == "function_call" else item.role
            joins = item.type == "function_call" and messages and messages[-1]["role"] == "assistant" and not reasoning
            if not joins:
                messages.append({"role": role, "content": item.text or (None if item.type == "function_call" else "")})
                if role == "assistant" and reasoning:
                    messages[-1]["reasoning_content"], reasoning = reasoning, ""
            if item.type == "function_call":
                call = {"name": item.name, "arguments": item.arguments}
                messages[-1].setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": call})
        return messages


PARTS += [InputItem, InputPart, TextOptions, TextFormat, FunctionTool, FunctionChoice]

_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
"""Names of fields of a chat request -> those of a request to /v1/responses."""


def in_names_of_responses(error: ApiError) -> ApiError:
    """Returns an error about a chat request with the field names of the request to /v1/responses from which it was made."""
    for name, own in _NAMES.items():
        if error.param is not None and error.param.split(".")[0] == name:
            message = error.message.removeprefix(f"{error.param}: ")
            return ApiError(error.status, f"{own}: {message}", own, error.code, error.headers)
    return error
