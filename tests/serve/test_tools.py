"""Tool calls and reasoning: read from answers of every format, streamed, enforced, and through the official client's loop."""

from __future__ import annotations

import json

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.pipeline import Pipeline
from lowbit.serve.answer import MOST_HEAD_CHARACTERS, AnswerParser
from lowbit.serve.tools import AnswerFormat, ToolFormat, answer_format, tool_format
from tests.serve.running import NAME, running
from tests.tiny import eager_llama, json_tokenizer

FUNCTIONS = ("f", "g.h-i")
HERMES, LLAMA, MISTRAL, ARGS, HARMONY = ToolFormat
ANALYSIS = "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant"
COMMENTARY = "<|channel|>commentary"
CASES = [  # format, whether reasoning is between tags, answer, and its content, reasoning and calls
    (HERMES, False, "hello <b> ", "hello <b> ", "", []),
    (
        HERMES, False,
        'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": "}</tool_call>\\"{"}}\n</tool_call>\n'
        '<tool_call>{"name":"g.h-i","arguments":{}}</tool_call>',
        "Sure.", "", [("f", '{"a": "}</tool_call>\\"{"}'), ("g.h-i", "{}")],
    ),
    (HERMES, False, "<tool_call>nonsense", "<tool_call>nonsense", "", []),
    (HERMES, False, "a <tool", "a <tool", "", []),
    (HERMES, False, '<tool_call>\n{"name": "f", "arguments": {"a": 1', "", "", [("f", '{"a": 1')]),
    (
        HERMES, False, 'a\n<tool_call>{"name": "f", "arguments": {"a": [1]}, "more": {}}</tool_call>', "a", "",
        [("f", '{"a": [1]}')],
    ),
    (HERMES, True, "<think>\nhmm </thin\n</think>\n\nanswer ", "answer ", "hmm </thin", []),
    (HERMES, True, " no thought ", " no thought ", "", []),
    (HERMES, True, "<think>unfinished  ", "", "unfinished", []),
    (HERMES, True, '  <think>a</think><tool_call>{"name":"f","arguments":{}}</tool_call>', "", "a", [("f", "{}")]),
    (HERMES, True, "<thi", "<thi", "", []),
    (None, True, "<think>a</think>b<think>c", "b<think>c", "a", []),
    (None, False, " <tool_call><think> ", " <tool_call><think> ", "", []),
    (LLAMA, False, '{"name": "f", "parameters": {"a": 1}}', "", "", [("f", '{"a": 1}')]),
    (
        LLAMA, False, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g.h-i", "parameters": {}}', "", "",
        [("f", '{"a": 1}'), ("g.h-i", "{}")],
    ),
    (LLAMA, False, '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', "", []),
    (LLAMA, False, '{"a": 1}', '{"a": 1}', "", []),
    (LLAMA, False, " plain", " plain", "", []),
    (LLAMA, False, "<|python_tag|>print(1)", "<|python_tag|>print(1)", "", []),
    (
        MISTRAL, False, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "123456789"}, {"name": "f", "arguments": {}}]',
        "", "", [("f", '{"a": 1}'), ("f", "{}")],
    ),
    (MISTRAL, False, 'hi [TOOL_CALLS] [{"name":"f","arguments":{"x":"]"}}]', "hi", "", [("f", '{"x":"]"}')]),
    (MISTRAL, False, "[TOOL", "[TOOL", "", []),
    (
        ARGS, False, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g.h-i[CALL_ID]ab3[ARGS]{}', "", "",
        [("f", '{"a": 1}'), ("g.h-i", "{}")],
    ),
    (HARMONY, False, f"{ANALYSIS}why{NEXT}<|channel|>final<|message|>Hi", "Hi", "why", []),
    (HARMONY, False, f'{COMMENTARY} to=functions.f <|constrain|>json<|message|>{{"x": 1}}', "", "", [("f", '{"x": 1}')]),
    (
        HARMONY, False,
        f"{ANALYSIS}x{NEXT}{COMMENTARY}<|message|>Wait.{NEXT} to=functions.g.h-i{COMMENTARY} json<|message|>{{}}",
        "Wait.", "x", [("g.h-i", "{}")],
    ),
    (HARMONY, False, "no harmony", "no harmony", "", []),
    (HARMONY, False, "<|channel|>final<|message|>a<|end", "a<|end", "", []),
]  # fmt: skip


