"""What fails: one text, of which whoever waits for it is told, or a round, of which all its texts are and whoever did it."""

from __future__ import annotations

import traceback
from types import TracebackType


class RoundFailed(RuntimeError):
    """All requests of a round have ended as failed; the message says why, and everything else goes on."""


class Attempt:
    """A block whose error becomes `error` instead of being raised, for those who have to go on and tell somebody else.

    Interrupts, which are no errors, are raised. The error keeps its lines, and nothing of the memory that its functions held.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        traceback.clear_frames(trace)
        self.error = error
        return True


def in_words(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
