"""Refused requests: the error messages, and that a refusal leaves nothing behind."""

from __future__ import annotations

import gc
import json
import re
import threading
import tracemalloc

import openai
import pytest

from lowbit.engine import Detokenizer
from lowbit.pipeline import Pipeline
from lowbit.serve.errors import ApiError
from lowbit.serve.job import GenerationJob
from lowbit.serve.limits import Limits
from lowbit.serve.schema import ChatCompletionRequest, CompletionRequest, parse
from lowbit.serve.service import State
from lowbit.serve.worker import OutputCollector, ServedSequence
from tests.serve.running import NAME, TEMPLATE, raw, running, tiny_pipeline

ASKED = {"model": NAME, "prompt": "ab", "max_tokens": 4, "temperature": 0}
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "ab"}], "max_tokens": 4}

REFUSED = [
    ({"model": None}, "model"), ({"model": 3}, "model"), ({"no_such_field": 1}, "no_such_field"),
    ({"temperature": "1"}, "temperature"), ({"temperature": -0.1}, "temperature"), ({"temperature": 2.1}, "temperature"),
    ({"temperature": 1e-7}, "temperature"), ({"temperature": True}, "temperature"), ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"), ({"top_k": -2}, "top_k"), ({"top_k": 1 << 40}, "top_k"), ({"min_p": 2}, "min_p"),
    ({"seed": 1 << 70}, "seed"), ({"seed": 1.5}, "seed"), ({"n": 0}, "n"), ({"n": 17}, "n"), ({"n": "2"}, "n"),
    ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": 1 << 50}, "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"), ({"stop": ""}, "stop"), ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 257}, "stop"), ({"stop": [1]}, "stop.0"), ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"), ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"a": 1}}, "logit_bias"), ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"01": 1}}, "logit_bias"), ({"logit_bias": {"160": 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"), ({"logit_bias": [1]}, "logit_bias"),
    ({"stream": 1}, "stream"), ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"), ({"user": 3}, "user"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"), ({"guided_grammar": 3}, "guided_grammar"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
    ({"response_format": {"type": "json_schema"}}, "response_format"), ({"guided_regex": ""}, "guided_regex"),
    ({"structured_outputs": {}}, "structured_outputs"), ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
    ({"guided_json": {}}, "guided_json"), ({"guided_json": "{"}, "guided_json"), ({"guided_json": "3"}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"), ({"guided_choice": "ab"}, "guided_choice"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"), ({"guided_regex": "a", "min_tokens": 1}, "min_tokens"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"), ({"guided_regex": "a" * 70_000}, "guided_regex"),
]  # fmt: skip
"""Fields of both endpoints, and the name in the error."""

REFUSED_COMPLETIONS = [
    ({"prompt": None}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt.0"), ({"prompt": [1, "a"]}, "prompt."),
    ({"prompt": [-1]}, "prompt.0"), ({"prompt": [1 << 33]}, "prompt.0"), ({"prompt": [160]}, "prompt"),
    ({"prompt": ["a"] * 65}, "prompt"), ({"prompt": {}}, "prompt"), ({"prompt": ["a"] * 40, "n": 16}, "n"),
    ({"logprobs": 21}, "logprobs"), ({"logprobs": True}, "logprobs"), ({"echo": True, "logprobs": 1}, "echo"),
    ({"best_of": 2}, "best_of"), ({"suffix": "a"}, "suffix"), ({"messages": []}, "messages"),
]  # fmt: skip

REFUSED_CHATS = [
    ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages.0"),
    ({"max_tokens": None, "max_completion_tokens": 9999}, "max_completion_tokens"),
    ({"messages": [{"role": "king", "content": "a"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": "a", "mood": 1}]}, "messages.0.mood"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages.0.content.0."),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "", "arguments": ""}}]}]}, "messages"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"), ({"logprobs": 1}, "logprobs"), ({"top_logprobs": 2}, "top"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"), ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tool_choice": "required"}, "tool_choice"), ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"functions": []}, "functions"), ({"modalities": ["audio"]}, "modalities.0"), ({"store": True}, "store"),
    ({"reasoning_effort": "low"}, "reasoning_effort"), ({"service_tier": "flex"}, "service_tier"), ({"prompt": "a"}, "prompt"),
    ({"metadata": {"a": "b"}}, "metadata"), ({"parallel_tool_calls": 0}, "parallel_tool_calls"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "field", "name"),
    [("completions", *case) for case in REFUSED + REFUSED_COMPLETIONS]
    + [("chat/completions", *case) for case in REFUSED + REFUSED_CHATS],
    ids=lambda value: json.dumps(value)[:40],
)
def test_invalid_fields_are_refused_by_name(path, field, name, free):
    body = {**(ASKED if path == "completions" else CHAT), **field}
    with free.client() as client:
        answer = client.post(f"/v1/{path}", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["type"] == "invalid_request_error" and error["param"].startswith(name), error
    assert error["message"].startswith(error["param"]) and "\n" not in error["message"]


@pytest.mark.parametrize("field", [{"stop": [1] * 300_000}, {"prompt": [[]] * 300_000}, {"prompt": [1] * 300_000 + [-1]}])
def test_a_large_body_is_refused_at_its_first_error(field):
    """Only the first error of a large body is reported: reporting all would take seconds and gigabytes."""
    body = json.dumps({**ASKED, **field}).encode()
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as refusal:
            parse(CompletionRequest, body)
        assert refusal.value.status == 400 and tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_fields_without_effect_are_accepted(free):
    trivial = {"response_format": {"type": "text"}, "n": None, "stop": None, "user": "me", "logit_bias": {}, "top_k": -1}
    chat = {"store": False, "modalities": ["text"], "service_tier": "auto", "tools": [], "metadata": None, "logprobs": False}
    with free.client() as client:
        for path, body in (("completions", {**ASKED, "best_of": 1, "suffix": None}), ("chat/completions", {**CHAT, **chat})):
            answer = client.post(f"/v1/{path}", json={**body, **trivial})
            assert answer.status_code == 200, answer.text


def test_bodies(free):
    """Media types, sizes, and bodies that are not JSON."""
    with free.client() as client:
        post = lambda content, kind="application/json", **headers: client.post(  # noqa: E731
            "/v1/completions", content=content, headers={"content-type": kind, **headers}
        )
        assert post(b"{}", "text/plain").status_code == 415
        assert post(json.dumps(ASKED).encode(), "application/json; charset=utf-8").status_code == 200
        for wrong in (
            b"",
            b"{",
            b"[]",
            b"3",
            b"null",
            b'"a"',
            b"\xff\xfe",
            b'{"model": "\xc3\x28"}',
            b"[" * 100_000,
            b"\0" * 50,
        ):
            answer = post(wrong)
            assert answer.status_code == 400 and answer.json()["error"]["message"], wrong[:20]
        large = json.dumps({**ASKED, "prompt": "a" * (1 << 20)}).encode()
        assert post(large).status_code == 413
        assert post(iter([large[:100_000]] * 20)).status_code == 413  # in chunks, without a Content-Length
        many = json.dumps({f"f{i}": i for i in range(60_000)}).encode()
        assert post(many).status_code == 400


def test_refusals_name_their_field():
    """The schema alone, without a server, reads the fields of valid requests."""
    asked = parse(CompletionRequest, json.dumps({**ASKED, "stop": ["a", "b"], "logit_bias": {"5": -3}, "n": 2}).encode())
    assert (asked.stops, asked.choices, asked.limit, asked.num_logprobs) == (("a", "b"), 2, 4, None)
    chat = parse(ChatCompletionRequest, json.dumps({**CHAT, "logprobs": True, "max_completion_tokens": 4}).encode())
    assert (chat.num_logprobs, chat.limit, chat.messages[0].for_template()["content"]) == (0, 4, "ab")
    call = {"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}
    said = parse(
        ChatCompletionRequest, json.dumps({**CHAT, "messages": [{"role": "assistant", "tool_calls": [call]}]}).encode()
    )
    assert said.messages[0].for_template()["tool_calls"][0]["function"]["arguments"] == {"x": 1}


def test_a_key():
    with running(key="sesame") as server, server.client() as client:
        for header in (None, "Bearer no", "Bearer", "Basic sesame", "Bearer sésame", "Bearer sesamee", "sesame", ""):
            headers = {"authorization": header.encode()} if header is not None else {}
            client.headers.pop("authorization", None)
            for path in ("/v1/models", f"/v1/models/{NAME}", "/metrics"):
                answer = client.get(path, headers=headers)
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
            assert client.post("/v1/completions", json=ASKED, headers=headers).status_code == 401
        for path in ("/health", "/ready", "/"):
            assert client.get(path).status_code == 200
        right = {"authorization": "Bearer sesame"}
        assert client.post("/v1/completions", json=ASKED, headers=right).status_code == 200
        assert client.get("/metrics", headers={**right, "host": "example.org"}).status_code == 200


def test_pages_of_other_sites_are_refused(tiny):
    """A page of another site may reach the server by a host name that resolves to this machine (DNS rebinding), or by a form,
    which needs no CORS preflight. Both are refused."""
    with tiny.client() as client:
        assert client.get("/v1/models", headers={"host": "evil.example"}).status_code == 403
        for host in ("127.0.0.1.evil.example", "10.0.0.1", "[::2]"):
            assert client.get("/v1/models", headers={"host": host}).status_code == 403
        for host in ("localhost:1", "127.0.0.1", "127.0.0.2:8000", "[::1]:8000", "LOCALHOST"):
            assert client.get("/v1/models", headers={"host": host}).status_code == 200
        form = client.post("/v1/completions", content=json.dumps(ASKED), headers={"content-type": "text/plain"})
        assert form.status_code == 415 and "access-control-allow-origin" not in form.headers
        assert client.options("/v1/completions", headers={"origin": "https://evil.example"}).status_code == 405


def test_no_path_redirects(tiny):
    """No path redirects, not even to the same server, since the target would be taken from the Host header."""
    with tiny.client() as client:
        for path in ("/health/", "/v1/completions/", "/example.org//", "/v1"):
            answer = client.get(path)
            assert answer.status_code == 404 and "location" not in answer.headers and answer.json()["error"]["message"], path


def test_a_full_server_sends_retry_after():
    """The quota covers running and queued sequences; a refused request does not change it."""
    with running(tiny_pipeline(max_concurrent=1), max_concurrent=1, max_queue=1) as server:
        found = []
        with server.client() as client, server.engine._lock:  # nothing is computed while the lock is held
            threads = [
                threading.Thread(target=lambda: found.append(server.client().post("/v1/completions", json=ASKED))) for _ in "ab"
            ]
            for thread in threads:
                thread.start()
            server.wait_until(lambda: server.service.quota.taken == 2)
            refused = client.post("/v1/completions", json=ASKED)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert "2 of 2 sequences" in refused.json()["error"]["message"]
            assert client.get("/health").status_code == 200 and client.get("/ready").status_code == 200
        for thread in threads:
            thread.join(30)
        assert [answer.status_code for answer in found] == [200, 200]
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as official, pytest.raises(openai.BadRequestError):
            official.completions.create(**{**ASKED, "n": 3})


def test_states():
    """No sequence runs before the end of the warm-up or after the start of the shutdown. /health is 200 all the time."""
    with running() as server, server.client() as client:
        for state in (State.WARMING, State.DRAINING):
            server.service.state = state
            answer = client.post("/v1/completions", json=ASKED)
            assert (
                answer.status_code == 503 and answer.headers["retry-after"] and state.value in answer.json()["error"]["message"]
            )
            assert client.get("/ready").status_code == 503 and client.get("/health").status_code == 200
        server.service.state = State.READY
        assert client.get("/ready").status_code == 200


def test_prompts_have_a_limit_of_their_own():
    with running(max_prompt=8) as server, server.client() as client:
        assert client.post("/v1/completions", json={**ASKED, "prompt": "a" * 8}).status_code == 200
        answer = client.post("/v1/completions", json={**ASKED, "prompt": "a" * 9})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
        assert answer.json()["error"]["message"] == "prompt: a prompt of 9 tokens, here it has at most 8"


def test_invalid_limits():
    with pytest.raises(ValueError, match="max_concurrent is at least 1, got 0"):
        Limits(max_concurrent=0)


def test_metrics(free):
    with free.client() as client:

        def values():
            lines = [line.rpartition(" ") for line in client.get("/metrics").text.splitlines() if line[0] != "#"]
            return {name: float(value) for name, _, value in lines}

        before = values()
        client.post("/v1/completions", json={**ASKED, "prompt": "abc", "n": 2, "ignore_eos": True})
        after = values()

    def grown(name):
        return after.get(name, 0) - before.get(name, 0)

    assert grown('lowbit_requests_total{endpoint="/v1/completions",status="200"}') == 1
    assert (grown("lowbit_prompt_tokens_total"), grown("lowbit_generated_tokens_total")) == (6, 8)
    assert grown('lowbit_texts_total{end="length"}') == 2 and grown('lowbit_texts_total{end="stop"}') == 0
    assert grown("lowbit_time_to_first_token_seconds_count") == grown("lowbit_time_per_token_seconds_count") == 2
    assert after["lowbit_texts_running"] == after["lowbit_kv_pages_used"] == 0 < after["lowbit_kv_pages"]
    assert after["lowbit_kv_tokens_used"] == 0 and after["lowbit_kv_tokens"] == 128 * after["lowbit_kv_pages"]
    assert after['lowbit_kv_bytes{format="16"}'] == free.engine.program.cache.nbytes
    assert after["lowbit_mixed_step_budget"] == 1024 and grown("lowbit_mixed_steps_total") == 0


def test_prompts_beside_generating_sequences_are_counted():
    """A prompt that arrives while another request generates is computed in the same steps."""
    with running(tiny_pipeline()) as server, server.client() as client:
        long = {"model": NAME, "prompt": "abc", "max_tokens": 200, "ignore_eos": True, "stream": True}
        for _ in range(20):  # on a busy machine the long text may end before the prompt arrives
            with client.stream("POST", "/v1/completions", json=long) as events:
                next(events.iter_lines())
                answer = client.post("/v1/completions", json={"model": NAME, "prompt": "abcdefgh", "max_tokens": 2}).json()
                assert answer["usage"]["prompt_tokens"] == 8
            lines = client.get("/metrics").text.splitlines()
            values = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}
            if values["lowbit_mixed_steps_total"]:
                break
        assert values["lowbit_mixed_steps_total"] >= 1 and values["lowbit_mixed_prompt_tokens_total"] >= 8


def test_a_server_with_keys_and_values_in_4_bits():
    """The server's answers are those of an engine with this format alone. In the same memory its pool holds more tokens."""
    with running(tiny_pipeline(kv="int4")) as server, server.client() as client:
        asked = {"model": NAME, "prompt": "abcdef", "max_tokens": 9, "temperature": 0, "ignore_eos": True}
        text = client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
        alone = Pipeline(server.pipe.model, server.pipe.tokenizer, kv="int4", cache_bytes=1 << 22)
        assert text == alone("abcdef", max_new_tokens=9, do_sample=False, ignore_eos=True)[0].generated_text
        lines = client.get("/metrics").text.splitlines()
        values = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}
        cache = server.engine.program.cache
        assert values['lowbit_kv_bytes{format="int4"}'] == cache.nbytes <= 1 << 22
        assert values["lowbit_kv_tokens"] == 128 * (cache.pages - 1)


