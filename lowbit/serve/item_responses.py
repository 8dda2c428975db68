"""Answers of /v1/responses. An answer is a list of items; the events of a stream have names and numbers."""

from __future__ import annotations

import secrets
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowbit.engine import FinishReason
from lowbit.serve.answer import AnswerParser, Piece
from lowbit.serve.errors import ApiError, encoded
from lowbit.serve.response_schema import ResponsesRequest
from lowbit.serve.responses import Responses
from lowbit.serve.worker import SequenceOutput

PREFIXES = {"message": "msg", "function_call": "fc", "reasoning": "rs"}
"""Types of items -> beginnings of their ids."""

PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
"""Types of items with content -> the type of the only part of that content, which is also in the names of its events."""


class ItemResponses(Responses):
    """The response to a request to /v1/responses, which has one sequence. `arguments` are those of `Responses`."""

    prefix, whole = "resp", "response"

    def __init__(
        self, *arguments: Any, parser: AnswerParser, asked: ResponsesRequest, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        super().__init__(*arguments)
        self._parser, self._asked, self._tokenizer = parser, asked, tokenizer
        self._items: list[dict[str, Any]] = []
        self._is_open = False
        """True if the last item is not complete."""
        self._numbered = 0
        """Number of events so far."""
        self._finish: FinishReason | None = None

    # ---- a whole response

    def complete(self, outputs: dict[int, SequenceOutput]) -> dict[str, Any]:
        """Returns the whole response, from the joined output of its sequence."""
        (output,) = outputs.values()
        self._read(output)
        return self._response()

    def _response(self) -> dict[str, Any]:
        """Returns the response as far as it is known."""
        asked, ended = self._asked, self._finish is not None
        form = None if asked.text is None or asked.text.format is None else asked.text.format
        choice = asked.tool_choice if asked.tool_choice is None or isinstance(asked.tool_choice, str) else None
        named = None if choice is not None or asked.tool_choice is None else asked.tool_choice.model_dump()  # type: ignore[union-attr]
        status = "in_progress" if not ended else self._status()
        return {
            "id": f"{self.prefix}_{self.id}", "object": self.whole, "created_at": self.created, "model": self.model,
            "status": status, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions, "max_output_tokens": asked.max_output_tokens,
            "output": list(self._items) if ended else [],
            "parallel_tool_calls": asked.parallel_tool_calls is not False, "previous_response_id": None, "store": False,
            "temperature": asked.temperature, "top_p": asked.top_p,
            "text": {"format": {"type": "text"} if form is None else form.model_dump(exclude_none=True, by_alias=True)},
            "tool_choice": named or choice or "auto", "truncation": "disabled",
            "tools": [{"strict": None, "parameters": None, **tool.model_dump(exclude_none=True)} for tool in asked.tools or ()],
            "usage": self._usage() if ended else None, "user": asked.user, "metadata": {},
        }  # fmt: skip

    def _status(self) -> str:
        return "incomplete" if self._finish is FinishReason.LENGTH else "completed"

    def _usage(self) -> dict[str, Any]:
        counts = self.usage()
        reasoning = "".join(item["content"][0]["text"] for item in self._items if item["type"] == "reasoning")
        tokens = len(self._tokenizer(reasoning, add_special_tokens=False).input_ids) if reasoning else 0
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": counts["prompt_tokens_details"]["cached_tokens"]},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": min(tokens, counts["completion_tokens"])},
            "total_tokens": counts["total_tokens"],
        }

    # ---- a stream

    def begin(self) -> bytes:
        """Returns the events before the first output."""
        return b"".join(self._event(f"response.{name}", response=self._response()) for name in ("created", "in_progress"))

    def events(self, output: SequenceOutput, first: bool, usage: bool) -> bytes:
        """Returns the events of an output."""
        return b"".join(self._read(output))

    def end(self, usage: bool) -> bytes:
        """Returns the last event, which has the whole response."""
        return self._event(f"response.{self._status()}", response=self._response())

    def failure(self, error: ApiError) -> bytes:
        """Returns the event of an error, which ends a stream."""
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._numbered, **fields}
        self._numbered += 1
        return f"event: {kind}\n".encode() + b"data: " + encoded(data) + b"\n\n"

    # ---- items

    def _read(self, output: SequenceOutput) -> list[bytes]:
        """Adds an output to the items; returns its events."""
        events: list[bytes] = []
        for piece in self._parser.feed(output.text, last=output.finish_reason is not None):
            kind = _kind(piece)
            if kind == "message" and not piece.content:
                continue
            if piece.name is not None or not self._is_open or self._items[-1]["type"] != kind:
                events += self._close("completed")
                events += self._open(kind, piece)
            events += self._add(piece.arguments or piece.reasoning or piece.content)
        if output.finish_reason is not None:
            self._finish = output.finish_reason
            events += self._close(self._status())
        return events

    def _open(self, kind: str, piece: Piece) -> list[bytes]:
        """Begins an item."""
        item: dict[str, Any] = {"id": f"{PREFIXES[kind]}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress"}
        if kind == "function_call":
            item |= {"call_id": piece.id, "name": piece.name, "arguments": ""}
        else:
            item["content"] = []
            if kind == "message":
                item["role"] = "assistant"
            else:
                item["summary"] = []
        self._items.append(item)
        self._is_open = True
        events = [self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)]
        if kind != "function_call":
            item["content"].append(_part(kind, ""))
            events.append(self._of_item("response.content_part.added", content_index=0, part=item["content"][0]))
        return events

    def _add(self, text: str) -> list[bytes]:
        """Adds text to the open item."""
        item = self._items[-1]
        if not text:
            return []
        if item["type"] == "function_call":
            item["arguments"] += text
            return [self._of_item("response.function_call_arguments.delta", delta=text)]
        item["content"][0]["text"] += text
        more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
        return [self._of_item(f"response.{PARTS[item['type']]}.delta", content_index=0, delta=text, **more)]

    def _close(self, status: str) -> list[bytes]:
        """Ends the open item, if there is one."""
        if not self._is_open:
            return []
        item = self._items[-1]
        item["status"], self._is_open = status, False
        if item["type"] == "function_call":
            events = [self._of_item("response.function_call_arguments.done", arguments=item["arguments"], name=item["name"])]
        else:
            part = item["content"][0]
            more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            events = [
                self._of_item(f"response.{PARTS[item['type']]}.done", content_index=0, text=part["text"], **more),
                self._of_item("response.content_part.done", content_index=0, part=part),
            ]
        return [*events, self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)]

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        """Returns an event of the last item."""
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)


def _kind(piece: Piece) -> str:
    """Returns the type of the item that a piece belongs to."""
    if piece.name is not None or piece.arguments:
        return "function_call"
    return "reasoning" if piece.reasoning else "message"


def _part(kind: str, text: str) -> dict[str, Any]:
    """Returns the part of an item's content."""
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "message" else {}
    return {"type": PARTS[kind], "text": text, **more}
