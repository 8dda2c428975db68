"""The formats in which models write tool calls and reasoning, and grammars that enforce them. Chat templates define the
formats.

    Hermes, Qwen 2.5 and 3   <tool_call>{"name": "f", "arguments": {..}}</tool_call>, any number of them
    Llama 3                  {"name": "f", "parameters": {..}}, the whole answer, after <|python_tag|> or not
    Mistral                  [TOOL_CALLS][{"name": "f", "arguments": {..}}, ..], or [TOOL_CALLS]f[ARGS]{..}
    harmony (gpt-oss)        <|channel|>commentary to=functions.f <|constrain|>json<|message|>{..}
    reasoning                <think>..</think> before the answer; in harmony, the channel `analysis`

The format is recognised by its markers in the text of the chat template. answer.py reads answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowbit.engine import Grammar
from lowbit.engine.grammar import literal, with_spaces

OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
CHANNEL, MESSAGE, CONSTRAIN, START, END, CALL = (
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|start|>",
    "<|end|>",
    "<|call|>",
)
THINK, END_THINK = "<think>", "</think>"

ANY = "/(?s:.*)/"
"""Any text without special tokens, in Lark's syntax."""

SPACES = r"/\s{0,4}/"
"""Spaces around and between calls. The limit keeps a constrained model from generating spaces without end."""


class ToolFormat(Enum):
    """How a model writes tool calls."""

    HERMES = "Hermes"
    LLAMA = "Llama 3"
    MISTRAL = "Mistral"
    MISTRAL_ARGS = "Mistral with [ARGS]"
    HARMONY = "harmony"

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that mark a call; the first one begins it."""
        return {
            ToolFormat.HERMES: (OPEN_CALL, CLOSE_CALL),
            ToolFormat.LLAMA: (PYTHON_TAG,),
            ToolFormat.MISTRAL: (CALLS,),
            ToolFormat.MISTRAL_ARGS: (CALLS, CALL_ID, ARGS),
            ToolFormat.HARMONY: (CHANNEL, MESSAGE, CONSTRAIN, START, END, CALL),
        }[self]


def tool_format(template: str) -> ToolFormat | None:
    """Returns the format of calls that a chat template defines; None if it is unknown."""
    if CHANNEL in template and CALL in template:
        return ToolFormat.HARMONY
    if CALLS in template:
        return ToolFormat.MISTRAL_ARGS if ARGS in template else ToolFormat.MISTRAL
    if OPEN_CALL in template and "arguments" in template and "<function=" not in template and "<arg_key>" not in template:
        return ToolFormat.HERMES
    if '"parameters":' in template and (PYTHON_TAG in template or "ipython" in template):
        return ToolFormat.LLAMA
    return None


@dataclass(frozen=True)
class AnswerFormat:
    """The parts of a model's answers besides text: tool calls in a format, and reasoning between tags or in a channel.

    `ids`: (marker, token) of each marker that is a single token. `shown`: markers that are special tokens; they must be
    decoded, although detokenizers usually drop special tokens. `hidden`: all other special tokens, if there are such markers.
    """

    tools: ToolFormat | None = None
    thinks: bool = False
    ids: tuple[tuple[str, int], ...] = ()
    shown: frozenset[int] = frozenset()
    hidden: frozenset[int] = frozenset()

    @property
    def reasoning(self) -> bool:
        """True if answers have a part that is reasoning."""
        return self.thinks or self.tools is ToolFormat.HARMONY

    @property
    def marks_calls(self) -> bool:
        """True if a single token begins a call, so that a grammar can separate calls from the text before them."""
        return self.tools in (ToolFormat.HERMES, ToolFormat.MISTRAL, ToolFormat.MISTRAL_ARGS) and self.tools.markers[0] in dict(
            self.ids
        )

    def report(self) -> list[str]:
        """Returns lines that say how tool calls and reasoning are recognised."""
        calls = "not recognised in the chat template, returned as text" if self.tools is None else f"as {self.tools.value}"
        where = f"between {THINK} and {END_THINK}" if self.thinks else "in the channel `analysis`"
        return [f"tool calls: {calls}", *([f"reasoning: {where}, returned as reasoning_content"] if self.reasoning else [])]

    # ---- grammars

    def marker(self, text: str) -> str:
        """Returns a marker in Lark's syntax: its token, or its text if it consists of several tokens."""
        token = dict(self.ids).get(text)
        return literal(text) if token is None else f"<[{token}]>"

    def before_answer(self, opened: bool) -> str:
        """Returns a rule in Lark's syntax for the reasoning before an answer that follows a grammar; "" without reasoning.
        opened: the prompt has begun the reasoning, which then must come first. Otherwise it may be absent.
        """
        if self.tools is ToolFormat.HARMONY:
            reasoning = f'{self.marker(CHANNEL)} "analysis" {self.marker(MESSAGE)} {ANY} {self.marker(END)}'
            return f'({reasoning} {self.marker(START)} "assistant")?'
        if not self.thinks or dict(self.ids).keys().isdisjoint({END_THINK}):
            return ""
        rest = f"{ANY} {self.marker(END_THINK)} {SPACES}"
        return rest if opened else f"({self.marker(THINK)} {rest})?"

    def answer(self, grammar: Grammar, opened: bool) -> Grammar:
        """Returns the grammar of answers that consist of reasoning, if the model writes any, and text that follows
        `grammar`."""
        before = self.before_answer(opened)
        if self.tools is ToolFormat.HARMONY:
            before += f' {self.marker(CHANNEL)} "final" {self.marker(MESSAGE)}'
        return grammar.after(before) if before else grammar

    def calls(self, functions: Sequence[dict[str, Any]], many: bool, opened: bool, text: bool = False) -> Grammar:
        """Returns the grammar of answers that are calls of functions. A function is given as in a request's `tools`.

        many: True allows several calls, False only one. text: text may precede the calls, or replace them. The format must be
        known.
        """
        assert self.tools is not None
        calls = f"{ANY} calls?" if text else "calls"
        return Grammar.lark(
            f"start: {self.before_answer(opened)} {calls}\n" + CALLS_OF[self.tools](self.marker, functions, many)
        )


