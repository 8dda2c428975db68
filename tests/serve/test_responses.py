"""/v1/responses through the official client: texts, streams, structured output, function calls, refusals by name."""

from __future__ import annotations

import json

import openai
import pytest

from lowbit.engine import FinishReason
from lowbit.serve.answer import AnswerParser
from lowbit.serve.item_responses import ItemResponses
from lowbit.serve.response_schema import ResponsesRequest
from lowbit.serve.schema import parse
from lowbit.serve.tools import AnswerFormat, ToolFormat
from lowbit.serve.worker import SequenceOutput
from tests.serve.running import NAME, running, structured_pipeline
from tests.tiny import json_tokenizer


@pytest.fixture(scope="module")
def server():
    with running(structured_pipeline()) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


ASKED = {"model": NAME, "input": "ab", "max_output_tokens": 12, "temperature": 0}


def chat_text(server, messages, **options):
    """The text of a chat completion with the same settings."""
    body = {"model": NAME, "messages": messages, "max_tokens": 12, "temperature": 0, **options}
    with server.client() as http:
        return http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]


def test_a_text(client, server):
    """A text, messages and instructions give the answer that a chat gives."""
    for given, messages in (
        ({"input": "ab"}, [{"role": "user", "content": "ab"}]),
        (
            {"instructions": "be brief", "input": [{"role": "user", "content": [{"type": "input_text", "text": "ab"}]}]},
            [{"role": "system", "content": "be brief"}, {"role": "user", "content": "ab"}],
        ),
        (
            {"input": [{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}]},
            [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}],
        ),
    ):
        response = client.responses.create(**{**ASKED, **given})
        assert response.output_text == chat_text(server, messages)["content"]
        assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
        usage = response.usage
        assert usage.output_tokens == 12 and usage.total_tokens == usage.input_tokens + 12
        assert response.model == NAME and response.id.startswith("resp_") and response.object == "response"
        assert response.instructions == given.get("instructions") and response.max_output_tokens == 12


