"""Structured output: answers are what a schema, a pattern, a list or a grammar allows, whole and streamed."""

from __future__ import annotations

import asyncio
import json
import re

import openai
import pytest

pytest.importorskip("llguidance", reason="needs the structured extra: pip install '.[structured]'")

from tests.serve.hostile import attack
from tests.serve.running import NAME, running, structured_pipeline
from tests.tiny import json_tokenizer

MESSAGES = [{"role": "user", "content": "a person"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def structured():
    """A server of a tiny model whose tokenizer grammars can read."""
    with running(structured_pipeline()) as server:
        yield server


@pytest.fixture
def client(structured):
    with openai.OpenAI(base_url=f"{structured.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client
    structured.wait_until_free()


def is_person(text):
    found = json.loads(text)
    return found.keys() == {"name", "age"} and len(found["name"]) <= 6 and 0 <= found["age"] <= 150


FORMS = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}}}, is_person),
    ({"extra_body": {"guided_json": PERSON}}, is_person),
    ({"extra_body": {"guided_json": json.dumps(PERSON)}}, is_person),
    ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p"}}},
        lambda text: isinstance(json.loads(text), dict),
    ),
    ({"extra_body": {"structured_outputs": {"json": PERSON}}}, is_person),
    ({"extra_body": {"structured_outputs": {"choice": ["up", "down"]}}}, ["up", "down"].__contains__),
    ({"extra_body": {"guided_regex": r"\d{3}-[a-f]+x"}}, lambda text: re.fullmatch(r"\d{3}-[a-f]+x", text)),
    ({"extra_body": {"guided_choice": ["left", "right", "straight on"]}}, ["left", "right", "straight on"].__contains__),
    ({"extra_body": {"guided_grammar": 'start: "<" name ">"\nname: /[a-z]{2,5}/'}}, lambda t: re.fullmatch("<[a-z]{2,5}>", t)),
]


@pytest.mark.parametrize(("form", "right"), FORMS, ids=range(len(FORMS)))
def test_answers_have_the_form(client, form, right):
    """Both endpoints give several answers a request, whole and streamed. A seed gives the same text each time."""
    ended, before = 0, ([""], [None])
    settings = dict(model=NAME, n=3, max_tokens=150, seed=5, temperature=1.0)
    extra = form.get("extra_body", form)  # the client's method for completions does not know response_format
    for stream in (False, True):
        if stream:
            texts, reasons = [""] * 3, [None] * 3
            for chunk in client.chat.completions.create(messages=MESSAGES, stream=True, **settings, **form):
                (choice,) = chunk.choices
                texts[choice.index] += choice.delta.content or ""
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            assert (texts, reasons) == before
        else:
            choices = client.chat.completions.create(messages=MESSAGES, **settings, **form).choices
            texts, reasons = [each.message.content for each in choices], [each.finish_reason for each in choices]
            before = texts, reasons
            plain = client.completions.create(prompt="say", extra_body=extra, **settings).choices
            texts, reasons = texts + [each.text for each in plain], reasons + [each.finish_reason for each in plain]
        for text, reason in zip(texts, reasons, strict=True):
            assert reason == "length" or right(text), text
            ended += reason == "stop"
    assert ended


