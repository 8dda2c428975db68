"""Candidates of all kernels: their type, their order and the choice of the first feasible one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from lowbit.hardware.machine import Machine

T = TypeVar("T")
C = TypeVar("C", bound="Candidate")


@dataclass(frozen=True)
class Candidate(Generic[T]):
    """A tile, the reasons against it (empty: feasible), its modelled time in microseconds, and the measurement that ranks it
    first, if there is one."""

    tile: T
    reasons: tuple[str, ...]
    cost_us: float
    measured: object | None = None

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Sort key: feasible candidates first, then measured ones, then by cost."""
        return bool(self.reasons), self.measured is None, self.cost_us


def ordered(rows: Iterable[C]) -> list[C]:
    """Sorts candidates: measured ones, then by cost, infeasible ones last."""
    return sorted(rows, key=lambda row: row.rank)


def first_feasible(rows: Sequence[Candidate[T]], shape: object, machine: Machine) -> T:
    """The tile of the first feasible candidate; raises ValueError with the reasons against each when there is none."""
    for row in rows:
        if not row.reasons:
            return row.tile
    listed = "\n".join(f"  {row.tile}: {'; '.join(row.reasons)}" for row in rows)
    raise ValueError(f"no tile for {shape} on {machine.product}:\n{listed}")
