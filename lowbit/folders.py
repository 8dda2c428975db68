"""Where the library keeps what it brings or measures for its user."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/lowbit, or .cache/lowbit in the user's home; raises RuntimeError for a user without one."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowbit"


def tuned_file(product: str) -> Path:
    """Where `lowbit tune` keeps what it measured on a GPU of this name."""
    return cache_folder() / "tiles" / f"{product.lower().replace(' ', '-').replace('/', '-')}.json"
