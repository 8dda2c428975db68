"""The built-in English text for measurements.

Isaac Newton, Opticks, fourth edition, London 1730 (public domain): the beginning of the first book, about 100,000
characters. Prepared from the plain text in the test data of the Go distribution: paragraphs unwrapped to one line each,
marks of italics and of illustrations removed, nothing else changed (Greek letters stay spelled out, as `[Greek: d]`).
"""

from __future__ import annotations

import bz2
from importlib import resources

SHA256 = "d305b4a38d148a19358c165206faef6d1e04c560767b356cda8d00c918488e7f"


def sample_text() -> str:
    """Returns the text: paragraphs of one line each, separated by empty lines."""
    return bz2.decompress(resources.files("lowbit.eval").joinpath("data/opticks.txt.bz2").read_bytes()).decode()
