"""How a user installs what a command needs beyond lowbit's own dependencies."""

from __future__ import annotations

from lowbit._version import __version__


def install(extra: str) -> str:
    """Returns the commands that install an extra of pyproject.toml.

    Both install from local files: the name lowbit on PyPI belongs to another project.
    """
    return f"pip install '.[{extra}]' in the checkout, or pip install './lowbit-{__version__}-py3-none-any.whl[{extra}]'"
