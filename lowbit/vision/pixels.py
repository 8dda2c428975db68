"""8-bit pixels and the normalization that a model expects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.kernels.reference.conv import fma


@dataclass(frozen=True)
class Pixels:
    """x = (pixel / 255 - mean) / deviation, per channel or for all: the `image_mean` and `image_std` of a model. Raises
    ValueError for deviations that are not positive."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.mean, Sequence) or not isinstance(self.deviation, Sequence):
            raise ValueError(f"pixels have a mean and a deviation per channel, as tuples, got {self.mean} and {self.deviation}")
        if len(self.mean) != len(self.deviation) or not self.mean or min(self.deviation) <= 0:
            raise ValueError(f"pixels have as many means as positive deviations, got {self.mean} and {self.deviation}")

    def constants(self, channels: int, factor: float) -> tuple[Tensor, Tensor]:
        """Returns (gain, shift) float32 [channels] such that pixel * gain + shift = x * factor. Raises ValueError for
        another number of channels."""
        if len(self.mean) not in (1, channels):
            raise ValueError(f"pixels are normalized with {len(self.mean)} means, the images have {channels} channels")
        mean, deviation = (torch.tensor(values, dtype=torch.float64).expand(channels) for values in (self.mean, self.deviation))
        return (factor / (255.0 * deviation)).float(), (-mean / deviation * factor).float()

    def normalized(self, images: Tensor) -> Tensor:
        """Returns x float32 for pixels uint8 [N, C, H, W], rounded once."""
        gain, shift = (c.to(images.device)[:, None, None] for c in self.constants(images.shape[1], 1.0))
        return fma(images, gain, shift)
