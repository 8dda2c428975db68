"""A server with LoRA adapters: models of the official client, one batch, refusals, metrics."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from lowbit.serve.limits import Limits
from lowbit.serve.server import service_of
from tests.adapters import merged, write_adapter
from tests.serve.running import NAME, running, tiny_pipeline
from tests.serve.test_speculation import metrics
from tests.tiny import eager_llama

ASKED = {"prompt": "abcdef", "max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(root / name, eager_llama(), seed=i) for i, name in enumerate(("one", "two"))}


@pytest.fixture(scope="module")
def server(folders):
    with running(tiny_pipeline(lora=folders)) as server:
        yield server


def test_adapters_are_models(server):
    with server.client() as client:
        listed = client.get("/v1/models").json()["data"]
        assert [entry["id"] for entry in listed] == [NAME, "one", "two"]
        assert [entry.get("parent") for entry in listed] == [None, NAME, NAME]
        assert client.get("/v1/models/two").json()["parent"] == NAME
        refused = client.get("/v1/models/three")
        assert refused.status_code == 404 and "'tiny', 'one', 'two'" in refused.json()["error"]["message"]


def test_each_answers_as_its_merged_model(server, folders):
    """Several adapters answer at once. Each answer is that of the merged model, and names its adapter."""
    expected = {}
    for name in (NAME, "one", "two"):
        model = eager_llama() if name == NAME else merged(eager_llama(), folders[name])
        pipe = tiny_pipeline()
        pipe.model = model
        (answer,) = pipe([ASKED["prompt"]], max_new_tokens=24, do_sample=False)
        expected[name] = answer.generated_text
    assert len(set(expected.values())) == 3
    with server.client() as client, ThreadPoolExecutor(6) as pool:

        def ask(name):
            return client.post("/v1/completions", json={"model": name, **ASKED}).json()

        for name, answer in zip((NAME, "one", "two") * 2, pool.map(ask, (NAME, "one", "two") * 2), strict=True):
            assert answer["model"] == name and answer["choices"][0]["text"] == expected[name]


def test_a_chat_in_a_stream(server):
    with server.client() as client:
        asked = {"model": "two", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "stream": True}
        events = client.post("/v1/chat/completions", json=asked).text
    assert '"model":"two"' in events and events.endswith("data: [DONE]\n\n")


def test_embeddings_are_the_models(server):
    with server.client() as client:
        refused = client.post("/v1/embeddings", json={"model": "one", "input": "a"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "model"
        assert client.post("/v1/embeddings", json={"model": NAME, "input": "a"}).status_code == 200
        assert client.post("/tokenize", json={"model": "one", "prompt": "ab"}).json()["count"] == 2


def test_metrics_count_each_adapter(server):
    with server.client() as client:
        before = metrics(client)
        client.post("/v1/completions", json={"model": "one", **ASKED, "n": 2, "temperature": 1, "ignore_eos": True})
        after = metrics(client)
    texts, tokens = (f'lowbit_adapter_{what}_total{{adapter="one"}}' for what in ("texts", "generated_tokens"))
    assert after[texts] - before[texts] == 2 and after[tokens] - before[tokens] == 48
    assert 'lowbit_adapter_texts_total{adapter="two"}' in after


def test_a_name_of_the_model_is_refused(folders):
    with pytest.raises(ValueError, match="both named 'one'"):
        service_of(tiny_pipeline(lora=folders), "one", Limits(), key=None, local=True)
