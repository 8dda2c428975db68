"""GPU tests carry the marker `gpu` and are skipped, with this reason, where there is none."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import settings

settings.register_profile("lowbit", deadline=None, derandomize=True)
settings.load_profile("lowbit")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Modules and tests stay to the end: the collector of cycles would look at all of them again and again, a tenth of the time
    of all tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, torch sees none"))
