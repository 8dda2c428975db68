"""The page at / in a real browser."""

from __future__ import annotations

import json

import pytest

from lowbit.pipeline import Pipeline
from tests.serve.browser import Browser, browser_path
from tests.serve.running import NAME, greedy, running, structured_pipeline
from tests.serve.test_tools import HERMES, WEATHER, tokenizer_of
from tests.tiny import eager_llama

pytestmark = pytest.mark.skipif(browser_path() is None, reason="needs a Chromium (apt install chromium)")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    made = Browser(browser_path(), tmp_path_factory.mktemp("chromium"))
    yield made
    made.close()


def say(browser, text):
    """Types a message and sends it."""
    browser.run(f"at('text').value = {json.dumps(text)}; at('ask').requestSubmit()")


def turns(browser):
    return browser.run("[...document.querySelectorAll('.turn')].map(turn => turn.textContent)")


def answer(server, *conversation, limit=30):
    """The model's greedy answer in a conversation."""
    roles = ("user", "assistant")
    text = "".join(f"{roles[i % 2]}: {said}\n" for i, said in enumerate(conversation)) + "assistant: "
    return greedy(server, server.pipe.tokenizer(text, add_special_tokens=False).input_ids, limit)[0]


def test_a_conversation_in_the_browser(browser):
    """Requests are refused without the key and answered with it. The conversation has two turns, and a third that is stopped.
    The page contacts no other server."""
    with running(key="sesame") as server:
        browser.open(f"{server.url}/")
        say(browser, "Hello")
        browser.wait_for("document.querySelector('.error')?.textContent.includes('API key') && !at('send').disabled")
        browser.run("at('clear').click(); at('key').value = 'sesame'; at('temperature').value = 0; at('tokens').value = 30")
        first = answer(server, "Hello")
        say(browser, "Hello")
        browser.wait_for("at('figures').textContent.includes('30 tokens') && !at('send').disabled")
        assert turns(browser) == ["Hello", first]
        assert browser.run("at('model').textContent") == NAME
        say(browser, "<b>And?</b>")
        browser.wait_for("document.querySelectorAll('.turn').length === 4 && !at('send').disabled")
        assert turns(browser)[2:] == ["<b>And?</b>", answer(server, "Hello", first, "<b>And?</b>")]
        assert browser.run("document.querySelectorAll('main b, .error').length") == 0
        with server.engine._lock:  # nothing is computed while the lock is held
            say(browser, "More")
            server.wait_until(lambda: server.service.quota.taken == 1)
            browser.run("at('stop').click()")
            server.wait_until(lambda: server.service.quota.taken == 0)
            browser.wait_for("!at('send').disabled && messages.length >= 5")
            say(browser, "And more")
            server.wait_until(lambda: server.service.quota.taken == 1)
            browser.run("at('clear').click()")
        browser.wait_for("!at('send').disabled")
        assert browser.run("messages.length") == 0 and turns(browser) == []
    requests = [e["params"]["request"]["url"] for e in browser.events if e.get("method") == "Network.requestWillBeSent"]
    assert requests and all(url.startswith((server.url, "about:")) for url in requests), requests
    said = [e["params"]["entry"] for e in browser.events if e.get("method") == "Log.entryAdded"]
    wrong = [
        e for e in said if e["level"] in ("warning", "error") and not e.get("url", "").endswith(("v1/models", "favicon.ico"))
    ]
    assert not wrong and not [e for e in browser.events if e.get("method") == "Runtime.exceptionThrown"], wrong


def test_json_and_reasoning_in_the_browser(browser):
    """A switch asks for a JSON object. Reasoning is shown separately, and is not sent back with the conversation."""
    pytest.importorskip("llguidance", reason="needs the structured extra: pip install '.[structured]'")
    with running(structured_pipeline()) as server:
        browser.open(f"{server.url}/")
        browser.run("at('json').checked = true; at('tokens').value = 100")
        for _ in range(9):
            browser.run("at('clear').click()")
            say(browser, "Hello")
            browser.wait_for("at('figures').textContent.includes('tokens/s') && !at('send').disabled")
            text = browser.run("document.querySelector('.assistant').textContent")
            assert browser.run("messages[1].content") == text
            if text.endswith("}"):
                assert isinstance(json.loads(text), dict)
                break


def test_tool_calls_in_the_browser(browser):
    """A call is shown as it streams in. What the user types next is sent as its result, and the model answers with it.
    Functions that are no JSON are refused before anything is sent."""
    pytest.importorskip("llguidance", reason="needs the structured extra: pip install '.[structured]'")
    model = eager_llama()
    model.config.max_position_embeddings = 1024
    pipe = Pipeline(model, tokenizer_of(HERMES), engine=True, max_concurrent=4, cache_bytes=1 << 22)
    with running(pipe) as server:
        browser.open(f"{server.url}/")
        browser.run("at('functions').value = '[{'; at('tokens').value = 150")
        say(browser, "Hello")
        browser.wait_for("document.querySelector('.error')?.textContent.startsWith('functions: ') && !at('send').disabled")
        assert browser.run("messages.length") == 0 and server.service.quota.taken == 0
        browser.run(f"at('functions').value = {json.dumps(json.dumps([WEATHER]))}; at('choice').value = 'required'")
        for _ in range(20):
            browser.run("at('clear').click()")
            say(browser, "Hello")
            browser.wait_for("at('figures').textContent.includes('tokens/s') && !at('send').disabled")
            if browser.run("waiting.length"):
                break
        calls = browser.run("messages.at(-1).tool_calls")
        said = [f"weather({call['function']['arguments']})" for call in calls]
        assert json.loads(calls[0]["function"]["arguments"])["place"] in ("here", "there")
        boxes = browser.run(
            "[...document.querySelectorAll('.turn:not(.user)')].map(turn => [turn.className, turn.textContent])"
        )
        assert boxes[: len(said)] == [["turn call", text] for text in said], "content would be shown before"
        assert len(boxes) <= len(said) + 1, "only the last call may be cut off by the limit"
        assert browser.run("at('text').placeholder") == f"Result of {said[0]}"
        browser.run("at('choice').value = 'none'; at('tokens').value = 9")
        for i in range(len(calls)):
            say(browser, f"sunny {i}")
        browser.wait_for("at('figures').textContent.includes('tokens/s') && !at('send').disabled")
        sent = browser.run("messages.slice(2, -1)")
        assert sent == [{"role": "tool", "tool_call_id": call["id"], "content": f"sunny {i}"} for i, call in enumerate(calls)]
        shown = browser.run("[...document.querySelectorAll('.tool')].map(turn => turn.textContent)")
        assert shown == [one["content"] for one in sent]
        assert browser.run("messages.at(-1).role") == "assistant" and browser.run("waiting.length") == 0
        prompt = pipe.tokenizer.apply_chat_template(browser.run("messages.slice(0, -1)"), tokenize=False)
        assert "sunny 0" in prompt
        assert browser.run("document.querySelectorAll('.error').length") == 0
