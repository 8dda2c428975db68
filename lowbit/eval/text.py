"""The built-in English text for measurements.

It is the beginning of the first book of Isaac Newton's Opticks, fourth edition, London 1730 (public domain), with about 100,000
characters. It was prepared from the plain text in the test data of the Go distribution: each paragraph is one line, and marks
of italics and illustrations are removed. All else is unchanged; Greek letters are spelled out, as in `[Greek: d]`.
"""

from __future__ import annotations

import bz2
from importlib import resources

SHA256 = "d305b4a38d148a19358c165206faef6d1e04c560767b356cda8d00c918488e7f"


def sample_text() -> str:
    """Returns the text: paragraphs of one line each, separated by empty lines."""
    return bz2.decompress(resources.files("lowbit.eval").joinpath("data/opticks.txt.bz2").read_bytes()).decode()
