"""Errors of the engine, and whether they end a sequence, a step or the engine.

One sequence: its prompt cannot be computed even without others, its `on_token` raises an error, or its logits are NaN or
infinite. It finishes as failed, with `Sequence.error`; the others continue, since none of this depends on them. These errors
come from models and from callers, so they may be of any class.

A step: anything else that raises while a step is scheduled, launched or read. Which of its sequences is at fault is unknown, so
all of them fail, and the thread that runs the step gets `StepFailed`. Sequences outside the step continue. Without a sequence
in the step, that thread gets the error itself.

The engine: after each failure the GPU is synchronized. A CUDA error that appears then is permanent for the process: all
sequences fail, and `Engine.submit` raises `EngineFailed` from then on. The same happens if one of several ranks fails
(rank_processes.py).

Interrupts (KeyboardInterrupt, SystemExit) fail the sequences that they leave half computed, and propagate unchanged.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


class RequestFailed(RuntimeError):
    """A request could not be computed; the message says why."""


class StepFailed(RuntimeError):
    """All sequences of a step have failed; the message says why. Other sequences continue."""


class StuckStep(RuntimeError):
    """A decode step in one launch gave up, since one of its blocks waited too long for another. The message says for what."""


class RankFailed(RuntimeError):
    """One of several processes that compute a model has failed, and all were ended. The message says which one and why."""


class EngineFailed(RuntimeError):
    """The GPU or another rank failed, so the engine cannot compute anything more in this process. The message says why."""


def log_failure(what: str, error: Exception) -> str:
    """Logs an error with its traceback, and returns it in one line.

    Callers store the line and not the error: an exception keeps all local variables of its traceback alive.
    """
    logger.warning(f"{what} failed", exc_info=error)
    return one_line(error)


def one_line(error: BaseException) -> str:
    """Returns type and message of an error, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