Mark = Callable[[str], str]
Functions = Sequence[dict[str, Any]]


def _hermes(mark: Mark, functions: Functions, many: bool) -> str:
    more = f"({SPACES} call)*" if many else ""
    call = f"{mark(OPEN_CALL)} {SPACES} object {SPACES} {mark(CLOSE_CALL)}"
    return f"calls: call {more}\ncall: {call}\nobject: %json {_objects(functions, 'arguments')}"


def _llama(mark: Mark, functions: Functions, many: bool) -> str:
    return f"calls: %json {_objects(functions, 'parameters')}"  # templates of Llama 3 allow one call in an answer


def _mistral(mark: Mark, functions: Functions, many: bool) -> str:
    more = f'("," {SPACES} object)*' if many else ""
    return f'calls: {mark(CALLS)} {SPACES} "[" object {more} "]"\nobject: %json {_objects(functions, "arguments")}'


def _mistral_args(mark: Mark, functions: Functions, many: bool) -> str:
    named = " | ".join(f"{literal(name)} {mark(ARGS)} %json {schema}" for name, schema in map(_named, functions))
    return f"calls: call{'+' if many else ''}\ncall: {mark(CALLS)} ({named})"


def _harmony(mark: Mark, functions: Functions, many: bool) -> str:
    def call(name: str, schema: str) -> str:
        recipient = literal(f"commentary to=functions.{name} ")
        return f'{mark(CHANNEL)} {recipient} {mark(CONSTRAIN)} "json" {mark(MESSAGE)} %json {schema}'

    return "calls: " + " | ".join(call(*_named(each)) for each in functions)  # one call: <|call|> ends the answer


CALLS_OF: dict[ToolFormat, Callable[[Mark, Functions, bool], str]] = {
    ToolFormat.HERMES: _hermes,
    ToolFormat.LLAMA: _llama,
    ToolFormat.MISTRAL: _mistral,
    ToolFormat.MISTRAL_ARGS: _mistral_args,
    ToolFormat.HARMONY: _harmony,
}
"""Functions that return rules of a Lark grammar. The rule `calls` is a call of one of the functions, or with `many` several
calls if the format allows them."""


def _named(function: dict[str, Any]) -> tuple[str, str]:
    """Returns the name of a function and the schema of its arguments as JSON."""
    return function["name"], json.dumps(with_spaces(function.get("parameters") or {"type": "object"}))


def _objects(functions: Functions, key: str) -> str:
    """Returns the schema of calls as JSON: objects with a function's name, and its arguments under `key`."""

    def call(function: dict[str, Any]) -> dict[str, Any]:
        arguments = function.get("parameters") or {"type": "object"}
        properties = {"name": {"const": function["name"]}, key: arguments}
        return {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}

    return json.dumps(with_spaces({"anyOf": [call(each) for each in functions]}))


def answer_format(tokenizer: PreTrainedTokenizerBase) -> AnswerFormat:
    """Returns the format of a model's answers, recognised from its chat template."""
    given = tokenizer.chat_template
    templates = given.values() if isinstance(given, dict) else [given or ""]
    template = "\n".join(templates)
    tools = tool_format(template)
    thinks = END_THINK in template and tools is not ToolFormat.HARMONY
    markers = (*(tools.markers if tools else ()), *((THINK, END_THINK) if thinks else ()))
    vocabulary, special = tokenizer.get_vocab(), set(tokenizer.all_special_ids)
    ids = tuple((marker, vocabulary[marker]) for marker in markers if marker in vocabulary)
    shown = frozenset(token for _, token in ids if token in special)
    return AnswerFormat(tools, thinks, ids, shown, frozenset(special - shown) if shown else frozenset())
