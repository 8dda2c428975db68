"""Sampling settings of a model's generation_config.json are clamped, or refused when the model is loaded."""

from __future__ import annotations

import json

import pytest

from lowbit.checkpoint import CheckpointError
from lowbit.models.generation import sampling_settings
from lowbit.models.load import load_causal
from lowbit.serve.limits import Limits
from lowbit.serve.server import service_of
from lowbit.serve.worker import MOST_FAILURES
from tests.serve.running import NAME, running, tiny_pipeline
from tests.tiny import save_tiny

ASKED = {"model": NAME, "prompt": "ab", "max_tokens": 2}
BAD = [
    ("temperature", float("nan")), ("temperature", -1), ("temperature", "hot"), ("temperature", True), ("temperature", 1e9),
    ("top_p", -0.1), ("top_p", 1.5), ("top_p", "0.9"), ("top_k", 2.5), ("top_k", "5"), ("top_k", -2), ("top_k", 1 << 40),
    ("min_p", 2), ("repetition_penalty", 0), ("repetition_penalty", "1.1"), ("repetition_penalty", float("inf")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_setting_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"^{name} is .*, or null for the default, got .*; correct or remove this field$"):
        sampling_settings({name: value})


def test_a_bad_setting_is_refused_at_load_with_its_file(tmp_path):
    folder = save_tiny(tmp_path / "model")
    path = folder / "generation_config.json"
    stated = json.loads(path.read_text())
    path.write_text(json.dumps({**stated, "top_k": 2.5}))
    with pytest.raises(CheckpointError, match=rf"{path}: top_k is a whole number from -1 to 2\^31 - 1, .*, got 2\.5"):
        load_causal(folder, device="cpu")
    path.write_text(json.dumps({**stated, "do_sample": True, "temperature": 1e-6}))
    assert load_causal(folder, device="cpu").generation_config.temperature == 1e-6


def test_a_server_of_a_bad_setting_does_not_start():
    pipe = tiny_pipeline()
    pipe.model.generation_config.temperature = float("nan")
    with pytest.raises(ValueError, match=r"generation_config\.json of .*: temperature is from 0 to 1000, .*, got nan"):
        service_of(pipe, NAME, Limits(), key=None, local=True)


def test_values_that_other_servers_accept_are_clamped():
    stated = {"temperature": 1e-6, "top_p": 0, "top_k": -1, "min_p": 0.5, "repetition_penalty": 1, "eos_token_id": 2}
    clamped = {"temperature": 0.0, "top_p": 1e-6, "top_k": 0, "min_p": 0.5, "repetition_penalty": 1}
    assert sampling_settings(stated) == clamped
    assert sampling_settings({"top_k": 50.0, "temperature": None}) == {"top_k": 50}
    for setting in ({"temperature": 1e-6}, {"top_p": 0}):
        pipe = tiny_pipeline()
        for name, value in setting.items():
            setattr(pipe.model.generation_config, name, value)
        with running(pipe) as server, server.client() as client:
            own, greedy = (client.post("/v1/completions", json={**ASKED, **more}) for more in ({}, {"temperature": 0}))
            assert own.status_code == greedy.status_code == 200
            assert own.json()["choices"] == greedy.json()["choices"]
        if "temperature" in setting:  # as a call of a pipeline does
            assert (
                pipe("ab", max_new_tokens=2)[0].generated_text
                == pipe("ab", max_new_tokens=2, do_sample=False)[0].generated_text
            )


def test_failures_before_the_engine_are_counted(monkeypatch):
    """/health is 503 after five consecutive failures in any part of the server."""

    def fault(*_):
        raise ValueError("no such setting")

    with running() as server, server.client() as client:
        with monkeypatch.context() as patch:
            patch.setattr("lowbit.serve.job._sampling", fault)
            for _ in range(MOST_FAILURES):
                assert client.get("/health").status_code == 200
                assert client.post("/v1/completions", json=ASKED).status_code == 500
            server.wait_until(lambda: client.get("/health").status_code == 503)
        assert client.post("/v1/completions", json=ASKED).status_code == 200
        assert client.get("/health").status_code == 200
