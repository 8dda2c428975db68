"""The isolations that this machine has for generated programs."""

from __future__ import annotations

import pytest

from lowbit.eval import sandbox


@pytest.fixture(params=sandbox.ISOLATIONS)
def isolation(request):
    """Each isolation in turn."""
    if refusal := sandbox._refusal(request.param):
        pytest.skip(f"{request.param}: {refusal}")
    return request.param
