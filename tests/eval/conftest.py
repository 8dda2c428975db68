"""A fixture over the isolations for generated programs that this machine supports."""

from __future__ import annotations

import pytest

from lowbit.eval import sandbox


@pytest.fixture(params=sandbox.ISOLATIONS)
def isolation(request):
    """One isolation; skips the test if this machine refuses it."""
    if refusal := sandbox._refusal(request.param):
        pytest.skip(f"{request.param}: {refusal}")
    return request.param
