"""Observes the range of each value on calibration images and finds the scale with the least clipping and rounding error.

Outputs of ReLUs have codes 0 to 15 (u4) or 0 to 127 (s8), other values -128 to 127 (s8). value = code * scale; there are no
zero points.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from lowbit.vision.graph import Graph

Search = Literal["mse", "percentile", "max"]

PERCENTILE = 0.999
SAMPLES_PER_BATCH = 1 << 14
MOST_SAMPLES = 1 << 17
SMALLEST = 1e-20
"""Values below this magnitude count as zero, because float32 has no reciprocal of a much smaller scale."""
CLIP_FACTORS = tuple(1.05**-i for i in range(72))
"""Fractions of the largest magnitude at which "mse" tries to clip, from 100 % down to 3 %."""


@dataclass
class Range:
    """Observed magnitudes of one value: the largest, and evenly spaced samples of each batch."""

    largest: float = 0.0
    samples: list[Tensor] = field(default_factory=list)

    def add(self, value: Tensor) -> None:
        """Adds one batch."""
        flat = value.detach().abs().float().reshape(-1)
        inf = float("inf")
        self.largest = max(self.largest, float(flat.max().nan_to_num(nan=inf, posinf=inf)))
        if sum(map(len, self.samples)) < MOST_SAMPLES:
            # An odd step samples all channels and columns of images whose sizes are powers of two.
            step = max(1, flat.numel() // SAMPLES_PER_BATCH) | 1
            self.samples.append(flat[::step].cpu())

    def scale(self, highest_code: int, search: Search) -> float:
        """Returns the scale for codes up to `highest_code`.

        "mse" tries 72 clipping points and takes the one with the least squared error on the samples. "percentile" clips one
        value in a thousand. "max" clips nothing. The scale of a value that was always near zero is 1.
        """
        if self.largest < SMALLEST:
            return 1.0
        if search == "max":
            return self.largest / highest_code
        x = torch.cat(self.samples)
        if search == "percentile":
            clipped = float(x.kthvalue(max(1, round(PERCENTILE * len(x)))).values) or self.largest
            return clipped / highest_code
        scales = [self.largest * factor / highest_code for factor in CLIP_FACTORS]
        errors = [float(((x / s).round().clamp(max=highest_code) * s - x).square().mean()) for s in scales]
        return scales[errors.index(min(errors))]


def observe(graph: Graph, batches: Iterable[Tensor]) -> dict[str, Range]:
    """Returns the range of each floating-point value of the graph over batches of images [N, C, H, W].

    Raises ValueError if there is no batch or a value is not finite.
    """
    ranges: dict[str, Range] = {}

    def on_value(name: str, value: Tensor) -> Tensor:
        ranges.setdefault(name, Range()).add(value)
        return value

    with torch.no_grad():
        for images in batches:
            graph.run(images, on_value)
    if not ranges:
        raise ValueError("no calibration images: give at least one batch [N, C, H, W]")
    broken = [name for name, seen in ranges.items() if not seen.largest < float("inf")]
    if broken:
        raise ValueError(f"{broken[0]}: the model computes values that are not finite from the calibration images")
    return ranges
