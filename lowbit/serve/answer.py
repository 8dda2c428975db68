"""Splits the text of an answer into content, reasoning and tool calls, while it is generated.

Text that may be the beginning of a marker is held back. A call is recognised by its head, which is the text before its
arguments. The arguments are passed on as they are generated. Text that turns out not to be a head becomes content.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from lowbit.serve.tools import (
    CALL,
    CALLS,
    CHANNEL,
    CLOSE_CALL,
    END,
    END_THINK,
    MESSAGE,
    OPEN_CALL,
    PYTHON_TAG,
    START,
    THINK,
    AnswerFormat,
    ToolFormat,
)  # fmt: skip

MOST_HEAD_CHARACTERS = 1024
"""Maximum length of the text of a call before its arguments. Longer text without arguments counts as content."""

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_NAMED_HEAD = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]*\s*)?(?:\[ARGS\])?\s*(?=\{)")
_RECIPIENT = re.compile(r"\bto=functions\.([\w.-]+)")


@dataclass(frozen=True)
class Piece:
    """A part of an answer: content, or reasoning, or arguments of the call `index`. A call begins with its `name` and `id`."""

    content: str = ""
    reasoning: str = ""
    index: int = 0
    arguments: str = ""
    name: str | None = None
    id: str = ""


class AnswerParser:
    """Reads one answer.

    functions: names of functions that may be called; without any, calls are not recognised. opened: True if the prompt ends
    with the beginning of the reasoning.
    """

    def __init__(self, form: AnswerFormat, functions: Collection[str] = (), opened: bool = False) -> None:
        self._harmony = HarmonyReader() if form.tools is ToolFormat.HARMONY else None
        self._reasoning = ReasoningReader(opened) if form.thinks else None
        self._calls = CallReader(form.tools, functions) if form.tools and functions else None

    @property
    def has_calls(self) -> bool:
        """True if a call has begun."""
        reader = self._harmony or self._calls
        return reader is not None and reader.calls > 0

    def feed(self, text: str, last: bool = False) -> list[Piece]:
        """Returns the parts that are known after some more text; `last`: no more text follows."""
        if self._harmony is not None:
            return self._harmony.feed(text, last)
        pieces = []
        if self._reasoning is not None:
            reasoning, text = self._reasoning.feed(text, last)
            pieces += [Piece(reasoning=reasoning)] if reasoning else []
            last = last and self._reasoning.is_over
        if self._calls is not None:
            return pieces + self._calls.feed(text, last)
        return pieces + ([Piece(content=text)] if text else [])


class _Buffer:
    """Text that was not read yet."""

    def __init__(self) -> None:
        self.text = ""

    def until(self, markers: Collection[str], last: bool) -> tuple[str, str]:
        """Removes and returns the text before the first of some markers, and that marker. Without a marker, removes and returns
        the text, except an end that may begin a marker, and "". `last`: no more text follows, so the end is returned too.
        """
        found = min(((at, marker) for marker in markers if (at := self.text.find(marker)) >= 0), default=None)
        if found is not None:
            at, marker = found
            taken, self.text = self.text[:at], self.text[at + len(marker) :]
            return taken, marker
        held = 0 if last else max((_overlap(self.text, marker) for marker in markers), default=0)
        taken = self.text[: len(self.text) - held]
        self.text = self.text[len(taken) :]
        return taken, ""


def _overlap(text: str, marker: str) -> int:
    """Returns the length of the longest suffix of a text that is a proper prefix of a marker."""
    most = min(len(text), len(marker) - 1)
    return next((length for length in range(most, 0, -1) if text.endswith(marker[:length])), 0)


class _Trimmed:
    """Passes text on without the spaces at its beginning (if `start`) and at its end."""

    def __init__(self, start: bool = True) -> None:
        self._begun, self.held = not start, ""

    def feed(self, text: str) -> str:
        """Returns the text that is known so far without the spaces at its end, which may be inside the text. `held` has these
        spaces."""
        whole = self.held + text
        whole = whole if self._begun else whole.lstrip()
        kept = whole.rstrip()
        self._begun, self.held = self._begun or bool(kept), whole[len(kept) :]
        return kept


class ReasoningReader:
    """Separates reasoning between <think> and </think> from the text after it. Spaces around both are dropped."""

    def __init__(self, opened: bool) -> None:
        self._buffer, self._inside, self.is_over = _Buffer(), opened, False
        self._reasoning, self._begun = _Trimmed(), False

    def feed(self, text: str, last: bool) -> tuple[str, str]:
        """Returns new reasoning, and new text after it."""
        buffer = self._buffer
        buffer.text += text
        if not (self._inside or self.is_over):
            start = buffer.text.lstrip()
            if start.startswith(THINK):
                buffer.text, self._inside = start[len(THINK) :], True
            elif last or not THINK.startswith(start):
                self.is_over = self._begun = True  # an answer without reasoning keeps its spaces
            else:
                return "", ""
        reasoning = ""
        if self._inside:
            inside, marker = buffer.until((END_THINK,), last)
            reasoning = self._reasoning.feed(inside)
            if marker:
                self._inside, self.is_over = False, True
        if not self.is_over:
            return reasoning, ""
        rest, buffer.text = buffer.text, ""
        rest = rest if self._begun else rest.lstrip()
        self._begun = self._begun or bool(rest)
        return reasoning, rest


class ObjectScanner:
    """Finds the end of a JSON object in a growing text, by its brackets outside strings."""

    def __init__(self, depth: int = 0) -> None:
        """depth: number of brackets that are open before the text."""
        self._depth, self._quoted, self._escaped = depth, False, False

    def feed(self, text: str) -> int:
        """Returns the index in `text` after the object's last bracket; -1 if the object does not end in it."""
        for i, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = character == "\\", character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return i + 1
        return -1


