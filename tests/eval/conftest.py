"""Machines on which generated programs are contained."""

from __future__ import annotations

import pytest

from lowbit.eval import sandbox


@pytest.fixture(params=["namespaces", "no namespaces"])
def spaces(request, monkeypatch):
    """Both kinds of machine: with `unshare`, and without or where it is not allowed."""
    if request.param == "no namespaces":
        monkeypatch.setattr(sandbox, "_namespaces", lambda: ())
    elif not sandbox._namespaces():
        pytest.skip("no `unshare` here, or it is not allowed")
