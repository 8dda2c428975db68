"""Requests of every kind at once; `python -m tests.serve.mixed 2000` sends more of them."""

from __future__ import annotations

import pytest

from tests.serve.mixed import mix
from tests.serve.running import running, tiny_pipeline


@pytest.mark.parametrize("engine", [True, False], ids=["program", "forward"])
def test_greedy_answers_match_the_engine(engine):
    """Sequences need more pages at once than there are. The second case computes through Transformers' forward, as on a
    laptop."""
    pipe = tiny_pipeline(engine, max_concurrent=8, cache_bytes=12 << 16)
    with running(pipe, max_concurrent=8) as server:
        seen = mix(server, 60)
    assert len(seen) == 7, seen
