"""What a run of `python -m benchmarks gemm` measures."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.grid import MODELS
from lowbit.formats import FloatFormat, PerChannel, PerGroup, PerTensor, Scheme, ZeroPoint, parse_scheme
from lowbit.tune.trials import parse_rows

FORMATS = ("w4a16_g128", "w4a16_pc", "w3a16_g128", "w5e2m2a16", "w6e3m2a16", "w8a16")
SHAPES = ((8192, 8192), (8192, 28672))
ROWS = (1, 16, 64, 256, 1024, 4096)
QUICK_FORMATS = ("w4a16_g128", "w6e3m2a16")
QUICK_SHAPES = ((8192, 8192),)
QUICK_ROWS = (1, 16, 256)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class GemmRequest:
    """What to measure: schemes by name, shapes (N, K), numbers of rows M of x, the dtype of x by name, and how peers are
    tuned.
    """

    schemes: tuple[str, ...] = FORMATS
    shapes: tuple[tuple[int, int], ...] = SHAPES
    rows: tuple[int, ...] = ROWS
    dtype: str = "float16"
    sweep: bool = True
    """Whether tunable peers are tried with several configurations, of which the fastest counts."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of x and y."""
        return DTYPES[self.dtype]

    def as_json(self) -> dict[str, Any]:
        """Returns the request as plain JSON for `GemmRequest.from_json`."""
        return {
            "formats": list(self.schemes), "shapes": [f"{n}x{k}" for n, k in self.shapes], "m": list(self.rows),
            "dtype": self.dtype, "sweep": self.sweep,
        }  # fmt: skip

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> GemmRequest:
        """Returns the request for the JSON of `as_json`."""
        shapes = tuple(parse_shape(text) for text in value["shapes"])
        return cls(tuple(value["formats"]), shapes, tuple(value["m"]), value["dtype"], value["sweep"])


def make_request(
    formats: str | None = None,
    shapes: str | None = None,
    rows: str | None = None,
    dtype: str = "float16",
    quick: bool = False,
) -> GemmRequest:
    """Returns a request for comma-separated options. None takes the default, a smaller one if `quick`.

    Raises ValueError that says what was given and what is supported.
    """
    if dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype!r}: the activations are {' or '.join(DTYPES)}")
    default = (QUICK_FORMATS, QUICK_SHAPES, QUICK_ROWS) if quick else (FORMATS, SHAPES, ROWS)
    return GemmRequest(
        _unique(tuple(measurable(part).name for part in (default[0] if formats is None else _parts(formats, "--formats")))),
        _unique(default[1] if shapes is None else tuple(s for part in _parts(shapes, "--shapes") for s in parse_shapes(part))),
        tuple(sorted(set(default[2] if rows is None else parse_rows(rows)))),
        dtype,
        sweep=not quick,
    )


def measurable(name: str | Scheme) -> Scheme:
    """Returns the scheme called `name`. Raises ValueError if the benchmark does not support its kind."""
    scheme = parse_scheme(name)
    activation = scheme.activation
    known = activation is None or activation.name in ("int8", "fp8_e4m3")
    granularities = (PerChannel, PerGroup) if activation is None else (PerChannel, PerGroup, PerTensor)
    if not known or not isinstance(scheme.granularity, granularities):
        raise ValueError(
            f"--formats {name}: bench gemm measures 16-bit, int8 and e4m3 activations times weights with one scale per channel "
            "or per group along K, for example w4a16_g128, w4a16_pc, w6e3m2a16, w8a8, fp8_dynamic, w4a8_g128"
        )
    return scheme


def parse_shapes(text: str) -> tuple[tuple[int, int], ...]:
    """Returns the shapes (N, K) that a text names: 8192x28672 is one shape, a name in `grid.MODELS` stands for that model's
    weights on one GPU except the head. Raises ValueError with the expected forms."""
    model = next((shape for name, shape in MODELS.items() if name.lower() == text.strip().lower()), None)
    return (parse_shape(text),) if model is None else tuple(model.weights(1))[:4]


def parse_shape(text: str) -> tuple[int, int]:
    """Returns (N, K) of a text such as 8192x28672. Raises ValueError with the expected form."""
    match = re.fullmatch(r"\s*(\d+)\s*[xX]\s*(\d+)\s*", text)
    if match is None or not int(match[1]) or not int(match[2]):
        raise ValueError(
            f"--shapes {text!r}: a shape is NxK, two positive numbers, for example 8192x28672, or a model: {', '.join(MODELS)}"
        )
    return int(match[1]), int(match[2])


def columns_of(scheme: Scheme) -> dict[str, str]:
    """Returns a scheme's columns in the results: its name, the weight's format and the granularity of its scales."""
    granularity = f"g{scheme.granularity.size}" if isinstance(scheme.granularity, PerGroup) else "pc"
    if isinstance(scheme.granularity, PerTensor):
        granularity = "t"
    zero = "" if scheme.zero is ZeroPoint.NONE else f"_{scheme.zero.value}"
    return {"scheme": scheme.name, "format": scheme.weight.name, "granularity": granularity + zero}


def is_float(scheme: Scheme) -> bool:
    """Whether the weights have a floating-point format."""
    return isinstance(scheme.weight, FloatFormat)


def _parts(text: str, option: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    if not parts:
        raise ValueError(f"{option} {text!r} names nothing")
    return parts


def _unique(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))
