"""How a user installs what a command needs beyond lowbit's own dependencies."""

from __future__ import annotations

from lowbit._version import __version__


def install(extra: str) -> str:
    """The commands that install an extra of pyproject.toml. The name lowbit on PyPI does not belong to this project, so that
    neither command asks PyPI for it."""
    return f"pip install '.[{extra}]' in the checkout, or pip install './lowbit-{__version__}-py3-none-any.whl[{extra}]'"
