"""What fails: one text, of which whoever waits for it is told, or a round, of which all its texts are and whoever did it."""

from __future__ import annotations

import logging
from types import TracebackType

logger = logging.getLogger(__name__)


class RequestFailed(RuntimeError):
    """A text could not be computed; the message says why."""


class StepFailed(RuntimeError):
    """All requests of a round have ended as failed; the message says why, and everything else goes on."""


class Attempt:
    """A block whose error is logged, and becomes words in `error` instead of being raised, for those who have to go on and tell
    somebody else. Interrupts, which are no errors, are raised.

    Words alone: an exception would keep alive all that was under way when it was raised.
    """

    def __init__(self, what: str) -> None:
        self.what, self.error = what, ""

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        logger.warning(f"{self.what} failed", exc_info=error)
        self.error = in_words(error)
        return True


def in_words(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
