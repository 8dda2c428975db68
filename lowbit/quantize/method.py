"""The algorithms by name, each with its options: what a driver is told."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from lowbit.quantize.gptq import GptqSearch
from lowbit.quantize.rtn import Search


@dataclass(frozen=True)
class Rtn:
    """Round to nearest, see `quantize.rtn`. Needs no data."""

    search: Search = "max"


@dataclass(frozen=True)
class Hqq:
    """Half-quadratic zero points, see `quantize.hqq`: schemes with floating-point zeros. Needs no data."""


@dataclass(frozen=True)
class Gptq:
    """Columns one after the other, see `quantize.gptq`."""

    act_order: bool = False
    static_groups: bool = False
    search: GptqSearch = "loss"
    damping: float = 0.05
    smooth: SmoothQuant | None = None
    """Done first where it is given, for schemes with 8-bit activations."""


@dataclass(frozen=True)
class Awq:
    """Channels scaled by their activations, see `quantize.awq`. `search` "max" takes scales from the largest weight, "loss"
    clips them as the paper does, which docs/quantize.md shows to lose on texts unlike those calibrated on."""

    search: Literal["max", "loss"] = "max"


@dataclass(frozen=True)
class SmoothQuant:
    """The range of activations moved into the weights, see `quantize.smoothquant`; `alpha` None searches it per input."""

    alpha: float | None = 0.5


@dataclass(frozen=True)
class Learned:
    """Offsets and scales learned for a whole decoder layer at once, see `quantize.learned` and `models.learn`: `iterations` of
    `batch` pieces of text, drawn by `seed`."""

    iterations: int = 200
    batch: int = 8
    seed: int = 0
    smooth: SmoothQuant | None = None
    """Done first where it is given, for schemes with 8-bit activations."""

    def __post_init__(self) -> None:
        if self.iterations < 1 or self.batch < 1:
            raise ValueError(f"learning takes 1 or more iterations of 1 or more pieces, got {self.iterations} of {self.batch}")


Method = Rtn | Hqq | Gptq | Awq | SmoothQuant | Learned
DATA_FREE = (Rtn, Hqq)


def method_record(method: Method) -> dict[str, Any]:
    """The "name" of a method and its options, those that are None left out: what config.json records."""
    options = {key: value for key, value in asdict(method).items() if value is not None}
    return {"name": type(method).__name__.lower(), **options}
