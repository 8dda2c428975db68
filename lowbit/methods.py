"""Options of the quantization methods by name; needs no torch, so that the command line checks them before importing it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Search = Literal["max", "mse"]
"""The search for scales of `quantize.rtn`."""
GptqSearch = Literal["max", "mse", "loss"]
"""The search for scales of `quantize.gptq`."""


@dataclass(frozen=True)
class Rtn:
    """Round to nearest, see `quantize.rtn`. Needs no data."""

    search: Search = "max"


@dataclass(frozen=True)
class Hqq:
    """Half-quadratic optimisation of zero points, see `quantize.hqq`. For schemes with floating-point zeros. Needs no data."""


@dataclass(frozen=True)
class Gptq:
    """Column-wise rounding with error compensation, see `quantize.gptq`."""

    act_order: bool = False
    static_groups: bool = False
    search: GptqSearch = "loss"
    damping: float = 0.05
    smooth: SmoothQuant | None = None
    """Applied first if given, for schemes with 8-bit activations."""


@dataclass(frozen=True)
class Awq:
    """Scales input channels by the size of their activations before rounding, see `quantize.awq`. `search` "max" computes
    scales from the largest weight. "loss" clips weights as in the paper, which is worse on text that differs from the
    calibration text (docs/internals/quantization.md)."""

    search: Literal["max", "loss"] = "max"


@dataclass(frozen=True)
class SmoothQuant:
    """Moves a part of the range of activations into the weights, see `quantize.smoothquant`. `alpha` is that part; None
    searches it for each input."""

    alpha: float | None = 0.5


@dataclass(frozen=True)
class Learned:
    """Trains rounding offsets and scales of a whole decoder layer at once, see `quantize.learned` and `models.learn`. Each of
    `iterations` reads `batch` sequences, sampled with `seed`."""

    iterations: int = 200
    batch: int = 8
    seed: int = 0
    smooth: SmoothQuant | None = None
    """Applied first if given, for schemes with 8-bit activations."""
    distill: int = 0
    """Steps that then train scales, norms and biases of the whole model against the float model's logits, see
    `models.distill`."""

    def __post_init__(self) -> None:
        if self.distill < 0:
            raise ValueError(f"distillation takes 0 or more steps, got {self.distill}")
        if self.iterations < 1 or self.batch < 1:
            raise ValueError(
                f"learning takes 1 or more iterations of 1 or more sequences, got {self.iterations} of {self.batch}"
            )


@dataclass(frozen=True)
class Mixed:
    """Chooses one of `schemes` for each unit of layers. `bits` is the allowed average of bits per weight, scales included."""

    schemes: tuple[str, ...]
    bits: float


Method = Rtn | Hqq | Gptq | Awq | SmoothQuant | Learned
DATA_FREE = (Rtn, Hqq)


def method_record(method: Method) -> dict[str, Any]:
    """Returns the "name" of a method and its options that are not None, for config.json."""
    options = {key: value for key, value in asdict(method).items() if value is not None}
    return {"name": type(method).__name__.lower(), **options}


METHODS: dict[str, type[Method]] = {
    "rtn": Rtn, "hqq": Hqq, "gptq": Gptq, "awq": Awq, "smoothquant": SmoothQuant, "learned": Learned,
}  # fmt: skip
"""The methods by their name in Python and on the command line."""

_SEARCHES = {"rtn": ("max", "mse"), "gptq": ("max", "mse", "loss"), "awq": ("max", "loss")}
_OWNERS = {
    "search": tuple(_SEARCHES), "act_order": ("gptq",), "static_groups": ("gptq",), "damping": ("gptq",),
    "smooth": ("gptq", "learned"), "alpha": ("smoothquant",), "iterations": ("learned",), "batch": ("learned",),
    "seed": ("learned",), "distill": ("learned",),
}  # fmt: skip
"""The options of `method_of`, with the methods that take each; `alpha` also goes with `smooth`."""


def method_of(name: str, options: dict[str, Any] | None = None, spelled: Callable[[str], str] = str) -> Method:
    """Returns the method called `name` with `options`, which are named as in `lowbit quantize`.

    options: `search`, `act_order`, `static_groups`, `damping`, `smooth` (True: SmoothQuant first), `alpha` (a number from 0 to
    1 or "auto"), `iterations`, `batch`, `seed`, `distill`; None and False mean absent. spelled: returns the spelling of an
    option in messages. Raises ValueError for an unknown method, an option of another method or a value that is not allowed,
    TypeError for an unknown option.
    """
    given = {key: value for key, value in (options or {}).items() if value is not None and value is not False}
    if name not in METHODS:
        near = difflib.get_close_matches(str(name).lower(), METHODS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"unknown {spelled('method')} {name!r}; {hint}it is one of {', '.join(METHODS)}")
    for key in given:
        if key not in _OWNERS:
            near = difflib.get_close_matches(key, _OWNERS, n=1)
            hint = f"did you mean {spelled(near[0])}? " if near else ""
            raise TypeError(f"unknown option {key!r} of a method; {hint}options are {', '.join(_OWNERS)}")
    _check_owners(name, given, spelled)
    smooth = SmoothQuant(_alpha(given.pop("alpha", 0.5), spelled)) if "smooth" in given or name == "smoothquant" else None
    if name == "smoothquant":
        assert smooth is not None
        return smooth
    return METHODS[name](**given | ({} if smooth is None else {"smooth": smooth}))


def _check_owners(name: str, given: dict[str, Any], spelled: Callable[[str], str]) -> None:
    """Raises ValueError for an option that belongs to another method than `name`, and for a search that it does not have."""
    method = spelled("method")
    for key in given:
        if key == "search":
            searches = _SEARCHES.get(name, ())
            if given[key] not in searches:
                raise ValueError(
                    f"{spelled(key)} belongs to {method} rtn, gptq and awq; {name} takes {' or '.join(searches) or 'none'}"
                )
        elif name not in _OWNERS[key] and not (key == "alpha" and "smooth" in given):
            if key in ("act_order", "static_groups"):
                keys = f"{spelled('act_order')} and {spelled('static_groups')} belong"
            else:
                keys = f"{spelled(key)} belongs"
            also = f" and to {spelled('smooth')}" if key == "alpha" else ""
            raise ValueError(f"{keys} to {method} {_and(_OWNERS[key])}{also}, not to {name}")


def _alpha(value: Any, spelled: Callable[[str], str]) -> float | None:
    if value == "auto":
        return None
    try:
        alpha = float(value)
    except (TypeError, ValueError):
        alpha = -1.0
    if not 0 <= alpha <= 1:
        raise ValueError(f"{spelled('alpha')} is a number from 0 to 1 or auto, got {value!r}")
    return alpha


def _and(names: Sequence[str]) -> str:
    return " and ".join(names)
