"""A server that verifies guessed tokens: its answers are those of one that does not; metrics."""

from __future__ import annotations

import pytest

from tests.engine.test_speculation import Oracle
from tests.serve.running import NAME, running, tiny_pipeline

ASKED = {"model": NAME, "prompt": "abcdef", "max_tokens": 40, "ignore_eos": True}
SETTINGS = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 5, "n": 2},
    {"temperature": 0.5, "seed": 1, "logit_bias": {"9": 3}},
)


def answers(client, **more):
    found = [client.post("/v1/completions", json={**ASKED, **more, **settings}).json() for settings in SETTINGS]
    return [choice["text"] for answer in found for choice in answer["choices"]]


def metrics(client):
    lines = client.get("/metrics").text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_answers_are_those_of_a_server_without_guesses(monkeypatch):
    with running(tiny_pipeline(max_concurrent=4)) as server, server.client() as client:
        plain = answers(client)
        assert not any(name.startswith("lowbit_guessed") for name in metrics(client))
        ids = server.pipe.tokenizer(ASKED["prompt"]).input_ids
        (greedy,) = server.pipe([ASKED["prompt"]], max_new_tokens=40, do_sample=False, ignore_eos=True)
        truth = [*ids, *server.pipe.tokenizer(greedy.generated_text, add_special_tokens=False).input_ids]
    Oracle.truth, Oracle.wrong = {tuple(ids): truth, (): []}, 0.0
    monkeypatch.setattr("lowbit.engine.speculation.PromptLookup", Oracle)
    with running(tiny_pipeline(max_concurrent=4, speculate=4)) as server, server.client() as client:
        assert answers(client) == plain
        found = metrics(client)
    assert 0 < found["lowbit_accepted_tokens_total"] < found["lowbit_guessed_tokens_total"]
    expected = 1 + found["lowbit_accepted_tokens_total"] / found["lowbit_verified_sequences_total"]
    assert found["lowbit_tokens_per_verified_step"] == pytest.approx(expected)


def test_the_gain_is_of_measured_times():
    """Without guesses a step of two sequences takes 10 ms, with guesses 15. Before that is known there is no gain."""
    pipe = tiny_pipeline(max_concurrent=4, speculate=4)
    with running(pipe) as server, server.client() as client:
        counts = server.engine.speculation
        assert not any(name.startswith("lowbit_speculation") for name in metrics(client))
        counts.count([None, None], [4, 4], [2, 1])
        for i in range(4):
            counts.clock.read(2, 0, 0.01 * i)
        for i in range(3):
            counts.clock.read(2, 5, 0.03 + 0.015 * (i + 1))
        found = metrics(client)
    assert found["lowbit_tokens_per_verified_step"] == pytest.approx(2.5)
    assert found["lowbit_verified_step_time_ratio"] == pytest.approx(1.5)
    assert found["lowbit_speculation_speedup"] == pytest.approx(2.5 / 1.5)