def test_a_stop_string_in_the_last_token_is_counted_as_stop(free, monkeypatch):
    """The engine finishes the sequence for its length. The server then returns the text that was held back, which completes a
    stop string."""
    decode = free.pipe.tokenizer.decode
    monkeypatch.setattr(
        Detokenizer, "_decode", lambda self, tokens: decode(tokens)[: len(tokens) - 1] + "\ufffd" * bool(tokens)
    )
    with free.client() as client:

        def counted():
            found = re.findall(r'^lowbit_texts_total{end="(\w+)"} (.+)$', client.get("/metrics").text, re.MULTILINE)
            return {end: float(count) for end, count in found}

        before = counted()
        asked = {**ASKED, "max_tokens": 3, "temperature": 0, "stop": "\ufffd"}
        (choice,) = client.post("/v1/completions", json=asked).json()["choices"]
        assert choice["finish_reason"] == "stop"
        assert counted() == {**before, "stop": before.get("stop", 0) + 1}


def test_the_log_has_no_bodies(free, caplog):
    caplog.set_level("INFO")
    with free.client() as client:
        client.post("/v1/completions", json={**ASKED, "prompt": "secret", "user": "secret"})
        client.post("/v1/completions", json={**ASKED, "secret": "secret"})
        client.post("/v1/completions", content=b'"secret', headers={"content-type": "application/json"})
        client.get("/secret")

    def logged():
        return [r.getMessage() for r in caplog.records if r.name == "lowbit.serve"]

    free.wait_until(lambda: len(logged()) == 4)  # a log line is written after its answer
    lines = logged()
    assert len(lines) == 4 and "secret" not in "".join(lines)


