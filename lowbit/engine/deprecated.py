"""Names that this package had until 2026-11. They still work, with a DeprecationWarning."""

from __future__ import annotations

import functools
import warnings
from typing import Any

from lowbit.engine.detokenizer import Detokenizer
from lowbit.engine.failure import RequestFailed, StepFailed
from lowbit.engine.request import Request, SampledToken
from lowbit.engine.sequence import FinishReason, Sequence

_CLASSES: dict[str, Any] = {
    "Drawn": SampledToken,
    "End": FinishReason,
    "RoundFailed": StepFailed,
    "TextFailed": RequestFailed,
    "TextStream": Detokenizer,
}

_FIELDS = {"ends": "stop_token_ids", "watch": "on_token", "likeliest": "top_logprobs"}
"""Old -> new names of arguments and attributes of `Request`."""

_STATE = {
    **{name: name for name in ("sampled", "finish_reason", "error", "cached_tokens", "tokens", "check")},
    "drawn": "sampled",
    "end": "finish_reason",
    "shared": "cached_tokens",
}
"""Attributes that were moved from `Request` to `Sequence`."""


_OF_REQUEST = ("prompt", "limit", "sampling", "stop_token_ids", "on_token", "top_logprobs")
"""Attributes of the sequences that `Engine.submit` and `Engine.generate` return; these methods returned requests before."""


def class_of(name: str) -> Any:
    """Returns the class that was called `name` in `lowbit.engine`. Raises AttributeError if there was none."""
    if name not in _CLASSES:
        raise AttributeError(f"module 'lowbit.engine' has no attribute {name!r}")
    new = _CLASSES[name]
    _warn(f"lowbit.engine.{name}", f"lowbit.engine.{new.__name__}")
    return new


def sequence_of(given: Sequence | Request) -> Sequence:
    """Returns the sequence of a submitted request, for methods of `Engine` that accepted requests before."""
    if isinstance(given, Sequence):
        return given
    _warn("The argument of Engine.stream and Engine.cancel", "the sequence that Engine.submit returns", 4)
    if given._sequence is None:
        raise ValueError("this request was not submitted: Engine.submit(request) returns its sequence")
    return given._sequence


def accept_names() -> None:
    """Adds the deprecated names: to `Request`, as attributes and as arguments, to `Sequence` and to `SampledToken`."""
    inner = Request.__init__

    @functools.wraps(inner)
    def init(self: Request, *args: Any, **arguments: Any) -> None:
        for old in _FIELDS.keys() & arguments.keys():
            _warn(f"Request.{old}", f"Request.{_FIELDS[old]}")
            arguments[_FIELDS[old]] = arguments.pop(old)
        inner(self, *args, **arguments)

    Request.__init__ = init  # type: ignore[method-assign]
    for old, new in _FIELDS.items():
        setattr(Request, old, _renamed("Request", old, new))
    for old, new in _STATE.items():
        setattr(Request, old, _moved(old, new))
    for name in _OF_REQUEST:
        setattr(Sequence, name, _of_request(name))
    SampledToken.likeliest = _renamed("SampledToken", "likeliest", "top_logprobs")  # type: ignore[attr-defined]


def _renamed(owner: str, old: str, new: str) -> property:
    def read(self: object) -> Any:
        _warn(f"{owner}.{old}", f"{owner}.{new}")
        return getattr(self, new)

    return property(read, doc=f"Deprecated name of `{new}`.")


def _moved(old: str, new: str) -> property:
    def read(self: Request) -> Any:
        _warn(f"Request.{old}", f"Sequence.{new}, of the sequence that Engine.submit returns")
        return getattr(self._sequence or Sequence(self), new)

    return property(read, doc=f"Deprecated: `{new}` of the request's sequence.")


def _of_request(name: str) -> property:
    def read(self: Sequence) -> Any:
        _warn(f"Sequence.{name}", f"Sequence.request.{name}")
        return getattr(self.request, name)

    return property(read, doc=f"Deprecated: `{name}` of the sequence's request.")


def _warn(old: str, new: str, stacklevel: int = 3) -> None:
    warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=stacklevel)
