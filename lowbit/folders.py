"""Where the library keeps what it brings or measures for its user."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/lowbit, or .cache/lowbit in the user's home; raises ValueError for a user without one."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowbit"
    except RuntimeError as error:
        raise ValueError("this user has no home folder; XDG_CACHE_HOME names another for what lowbit keeps") from error


def tuned_file(product: str) -> Path:
    """Where `lowbit tune` keeps what it measured on a GPU of this name."""
    return cache_folder() / "tiles" / f"{product.lower().replace(' ', '-').replace('/', '-')}.json"