def test_nothing_is_kept(tiny):
    """Requests leave nothing behind when they end, whether they were whole, streamed, refused or cancelled."""

    def left():
        gc.collect()
        return sum(type(each) in (GenerationJob, ServedSequence, OutputCollector) for each in gc.get_objects())

    before = left()
    with tiny.client() as client:
        for i in range(20):
            client.post("/v1/completions", json={**ASKED, "stream": i % 2 == 0, "n": 1 + i % 3, "top_p": 1 + i % 4 // 3})
    raw(tiny, b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{", seconds=0.1)
    tiny.wait_until_free()
    tiny.wait_until(lambda: left() <= before)


def of_template(template):
    """A server whose model has this chat template."""
    pipe = tiny_pipeline()
    pipe.tokenizer.chat_template = template
    return running(pipe)


def test_halves_of_characters():
    """JSON strings may have lone surrogates, also in the arguments of a tool call. They are refused, since tokenizers do not
    accept them."""
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": "\\ud800"}'}}
    with of_template("{{ messages[-1].tool_calls | tojson }}") as server, server.client() as client:
        for arguments, status in (('{"x": "\\ud800"}', 400), ('{"x": "\\ud83d\\ude00"}', 200)):
            call["function"]["arguments"] = arguments
            asked = {**CHAT, "messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}
            answer = client.post("/v1/chat/completions", json=asked)
            assert answer.status_code == status and (status == 200 or answer.json()["error"]["param"] == "messages"), (
                answer.text
            )


def test_tools_that_the_template_ignores(free):
    """Tools are refused if the chat template ignores them. With tool_choice "none" they are accepted."""
    asked = {**CHAT, "tools": [{"type": "function", "function": {"name": "weather"}}]}
    with free.client() as client:
        assert client.post("/v1/chat/completions", json=asked).status_code == 200
    with of_template(TEMPLATE.partition("{% for tool ")[0]) as server, server.client() as client:
        answer = client.post("/v1/chat/completions", json=asked)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
        assert client.post("/v1/chat/completions", json={**asked, "tool_choice": "none"}).status_code == 200