def test_many_at_once(structured):
    """Requests with and without a form run in the same steps. Each answer is the same as alone."""
    forms = [form for form, _ in FORMS] + [{}] * 4

    async def ask(client, i):
        asked = dict(model=NAME, messages=MESSAGES, max_tokens=40, seed=i, **forms[i])
        choice = (await client.chat.completions.create(**asked)).choices[0]
        return choice.message.content, choice.finish_reason

    async def all_of_them(at_once):
        async with openai.AsyncOpenAI(base_url=f"{structured.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
            if at_once:
                return await asyncio.gather(*(ask(client, i) for i in range(len(forms))))
            return [await ask(client, i) for i in range(len(forms))]

    assert asyncio.run(all_of_them(True)) == asyncio.run(all_of_them(False))
    structured.wait_until_free()


def test_the_clients_own_models(client):
    """The official client parses an answer into a pydantic model."""
    from pydantic import BaseModel

    class Door(BaseModel):
        open: bool
        side: int

    for seed in range(20):
        try:
            said = client.chat.completions.parse(model=NAME, messages=MESSAGES, response_format=Door, seed=seed, max_tokens=150)
        except openai.LengthFinishReasonError:
            continue
        assert isinstance(said.choices[0].message.parsed, Door)
        return
    pytest.fail("no answer was complete")


WRONG = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "foo"}}}}, "foo"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}}, "not"),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"guided_json": {"$ref": "#/$defs/missing"}}, "missing"),
    ({"guided_json": '{"enum": ["\\ud800"]}'}, "hex escape"),
    ({"guided_regex": "(a"}, "unclosed"),
    ({"guided_regex": "(" * 3000 + "a" + ")" * 3000}, "regex"),
    ({"guided_grammar": "start: missing"}, "missing"),
    ({"guided_grammar": "start: " + "(" * 9000 + '"a"' + ")" * 9000}, "nested"),
    ({"guided_choice": ["a" * 200] * 400}, "has at most 65,536 characters"),
]


@pytest.mark.parametrize(("form", "why"), WRONG, ids=lambda value: json.dumps(value)[:40])
def test_wrong_forms_are_refused_with_the_reason(structured, form, why):
    with structured.client() as client:
        asked = {"model": NAME, "messages": MESSAGES, "max_tokens": 3, **form}
        answer = client.post("/v1/chat/completions", content=json.dumps(asked), headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == next(iter(form)), error
    assert why in error["message"] and len(error["message"]) < 400 and "\n" not in error["message"], error


def test_a_form_that_becomes_too_costly_fails_alone(structured):
    """A form may become too costly, or need text for which the model has no tokens. Its request gets an error; the server
    continues and stays healthy."""
    asked = {"model": NAME, "messages": MESSAGES, "max_tokens": 100, "temperature": 0}
    with structured.client() as client:
        bias = {str(json_tokenizer()("a", add_special_tokens=False).input_ids[-1]): 100}
        costly = {"guided_regex": "((a{1,100}){1,100}){1,100}", "logit_bias": bias}
        # more failures than the number that makes a server unhealthy
        for form in [costly, *[{"guided_regex": "a[\x01\x02]"}] * 6]:
            answer = client.post("/v1/chat/completions", json={**asked, **form})
            assert answer.status_code == 400 and answer.json()["error"]["code"] == "grammar_failed"
            assert ("too many" if "logit_bias" in form else "no token of the model continues") in answer.json()["error"][
                "message"
            ]
            assert client.get("/health").status_code == 200
        assert client.post("/v1/chat/completions", json={**asked, "guided_choice": ["yes"]}).status_code == 200


def test_a_grammar_is_compiled_once(structured, client):
    compile_ = structured.service.grammars._compile
    before = compile_.cache_info()
    for seed in range(3):
        client.chat.completions.create(
            model=NAME, messages=MESSAGES, max_tokens=2, seed=seed, extra_body={"guided_regex": "once[a-z]{9}"}
        )
    after = compile_.cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (1, 2)


def test_a_tokenizer_that_grammars_cannot_read(tiny):
    """The server starts with such a tokenizer. Requests for structured output are refused with the reason."""
    with tiny.client() as client:
        asked = {"model": NAME, "messages": MESSAGES, "max_tokens": 2, "response_format": {"type": "json_object"}}
        error = client.post("/v1/chat/completions", json=asked).json()["error"]
    assert error["code"] == "unsupported" and error["param"] == "response_format"
    assert "does not read this model's tokenizer" in error["message"]


def test_generated_requests(structured):
    """Hostile schemas, patterns and grammars reach llguidance. No request causes a status of 500 or a leak."""
    seen = attack(structured, 200)
    assert seen[200] > 5 and seen[400] > 50, seen
    with structured.client() as client:
        assert client.get("/health").status_code == 200
