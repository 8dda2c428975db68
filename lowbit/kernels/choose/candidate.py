"""What the choices of all kernels share: a tile with its reasons and its modelled time, their order, the first that can."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from lowbit.hardware.machine import Machine

T = TypeVar("T")
C = TypeVar("C", bound="Candidate")


@dataclass(frozen=True)
class Candidate(Generic[T]):
    """A tile, its reasons against the problem (empty: it can), its modelled time in microseconds, and the measurement that
    puts it first, if there is one."""

    tile: T
    reasons: tuple[str, ...]
    cost_us: float
    measured: object | None = None

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """What candidates are ordered by: whether it cannot, whether no measurement puts it first, its cost."""
        return bool(self.reasons), self.measured is None, self.cost_us


def ordered(rows: Iterable[C]) -> list[C]:
    """What was measured to be best, then the cheapest first, those that cannot last."""
    return sorted(rows, key=lambda row: row.rank)


def first_that_can(rows: Sequence[Candidate[T]], shape: object, machine: Machine) -> T:
    """The tile of the first candidate without a reason; raises ValueError with everybody's reasons when there is none."""
    for row in rows:
        if not row.reasons:
            return row.tile
    listed = "\n".join(f"  {row.tile}: {'; '.join(row.reasons)}" for row in rows)
    raise ValueError(f"no tile for {shape} on {machine.product}:\n{listed}")
