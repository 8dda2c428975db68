"""Arguments and responses of a pipeline, with DeepSpeed-MII's names and defaults."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lowbit.engine.sequence import FinishReason
from lowbit.ops.sample import is_real, is_whole


class UnknownArgument(TypeError):
    """An unknown argument; the message names the nearest one and lists all."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        super().__init__(f"unknown argument {name!r}{hint} Known: {', '.join(names)}")


@dataclass(frozen=True)
class Response:
    """One generated text. Lengths are in tokens, without padding."""

    generated_text: str
    prompt_length: int
    generated_length: int
    finish_reason: FinishReason

    def __str__(self) -> str:
        return self.generated_text


_MOST = 1 << 63


@dataclass(frozen=True)
class GenerateParams:
    """Arguments of a call. `max_length` counts prompt and new tokens together; `max_new_tokens` overrides it. `seed` makes
    sampling repeatable. `adapter` names a LoRA adapter of the pipeline. Raises ValueError for values out of range."""

    max_length: int = 1024
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    ignore_eos: bool = False
    return_full_text: bool = False
    do_sample: bool = True
    top_p: float = 0.9
    top_k: int | None = None
    temperature: float | None = None
    stop: Sequence[str] = ()
    seed: int | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_length", "max_new_tokens", "min_new_tokens", "top_k", "seed"):
            value = getattr(self, name)
            if value is not None and not is_whole(value):
                raise ValueError(f"{name} is a whole number, got {value!r}")
            if value is not None and not -_MOST <= value < (2 * _MOST if name == "seed" else _MOST):
                raise ValueError(f"{name} is a 64-bit number, got {value}")
        for name in ("ignore_eos", "return_full_text", "do_sample"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is True or False, got {getattr(self, name)!r}")
        for name in ("top_p", "temperature"):
            if getattr(self, name) is not None and not is_real(getattr(self, name)):
                raise ValueError(f"{name} is a finite number, got {getattr(self, name)!r}")
        if self.max_length < 1:
            raise ValueError(f"max_length is at least 1, got {self.max_length}")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is at least 1, got {self.max_new_tokens}")
        most = self.max_length if self.max_new_tokens is None else self.max_new_tokens
        if not 0 <= self.min_new_tokens <= most:
            raise ValueError(f"min_new_tokens is from 0 to the limit of {most} tokens, got {self.min_new_tokens}")
        if self.top_p is None or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is above 0 and at most 1, got {self.top_p}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is at least 1, got {self.top_k}")
        if self.temperature is not None and self.temperature <= 0:
            raise ValueError(f"temperature is above 0, got {self.temperature}; do_sample=False takes the most likely token")
        if not isinstance(self.stop, (list, tuple)) or not all(isinstance(s, str) and s for s in self.stop):
            raise ValueError(f"stop is a list of non-empty strings, got {self.stop!r}")
        if self.adapter is not None and not isinstance(self.adapter, str):
            raise ValueError(f"adapter is the name of an adapter, got {self.adapter!r}")

    @classmethod
    def from_arguments(cls, arguments: dict[str, object]) -> GenerateParams:
        """Returns the parameters of a call. Raises UnknownArgument for an unknown name."""
        known = {field.name for field in dataclasses.fields(cls)}
        for name in arguments:
            if name not in known:
                raise UnknownArgument(name, known)
        return cls(**arguments)  # type: ignore[arg-type]

    def new_tokens(self, prompt_length: int) -> int:
        """Returns the limit of new tokens after a prompt. Raises ValueError if the prompt fills `max_length`."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        if prompt_length >= self.max_length:
            raise ValueError(f"a prompt of {prompt_length} tokens leaves no room within max_length {self.max_length}")
        return self.max_length - prompt_length