class _State(Enum):
    CONTENT = auto()
    HEAD = auto()
    """The text of a call before its arguments."""
    ARGUMENTS = auto()
    AFTER = auto()
    """Between the arguments of a call and the next call or content."""


OPENING = {ToolFormat.HERMES: OPEN_CALL, ToolFormat.MISTRAL: CALLS, ToolFormat.MISTRAL_ARGS: CALLS}
"""The marker before a call. Llama 3's calls have none."""

BETWEEN = {ToolFormat.LLAMA: "; \n\r\t", ToolFormat.MISTRAL: "], \n\r\t", ToolFormat.MISTRAL_ARGS: " \n\r\t"}
"""Characters that may follow a call; Hermes' calls end with a marker."""


class CallReader:
    """Finds calls in the formats that write them as JSON objects. Spaces before a call are dropped."""

    def __init__(self, form: ToolFormat, functions: Collection[str]) -> None:
        self._form, self._functions, self._buffer = form, frozenset(functions), _Buffer()
        self.calls = 0
        """Number of calls that have begun."""
        self._state = _State.HEAD if form is ToolFormat.LLAMA else _State.CONTENT
        self._opening = OPENING.get(form, "")
        self._content, self._scanner, self._pieces = _Trimmed(start=False), ObjectScanner(), list[Piece]()
        self._outer: ObjectScanner | None = None
        """Finds the end of the JSON object around the arguments, which may have other keys after them, such as an id. None if
        the format has no such object."""

    def feed(self, text: str, last: bool) -> list[Piece]:
        """Returns the parts that are known after some more text; `last`: no more text follows."""
        self._buffer.text += text
        self._pieces = []
        read = {
            _State.CONTENT: self._read_content,
            _State.HEAD: self._read_head,
            _State.ARGUMENTS: self._read_arguments,
            _State.AFTER: self._read_between,
        }
        while self._buffer.text and read[self._state](last):
            pass
        if last and self._state is _State.CONTENT and not self.calls and self._content.held:
            self._pieces.append(Piece(content=self._content.held))
        return self._pieces

    def _say(self, text: str) -> None:
        kept = self._content.feed(text)
        if kept:
            self._pieces.append(Piece(content=kept))

    def _read_content(self, last: bool) -> bool:
        text, marker = self._buffer.until((self._opening,) if self._opening else (), last)
        self._say(text)
        if marker:
            self._state = _State.HEAD
        return bool(marker)

    def _read_head(self, last: bool) -> bool:
        text = self._buffer.text
        start = text.lstrip().removeprefix(PYTHON_TAG if self._form is ToolFormat.LLAMA else "[")
        match, self._outer = _HEAD.match(start), ObjectScanner(depth=1)
        if match is None and self._form in (ToolFormat.MISTRAL, ToolFormat.MISTRAL_ARGS):
            match, self._outer = _NAMED_HEAD.match(start), None
        if match is not None and (self._form is not ToolFormat.LLAMA or match[1] in self._functions):
            self._pieces.append(Piece(index=self.calls, name=match[1], id=_call_id(self._form)))
            self.calls, self._scanner = self.calls + 1, ObjectScanner()
            self._buffer.text, self._state = start[match.end() :], _State.ARGUMENTS
            return True
        if match is None and not last and len(text) <= MOST_HEAD_CHARACTERS and self._may_be_a_head(text.lstrip()):
            return False
        self._buffer.text, self._state, self._opening = self._opening + text, _State.CONTENT, ""  # no call: all is content
        return True

    def _may_be_a_head(self, start: str) -> bool:
        """True if a text without spaces at its start may become the beginning of a call; Llama's calls have no marker."""
        if self._form is not ToolFormat.LLAMA:
            return True
        return start.startswith(("{", PYTHON_TAG)) or PYTHON_TAG.startswith(start)

    def _read_arguments(self, last: bool) -> bool:
        text = self._buffer.text
        end = self._scanner.feed(text)
        shown = text if end < 0 else text[:end]
        self._pieces.append(Piece(index=self.calls - 1, arguments=shown))
        self._buffer.text = text[len(shown) :]
        if end >= 0:
            self._state = _State.AFTER
        return end >= 0

    def _read_between(self, last: bool) -> bool:
        if self._outer is not None:
            end = self._outer.feed(self._buffer.text)
            self._buffer.text = "" if end < 0 else self._buffer.text[end:]
            if end < 0:
                return False
            self._outer = None
        if self._form is ToolFormat.HERMES:
            _, marker = self._buffer.until((CLOSE_CALL,), last)
            ended = bool(marker)
        else:
            self._buffer.text = self._buffer.text.lstrip(BETWEEN[self._form])
            ended = bool(self._buffer.text)
        if ended:
            again = self._form in (ToolFormat.LLAMA, ToolFormat.MISTRAL) and self._buffer.text.startswith("{")
            self._state, self._content = _State.HEAD if again else _State.CONTENT, _Trimmed()
        return ended


