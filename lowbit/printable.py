"""Escapes text from files and servers for a terminal."""

from __future__ import annotations

import re

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and newline, bidirectional overrides, and surrogates (which UTF-8 cannot encode)."""


def printable(text: str) -> str:
    """Returns `text` with control characters escaped (ESC becomes \\x1b); tabs and newlines stay.

    Commands escape all text that they print: names of layers, folders and models come from files and servers.
    """
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text.replace("\r\n", "\n"))
