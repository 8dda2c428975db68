"""English text for measuring that needs no download.

Isaac Newton, Opticks, fourth edition, London 1730 (public domain): the beginning of the first book, about 160,000
characters. Prepared from the plain text in the test data of the Go distribution: paragraphs unwrapped to one line each,
marks of italics and of illustrations removed, nothing else changed (Greek letters stay spelled out, as `[Greek: d]`).
"""

from __future__ import annotations

import bz2
from importlib import resources

SHA256 = "80cac7b6d4b753412ec91bdddfecd0fbce2a2f8d1ecb29142c8dce09a6505b18"


def sample_text() -> str:
    """The text: paragraphs of one line each with an empty line between them."""
    return bz2.decompress(resources.files("lowbit.eval").joinpath("data/opticks.txt.bz2").read_bytes()).decode()