class HarmonyReader:
    """Reads the messages of gpt-oss. Messages of the channel `analysis` are reasoning. A message to a function is a call with
    the message as its arguments. All other messages are content.
    """

    def __init__(self) -> None:
        self._buffer, self.calls, self._seen = _Buffer(), 0, False
        self._kind: str | None = None
        """The field of `Piece` for the current message; None in the header of a message."""

    def feed(self, text: str, last: bool) -> list[Piece]:
        """Returns the parts that are known after some more text; `last`: no more text follows."""
        self._buffer.text += text
        pieces: list[Piece] = []
        while self._buffer.text:
            if self._kind is None:
                if MESSAGE not in self._buffer.text:
                    if last and not self._seen and not self._buffer.text.startswith(CHANNEL):
                        pieces.append(Piece(content=self._buffer.text))  # the model did not write harmony
                    break
                head, _ = self._buffer.until((MESSAGE,), last)
                self._begin(head, pieces)
            text, marker = self._buffer.until((END, CALL, START, CHANNEL), last)
            if text:
                index = max(0, self.calls - 1) if self._kind == "arguments" else 0
                pieces.append(Piece(index=index, **{self._kind: text}))  # type: ignore[arg-type]
            if not marker:
                break
            self._kind = None
            self._buffer.text = (marker if marker == CHANNEL else "") + self._buffer.text
        return pieces

    def _begin(self, head: str, pieces: list[Piece]) -> None:
        """Begins the message with a header."""
        recipient, self._seen = _RECIPIENT.search(head), True
        if recipient is not None:
            pieces.append(Piece(index=self.calls, name=recipient[1], id=_call_id(ToolFormat.HARMONY)))
            self.calls += 1
        analysis = head.partition(CHANNEL)[2].lstrip().startswith("analysis")
        self._kind = "arguments" if recipient else "reasoning" if analysis else "content"


def _call_id(form: ToolFormat) -> str:
    """Returns a new id of a call. Mistral's templates accept ids of nine letters and digits only."""
    if form in (ToolFormat.MISTRAL, ToolFormat.MISTRAL_ARGS):
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"