def read(form, thinks, parts, functions=FUNCTIONS, opened=False):
    """Returns content, reasoning and calls of an answer that arrives in parts."""
    parser = AnswerParser(AnswerFormat(form, thinks), functions, opened)
    pieces = [piece for part in parts for piece in parser.feed(part)] + parser.feed("", last=True)
    assert all(piece.content or piece.reasoning or piece.arguments or piece.name for piece in pieces), "no piece is empty"
    calls = [
        (each.name, "".join(piece.arguments for piece in pieces if piece.index == each.index))
        for each in pieces if each.name is not None
    ]  # fmt: skip
    assert parser.has_calls == bool(calls) and len({each.id for each in pieces if each.name}) == len(calls)
    return "".join(piece.content for piece in pieces), "".join(piece.reasoning for piece in pieces), calls


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[2][:50])
def test_what_an_answer_consists_of(case):
    """An answer is read the same whole and in parts of any size."""
    form, thinks, text, *expected = case
    for size in (len(text), 1, 2, 3, 7):
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        assert list(read(form, thinks, parts)) == expected, size


def test_calls_are_read_if_functions_are_offered():
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert read(HERMES, False, [text], functions=()) == (text, "", [])
    assert read(HERMES, True, ["why</think>\n", "so"], opened=True) == ("so", "why", [])
    long = '<tool_call>{"name": "' + "a" * MOST_HEAD_CHARACTERS
    assert read(HERMES, False, [long, "b", "c"]) == (long + "bc", "", []), "nothing is held back forever"


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_text_in_any_parts(data):
    """Texts have markers and braces in any order. Reading raises no error, does not depend on the parts, and keeps text without
    markers."""
    form = data.draw(st.sampled_from((*ToolFormat, None)))
    words = [
        *(form.markers if form else ()),
        '{"name": "f", "arguments": {',
        '"parameters": ',
        "}",
        "{",
        '"',
        "\\",
        " ",
        "a",
        "é",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from([*words, "<think>", "</think>", "<", "[", ";", "\n"]), max_size=14)))
    thinks = data.draw(st.booleans()) and form is not HARMONY
    whole = read(form, thinks, [text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(form, thinks, parts) == whole
    if not any(mark in text for mark in ("<", "[", "{")):
        assert whole[0] == text


QWEN = (  # how a chat template describes tool calls, in the words of these tests; the other formats replace its markers
    "{% if tools %}Tools:{% for tool in tools %}[{{ tool.function.name }}]{% endfor %} answer as "
    '<tool_call>{\\"name\\": <name>, \\"arguments\\": <object>}</tool_call>{% endif %}'
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}\n{% endfor %}assistant: "
)


def template_like(opening, closing, key="arguments", start="assistant: "):
    """Returns the template with other markers."""
    text = QWEN.replace("<tool_call>", opening).replace("</tool_call>", closing).replace("assistant: ", start)
    return text.replace('arguments\\"', f'{key}\\"').replace('"arguments"', f'"{key}"')


TEMPLATES = {
    HERMES: QWEN,
    LLAMA: template_like("<|python_tag|>", "", "parameters"),
    MISTRAL: template_like("[TOOL_CALLS][", "]"),
    ARGS: template_like("[TOOL_CALLS]f[ARGS]", ""),
    HARMONY: template_like("<|channel|>", "<|call|>", start="<|start|>assistant"),
}


@pytest.mark.parametrize("form", ToolFormat)
def test_formats_are_recognised(form):
    assert tool_format(TEMPLATES[form]) is form
    assert tool_format("{{ messages }}") is None
    assert tool_format("<tool_call><function=f><parameter=a>arguments") is None, "Qwen 3 Coder's calls are no JSON"


def tokenizer_of(form, thinks=False):
    """Returns a tokenizer whose template has a format of calls. The markers are special tokens, except for those of Hermes."""
    tokenizer = json_tokenizer()
    if form is not HERMES:
        tokenizer.add_special_tokens({"additional_special_tokens": list(form.markers)})
    thought = "{% if messages[-1].content == 'think' %}<think>\n{% endif %}{# <think></think> #}"
    tokenizer.chat_template = TEMPLATES[form] + (thought if thinks else "")
    return tokenizer


WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"place": {"enum": ["here", "there"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["place"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "now"}}]
MESSAGES = [{"role": "user", "content": "?"}]


@pytest.fixture(scope="module", params=ToolFormat, ids=lambda form: form.value)
def formed(request):
    """A server for each format. The one for Hermes' format has reasoning too."""
    pytest.importorskip("llguidance", reason="needs the structured extra: pip install '.[structured]'")
    tokenizer = tokenizer_of(request.param, thinks=request.param is HERMES)
    model = eager_llama()
    model.config.max_position_embeddings = 1024
    with running(Pipeline(model, tokenizer, engine=True, max_concurrent=4, cache_bytes=1 << 22)) as server:
        yield server, request.param


@pytest.fixture
def client(formed):
    with openai.OpenAI(base_url=f"{formed[0].url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client
    formed[0].wait_until_free()


def check_call(call, names):
    """Checks the call of a whole message."""
    arguments = json.loads(call.function.arguments)
    assert call.type == "function" and call.function.name in names
    if call.function.name == "weather":
        assert arguments["place"] in ("here", "there") and set(arguments) <= {"place", "days"}
    assert isinstance(arguments, dict)


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_calls_that_are_asked_for(formed, client, choice):
    """A random model calls the functions as their schemas require. The streamed deltas join to the same call."""
    form, ended = formed[1], 0
    asked = dict(model=NAME, messages=MESSAGES, tools=TOOLS, tool_choice=choice, max_tokens=150, n=2)
    vocabulary = formed[0].pipe.tokenizer.get_vocab()
    ends = [vocabulary[token] for token in ("</think>", "</tool_call>", "</s>", "<|end|>", "]") if token in vocabulary]
    asked["logit_bias"] = {str(token): 30 for token in ends}  # ends reasoning and calls within the limit
    for seed in range(2):
        whole = client.chat.completions.create(seed=seed, **asked)
        joined = [{"content": "", "reasoning": "", "calls": {}, "end": None} for _ in range(2)]
        for chunk in client.chat.completions.create(seed=seed, stream=True, **asked):
            (part,) = chunk.choices
            one = joined[part.index]
            one["content"] += part.delta.content or ""
            one["reasoning"] += getattr(part.delta, "reasoning_content", None) or ""
            one["end"] = part.finish_reason or one["end"]
            for call in part.delta.tool_calls or ():
                if call.function.name:
                    assert call.id and call.type == "function" and call.index == len(one["calls"])
                    one["calls"][call.index] = [call.function.name, ""]
                one["calls"][call.index][1] += call.function.arguments or ""
        for choice_, one in zip(whole.choices, joined, strict=True):
            message = choice_.message
            calls = [[call.function.name, call.function.arguments] for call in message.tool_calls or ()]
            assert calls == list(one["calls"].values()) and choice_.finish_reason == one["end"]
            assert (message.content or "") == one["content"]
            assert (getattr(message, "reasoning_content", None) or "") == one["reasoning"]
            if choice_.finish_reason == "length":
                continue
            ended += 1
            assert choice_.finish_reason == "tool_calls" and calls and not message.content
            for call in message.tool_calls:
                check_call(call, ("weather",) if choice != "required" else ("weather", "now"))
                assert len(call.id) == 9 if form in (MISTRAL, ARGS) else call.id.startswith("call_")
            assert choice == "required" or len(calls) == 1
    assert ended


def test_the_clients_tool_loop(formed, client):
    """The model calls a function, gets its result, and answers. Messages go back in the form that the client gives them."""
    messages = list(MESSAGES)
    for seed in range(30):
        said = client.chat.completions.create(
            model=NAME, messages=messages, tools=TOOLS, tool_choice=NAMED,
            parallel_tool_calls=False, seed=seed, max_tokens=150,
        ).choices[0]  # fmt: skip
        if said.finish_reason == "tool_calls":
            break
    else:
        pytest.fail("no call was complete")
    (call,) = said.message.tool_calls
    result = f"sunny {json.loads(call.function.arguments)['place']}"
    messages += [said.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    answer = client.chat.completions.create(model=NAME, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=9)
    prompt = formed[0].pipe.tokenizer.apply_chat_template(
        [message if isinstance(message, dict) else {**message.model_dump(), "tool_calls": [{"function": {
            "name": "weather", "arguments": json.loads(call.function.arguments)}}]} for message in messages],
        tokenize=False,
    )  # fmt: skip
    assert result in prompt and json.dumps(json.loads(call.function.arguments)) in prompt
    assert answer.usage.prompt_tokens == len(formed[0].pipe.tokenizer(prompt, add_special_tokens=False).input_ids)
    assert not answer.choices[0].message.tool_calls and answer.choices[0].finish_reason in ("stop", "length")


def test_strict_functions_and_single_calls(formed, client):
    """With tool_choice "auto", a certain token begins a call. Text is free, and calls follow their schemas."""
    form, vocabulary = formed[1], formed[0].pipe.tokenizer.get_vocab()
    strict = [{"type": "function", "function": {**WEATHER, "strict": True}}]
    asked = dict(model=NAME, messages=MESSAGES, tools=strict, max_tokens=150)
    if form in (LLAMA, HARMONY):
        with pytest.raises(openai.BadRequestError, match="can only be strict with tool_choice required"):
            client.chat.completions.create(**asked)
        client.chat.completions.create(**{**asked, "tools": TOOLS, "max_tokens": 3}, parallel_tool_calls=False)
        return
    asked["logit_bias"] = {str(vocabulary[token]): 20 for token in (form.markers[0], "</think>") if token in vocabulary}
    found = 0
    for seed in range(4):
        said = client.chat.completions.create(**asked, seed=seed, parallel_tool_calls=False).choices[0]
        if said.finish_reason == "tool_calls":
            (call,) = said.message.tool_calls
            check_call(call, ("weather",))
            found += 1
    assert found


def test_structured_output_after_reasoning(formed, client):
    """The form applies to the content only. Reasoning before it, and harmony's channels, are free."""
    form, vocabulary = formed[1], formed[0].pipe.tokenizer.get_vocab()
    bias = {str(vocabulary[token]): 25 for token in ("<think>", "</think>", "<|end|>") if token in vocabulary}
    bias[str(vocabulary["a"])] = 25  # a token of the reasoning and of the name of the channel `analysis`
    seen, ended = set(), 0
    for seed in range(5):
        for content in ("?", "think"):  # the template opens the reasoning in the prompt after "think"
            said = client.chat.completions.create(
                model=NAME, messages=[{"role": "user", "content": content}], max_tokens=120, seed=seed, logit_bias=bias,
                extra_body={"guided_choice": ["yes", "no"]},
            ).choices[0]  # fmt: skip
            reasoning = getattr(said.message, "reasoning_content", None)
            if said.finish_reason == "stop":
                assert said.message.content in ("yes", "no")
                ended += 1
                seen.add(bool(reasoning))
    assert ended and (True in seen) == (form in (HERMES, HARMONY))


def test_what_the_server_says_at_start(formed):
    server, form = formed
    lines = server.service.report()
    assert lines[:2] == ["structured output: by llguidance", f"tool calls: as {form.value}"]
    assert len(lines) == (3 if form in (HERMES, HARMONY) else 2)
    assert answer_format(tokenizer_of(form)).tools is form


def test_unknown_formats(tiny):
    """Without a known format, calls are returned as text. A request that needs enforced calls is refused."""
    with tiny.client() as client:
        asked = {"model": NAME, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 2}
        assert client.post("/v1/chat/completions", json=asked).status_code == 200
        for more, param in (
            ({"tool_choice": "required"}, "tool_choice"), ({"parallel_tool_calls": False}, "parallel_tool_calls"),
            ({"tools": [{"type": "function", "function": {**WEATHER, "strict": True}}]}, "tools"),
        ):  # fmt: skip
            answer = client.post("/v1/chat/completions", json={**asked, **more})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
            assert "no format of calls that is known" in answer.json()["error"]["message"]
    assert "tool calls: not recognised in the chat template, returned as text" in tiny.service.report()


WRONG = [
    ({"tool_choice": {**NAMED, "function": {"name": "other"}}}, "tool_choice", "no function of tools is called 'other'"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "belongs to tools"),
    ({"tools": [*TOOLS, TOOLS[0]]}, "tools", "the same name"),
    ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice", "goes without response_format"),
    ({"tool_choice": "required", "min_tokens": 2}, "tool_choice", "ends by itself"),
    ({"tool_choice": "perhaps"}, "tool_choice", ""),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "foo"}}}], "tool_choice": "required"},
        "tools", "foo",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("field", "param", "why"), WRONG, ids=range(len(WRONG)))
def test_wrong_tools_are_refused_with_the_reason(formed, field, param, why):
    with formed[0].client() as client:
        body = {"model": NAME, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 2, **field}
        answer = client.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"].startswith(param) and why in error["message"], error
