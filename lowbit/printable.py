"""Text from files and servers made safe for a terminal."""

from __future__ import annotations

import re

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters other than tab and newline, bidirectional overrides, and surrogates, which no encoding can write."""


def printable(text: str) -> str:
    """`text` with every character escaped that a terminal would obey rather than show: ESC becomes \\x1b.

    All text that commands print passes through here, since names of layers, folders and models come from files and servers.
    Tabs and newlines stay.
    """
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text.replace("\r\n", "\n"))
