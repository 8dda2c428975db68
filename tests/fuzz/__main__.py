"""`python -m tests.fuzz 60`: 60 seconds of damaged files, tokenizers, requests and schedules that no run has drawn before.

The smallest case that fails is printed and kept in .hypothesis/fuzz, from where the next run begins; it belongs into CORPUS of
tests/fuzz/test_corpus.py, beside what fixes it.
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
from tests.serve.running import running

BATCH = 25
"""Cases between two looks at the clock."""
KEPT = DirectoryBasedExampleDatabase(Path(__file__).parents[2] / ".hypothesis" / "fuzz")


def drawn(target, seconds):
    """Checks cases of a target for some seconds; how many."""
    count = 0

    @settings(max_examples=BATCH, deadline=None, database=KEPT, suppress_health_check=list(HealthCheck), print_blob=False)
    @given(target.CASES)
    def cases(case):
        nonlocal count
        count += 1
        target.check(case)

    cases.hypothesis.inner_test.__qualname__ = target.__name__  # cases of each target are kept apart
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        cases()
    return count


def requests(seconds):
    """Sends requests to a server for some seconds; how many."""
    count = 0
    with running() as server:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            count += sum(attack(server, BATCH).values())
    return count


def main(seconds):
    """Fuzzes every target for a quarter of the seconds."""
    disable_progress_bar()
    logging.disable(logging.CRITICAL)  # texts that fail are part of it
    for target in (files, tokenizers, schedules):
        print(f"{target.__name__.rpartition('.')[2]}: {drawn(target, seconds / 4):,} cases", flush=True)
    print(f"requests: {requests(seconds / 4):,} cases", flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
