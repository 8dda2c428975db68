"""Folders in the user's cache for downloads and measurements."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Returns $XDG_CACHE_HOME/lowbit or ~/.cache/lowbit. Raises ValueError if the user has no home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowbit"
    except RuntimeError as error:
        raise ValueError("this user has no home folder; set XDG_CACHE_HOME to the folder for lowbit's cache") from error


def tuned_file(product: str) -> Path:
    """Returns the file with the results of `lowbit tune` for GPUs of this product name."""
    return cache_folder() / "tiles" / f"{product.lower().replace(' ', '-').replace('/', '-')}.json"
