"""GPU tests carry the marker `gpu` and are skipped, with this reason, where there is none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

settings.register_profile("lowbit", deadline=None, derandomize=True)
settings.load_profile("lowbit")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, torch sees none"))
