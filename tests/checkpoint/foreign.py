"""Helpers for the tests of other tools' checkpoints."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

DATA = Path(__file__).parent / "data"
FOLDERS = sorted(path.parent for path in DATA.glob("*/model.safetensors"))


def sha(weight):
    """SHA-256 of a matrix as float32 bytes, row by row, as `sha` of data/make.py computes it."""
    return hashlib.sha256((weight.float() + 0.0).contiguous().numpy().tobytes()).hexdigest()


def same(a, b):
    """Whether two tensors have equal dtypes, shapes and bytes."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = a.contiguous().reshape(-1), b.contiguous().reshape(-1)
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
