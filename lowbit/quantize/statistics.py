"""What calibration remembers about the inputs of a layer: enough for every algorithm here, and of bounded size."""

from __future__ import annotations

import torch
from torch import Tensor


class InputStatistics:
    """Of the inputs x [.., K] of a linear layer: `hessian` [K, K] = sum of x^T x, `low` and `high` [K], the least and the
    largest value of each channel and 0, `abs_max` and `abs_mean` [K], all float32, `rows`, their number, and `sample` [S, K],
    the first `keep` rows.

    The sum over x of |(W - W') x|^2 is the trace of (W - W') H (W - W')^T: the Hessian gives the exact error of a layer's
    output on all calibration inputs without keeping any.
    """

    def __init__(self, channels: int, *, keep: int = 0, device: torch.device | str = "cpu") -> None:
        self.hessian = torch.zeros(channels, channels, device=device)
        self.low, self.high = torch.zeros(2, channels, device=device)
        self._abs_sum = torch.zeros(channels, dtype=torch.float64, device=device)
        self.rows = 0
        self._keep = keep
        self._kept: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        """Takes in the rows of x [.., K], any float dtype."""
        x = x.detach().reshape(-1, x.shape[-1])
        if x.is_cuda and x.dtype in (torch.float16, torch.bfloat16):
            # Products of 16-bit numbers are exact in float32; tensor cores multiply them and add in float32.
            self.hessian += torch.mm(x.T, x, out_dtype=torch.float32)
        else:
            x = x.float()
            self.hessian.addmm_(x.T, x)
        magnitude = x.abs()
        self.low = torch.minimum(self.low, x.amin(dim=0).float())
        self.high = torch.maximum(self.high, x.amax(dim=0).float())
        self._abs_sum += magnitude.sum(dim=0, dtype=torch.float64)
        missing = self._keep - min(self.rows, self._keep)
        if missing:
            self._kept.append(x[:missing].float().clone())
        self.rows += x.shape[0]

    @property
    def abs_max(self) -> Tensor:
        """Largest |x| per channel, [K]."""
        return torch.maximum(-self.low, self.high)

    @property
    def abs_mean(self) -> Tensor:
        """Mean of |x| per channel, [K]."""
        return (self._abs_sum / max(self.rows, 1)).float()

    @property
    def sample(self) -> Tensor:
        """The first rows, [S, K] float32."""
        return torch.cat(self._kept) if self._kept else self.low.new_zeros(0, len(self.low))

    def divided(self, scale: Tensor) -> InputStatistics:
        """The statistics of x / scale, for `scale` [K] positive: what a layer sees once 1 / scale is folded into the layer
        before it."""
        out = InputStatistics(len(scale), keep=self._keep, device=self.hessian.device)
        out.hessian = self.hessian / scale / scale[:, None]
        out.low, out.high, out._abs_sum = self.low / scale, self.high / scale, self._abs_sum / scale
        out.rows, out._kept = self.rows, [part / scale for part in self._kept]
        return out


def output_error(difference: Tensor, hessian: Tensor) -> Tensor:
    """Sum over the calibration inputs of the squared error of each output channel, [N] float32, for the difference [N, K]
    between two weights: the diagonal of D H D^T."""
    d = difference.float()
    return ((d @ hessian) * d).sum(dim=1).clamp(min=0)
