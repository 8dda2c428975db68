"""Saved 16-bit checkpoints to quantize."""

from __future__ import annotations

import pytest

from tests.tiny import save_tiny


@pytest.fixture(scope="session", params=["tied", "untied", "bias"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param) / "fp16"
    return save_tiny(path, tied=request.param == "tied", bias=request.param == "bias")
