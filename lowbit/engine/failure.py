"""Errors of one request, which its caller gets, and of a whole step, which the thread that ran the step gets."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


class RequestFailed(RuntimeError):
    """A request could not be computed; the message says why."""


class StepFailed(RuntimeError):
    """All requests of a step have failed; the message says why. Other requests continue."""


def log_failure(what: str, error: Exception) -> str:
    """Logs an error with its traceback, and returns it in one line.

    Callers store the line and not the error: an exception keeps all local variables of its traceback alive.
    """
    logger.warning(f"{what} failed", exc_info=error)
    return one_line(error)


def one_line(error: BaseException) -> str:
    """Type and message of an error, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
