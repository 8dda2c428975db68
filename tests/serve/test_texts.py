"""Embeddings, and texts as tokens."""

from __future__ import annotations

import json

import openai
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowbit.engine import Engine
from tests.serve.hostile import ANYTHING, HEADS, ODD_TEXT, send_body
from tests.serve.running import NAME
from tests.tiny import eager_llama


@pytest.fixture
def client(free):
    with openai.OpenAI(base_url=f"{free.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client


def expected(server, text, pooling):
    """The embedding of a text by the model's own forward in float64."""
    model = eager_llama().double()
    ids = server.pipe.tokenizer(text, return_tensors="pt").input_ids
    with torch.inference_mode():
        hidden = model.model(ids).last_hidden_state[0]
    pooled = hidden.mean(0) if pooling == "mean" else hidden[-1]
    return pooled / pooled.norm()


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_by_the_official_client(client, free, pooling):
    """The client asks for base64 by default. Floats are the same numbers, and a text may be given as tokens."""
    texts = ["abc", "a longer text, 123", "x"]
    said = client.embeddings.create(model=NAME, input=texts, extra_body={"pooling": pooling})
    assert [each.index for each in said.data] == [0, 1, 2] and said.usage.prompt_tokens == sum(map(len, texts))
    for each, text in zip(said.data, texts, strict=True):
        torch.testing.assert_close(
            torch.tensor(each.embedding, dtype=torch.float64), expected(free, text, pooling), atol=1e-5, rtol=0
        )
    floats = client.embeddings.create(model=NAME, input=texts[1], encoding_format="float", extra_body={"pooling": pooling})
    assert floats.data[0].embedding == pytest.approx(said.data[1].embedding, abs=1e-7)
    ids = free.pipe.tokenizer(texts[1]).input_ids
    by_ids = client.embeddings.create(model=NAME, input=ids, encoding_format="float", extra_body={"pooling": pooling})
    assert by_ids.data[0].embedding == floats.data[0].embedding
    default = client.embeddings.create(model=NAME, input=texts[1], encoding_format="float")
    assert (default.data[0].embedding == floats.data[0].embedding) == (pooling == "last")


def test_embeddings_while_answers_are_generated(client, free):
    """Embeddings are computed between the steps of an answer, which is the same as alone."""
    asked = dict(model=NAME, prompt="ab", max_tokens=60, temperature=0, extra_body={"ignore_eos": True})
    alone = client.completions.create(**asked).choices[0].text
    text, count = "", 0
    for part in client.completions.create(stream=True, **asked):
        text += part.choices[0].text
        if count < 5:
            client.embeddings.create(model=NAME, input=["abc", "d"])
            count += 1
    assert text == alone and count == 5


def test_an_embedding_that_fails(client, free, monkeypatch):
    """If an embedding fails, only its request fails."""

    def fail(tokens, pooling):
        raise RuntimeError("no memory")

    monkeypatch.setattr(free.engine, "embed", fail)
    with pytest.raises(openai.InternalServerError):
        client.embeddings.create(model=NAME, input="a")
    monkeypatch.undo()
    assert client.embeddings.create(model=NAME, input="a").data


def test_the_engines_embeddings():
    engine = Engine(eager_llama(), max_concurrent=1, cache_bytes=1 << 24)
    assert engine.embed([1, 2, 3]).dtype == torch.float32 and float(engine.embed([5]).norm()) == pytest.approx(1)
    for wrong in ([], [160], [-1], [1] * 300):
        with pytest.raises(ValueError, match="1 to 256 tokens from 0 to 159"):
            engine.embed(wrong)


def test_tokens_of_a_text_and_back(free):
    with free.client() as client:
        for text in ("abc", " {x} "):
            found = client.post("/tokenize", json={"model": NAME, "prompt": text, "return_token_strs": True}).json()
            assert found["tokens"] == free.pipe.tokenizer(text).input_ids and found["count"] == len(text)
            assert found["token_strs"] == list(text) and found["max_model_len"] == free.engine.max_length
            assert client.post("/detokenize", json={"model": NAME, "tokens": found["tokens"]}).json() == {"prompt": text}
        messages = [{"role": "user", "content": "hi"}]
        found = client.post("/tokenize", json={"model": NAME, "messages": messages}).json()
        rendered = free.pipe.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert found["tokens"] == free.pipe.tokenizer(rendered, add_special_tokens=False).input_ids
        assert found["token_strs"] is None


def test_special_tokens_in_front(free, monkeypatch):
    """The flag for special tokens reaches the tokenizer. It is on by default."""
    asked = []
    encoded = free.service.prompts._encoded
    monkeypatch.setattr(
        free.service.prompts, "_encoded", lambda request, *rest: (asked.append(request), encoded(request, *rest))[1]
    )
    with free.client() as client:
        for special in (None, True, False):
            assert (
                client.post("/tokenize", json={"model": NAME, "prompt": "a", "add_special_tokens": special}).status_code == 200
            )
    assert [each["special"] for each in asked] == [True, True, False]


WRONG = [
    ("v1/embeddings", {"input": []}, "input"), ("v1/embeddings", {"input": ["a"] * 65}, "input"),
    ("v1/embeddings", {"input": ""}, "prompt"), ("v1/embeddings", {"input": [999]}, "prompt"),
    ("v1/embeddings", {"input": "a", "dimensions": 3}, "dimensions"),
    ("v1/embeddings", {"input": "a", "pooling": "cls"}, "pooling"),
    ("v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ("v1/embeddings", {"input": "a" * 300}, "prompt"), ("tokenize", {}, "prompt"), ("tokenize", {"prompt": 3}, "prompt"),
    ("tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
    ("tokenize", {"prompt": "a", "tools": []}, "tools"), ("detokenize", {"tokens": []}, "tokens"),
    ("detokenize", {"tokens": [160]}, "prompt"), ("detokenize", {"tokens": "a"}, "tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param"), WRONG)
def test_wrong_fields_are_refused_by_name(free, path, body, param):
    with free.client() as client:
        answer = client.post(f"/{path}", json={"model": NAME, **body})
        assert answer.status_code == 400 and answer.json()["error"]["param"].startswith(param), answer.text
        assert client.post(f"/{path}", json={**body, "model": "other"}).status_code in (400, 404)


NAMES = (
    "input", "prompt", "tokens", "messages", "pooling", "encoding_format", "add_special_tokens", "return_token_strs",
)  # fmt: skip
VALUES = ODD_TEXT | st.lists(st.integers(-1, 161), max_size=5) | st.lists(ODD_TEXT, max_size=3) | ANYTHING


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(
    HEADS,
    st.sampled_from(("/v1/embeddings", "/tokenize", "/detokenize")),
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3),
)
def test_generated_requests(free, head, path, fields):
    """No request causes a status of 500 or more, a hang or a leak."""
    send_body(free, head, path, json.dumps({"model": NAME, **fields}).encode())
