"""`python -m tests.fuzz 60`: fuzzes with new damaged files, tokenizers, requests and schedules for 60 seconds.

The smallest failing case is printed and kept in .hypothesis/fuzz; the next run starts with it. Add it to CORPUS in
tests/fuzz/test_corpus.py together with its fix.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from transformers.utils.logging import disable_progress_bar

from tests.fuzz import files, schedules, tokenizers
from tests.serve.hostile import attack
from tests.serve.running import running, structured_pipeline

BATCH = 25
"""Number of cases between two checks of the time."""
KEPT = DirectoryBasedExampleDatabase(Path(__file__).parents[2] / ".hypothesis" / "fuzz")


def drawn(target, seconds):
    """Checks random cases of a target for `seconds`; returns their number."""
    count = 0

    @settings(max_examples=BATCH, deadline=None, database=KEPT, suppress_health_check=list(HealthCheck), print_blob=False)
    @given(target.CASES)
    def cases(case):
        nonlocal count
        count += 1
        target.check(case)

    cases.hypothesis.inner_test.__qualname__ = target.__name__  # a separate database key for each target
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        cases()
    return count


def requests(seconds):
    """Sends requests to a server for `seconds`; returns their number."""
    count = 0
    with running(structured_pipeline()) as server:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            count += sum(attack(server, BATCH).values())
    return count


def main(seconds):
    """Fuzzes every target for a quarter of the seconds."""
    disable_progress_bar()
    logging.disable(logging.CRITICAL)  # failing sequences are expected
    for target in (files, tokenizers, schedules):
        print(f"{target.__name__.rpartition('.')[2]}: {drawn(target, seconds / 4):,} cases", flush=True)
    print(f"requests: {requests(seconds / 4):,} cases", flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