def test_a_stream(client):
    whole = client.responses.create(**ASKED)
    events = list(client.responses.create(**ASKED, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text == events[-4].text
    assert events[0].response.status == "in_progress" and not events[0].response.output
    assert events[-1].response.usage == whole.usage
    form = {"type": "json_schema", "name": "x", "schema": {"type": "boolean"}}
    short = {**ASKED, "max_output_tokens": 60, "text": {"format": form}}
    with client.responses.stream(**short) as stream:  # the client's own reader knows only complete responses
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == "".join(texts) == client.responses.create(**short).output_text


def test_a_schema(client):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    response = client.responses.create(**{**ASKED, "max_output_tokens": 60, "temperature": 1}, text={"format": form})
    assert set(json.loads(response.output_text)) == {"a"} and response.status == "completed"
    assert response.text.format.type == "json_schema" and response.text.format.name == "x"
    response = client.responses.create(**{**ASKED, "max_output_tokens": 60}, text={"format": {"type": "json_object"}})
    assert response.output_text.startswith("{")


def test_a_loop_of_function_calls(client):
    """The output of a function goes back as input, as in the official client's examples."""
    tool = {
        "type": "function", "name": "f", "strict": True,
        "parameters": {
            "type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False,
        },
    }  # fmt: skip
    asked = {"model": NAME, "tools": [tool], "max_output_tokens": 120}
    given = [{"role": "user", "content": "ab"}]
    response = client.responses.create(input=given, tool_choice="required", parallel_tool_calls=False, **asked)
    calls = [item for item in response.output if item.type == "function_call"]
    assert calls and response.status == "completed" and all(json.loads(call.arguments)["a"] in (1, 2) for call in calls)
    given += response.output
    given += [{"type": "function_call_output", "call_id": call.call_id, "output": "7"} for call in calls]
    named = {"type": "function", "name": "f"}
    events = list(client.responses.create(input=given[:1], tool_choice=named, stream=True, **asked))
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert json.loads(arguments)["a"] in (1, 2) and events[-1].response.output[-1].arguments == arguments
    with pytest.raises(openai.BadRequestError, match="no tools here"):  # the chat template has no place for results of tools
        client.responses.create(input=given, **asked)


def test_items_become_messages():
    """Calls become part of the adjacent assistant message, reasoning part of the message after it."""
    given = [
        {"role": "user", "content": "q"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
            "content": [{"type": "output_text", "text": "so", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"a":1}', "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "function_call", "call_id": "c3", "name": "f", "arguments": "{}"},
    ]  # fmt: skip
    asked = parse(ResponsesRequest, json.dumps({"model": "m", "input": given, "instructions": "i"}).encode())
    messages = [message.model_dump(exclude_none=True) for message in asked.chat().messages]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    answer = messages[2]
    assert answer["content"] == "so" and answer["reasoning_content"] == "hm"
    assert [call["function"]["name"] for call in answer["tool_calls"]] == ["f", "g"]
    assert [messages[3]["content"], messages[4]["tool_call_id"], messages[4]["content"]] == ["one", "c2", "two"]
    assert messages[5]["tool_calls"][0]["id"] == "c3"


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_items_of_an_answer(size):
    """Reasoning, text and calls are items in their order, however the text is split into parts. Events give the same items."""
    text = '<think>\nhmm</think>\nLet me.\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    text += '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    form = AnswerFormat(ToolFormat.HERMES, True)
    asked = ResponsesRequest(model="m", input="x")

    class State:
        sampled, cached_tokens = [0] * 50, 3

    class Served:
        submitted_state = State

        class request:
            prompt = [0] * 9

    def answer():
        return ItemResponses("m", [Served], 1, None, False, [], parser=AnswerParser(form, ["f"]), asked=asked,
                             tokenizer=json_tokenizer())  # fmt: skip

    streamed, events = answer(), b""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    for at, piece in enumerate(pieces):
        last = FinishReason.STOP if at == len(pieces) - 1 else None
        events += streamed.events(SequenceOutput(0, piece, (), last), at == 0, False)
    end = json.loads(streamed.end(False).split(b"data: ")[1])["response"]
    whole = answer().complete({0: SequenceOutput(0, text, (), FinishReason.STOP)})
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert whole["output"][0]["content"][0]["text"] == "hmm" and whole["output"][1]["content"][0]["text"] == "Let me."
    assert [item["arguments"] for item in whole["output"][2:]] == ['{"a": 1}', "{}"]
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == 3 and whole["status"] == "completed"
    plain = [[{**item, "id": "", "call_id": ""} for item in response["output"]] for response in (end, whole)]
    assert plain[0] == plain[1]
    assert events.count(b"response.output_item.done\n") == 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"), ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"include": ["reasoning.encrypted_content"]}, "include"), ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"truncation": "auto"}, "truncation"), ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"n": 2}, "n"), ({"messages": []}, "messages"), ({"max_output_tokens": 100000}, "max_output_tokens"),
        ({"input": []}, "input"), ({"input": ""}, None), ({"input": [{"role": "user"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0.type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input.0"),
        ({"input": [{"role": "user", "content": "a", "output": "b"}]}, "input.0"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"), ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}}, "text.format"),
        ({"tool_choice": "required"}, "tool_choice"), ({"tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"model": "other"}, "model"), ({"temperature": 3}, "temperature"), ({"temperature": 0.0001}, "temperature"),
    ],
)  # fmt: skip
def test_the_rest_is_refused_by_name(server, fields, param):
    with server.client() as http:
        answer = http.post("/v1/responses", json={**ASKED, **fields})
    if param is None:
        assert answer.status_code == 200
        return
    error = answer.json()["error"]
    assert answer.status_code in (400, 404) and error["param"] == param, error
    assert "messages" not in error["message"] or param == "messages"
