"""Statistics of the inputs of a layer that calibration collects; their size does not depend on the number of inputs."""

from __future__ import annotations

import torch
from torch import Tensor


class InputStatistics:
    """Statistics of the inputs x [.., K] of a linear layer, all float32.

    hessian [K, K]: the sum of x^T x, or [0, 0] without `hessian`. low, high [K]: the range of each channel, extended to 0.
    abs_max, abs_mean, mean_square [K]: the maximum of |x|, the mean of |x| and the mean of x^2. rows: the number of rows of x.
    sample [S, K]: the first `keep` rows.

    The sum over x of |(W - W') x|^2 is the trace of (W - W') H (W - W')^T, so the Hessian H gives the exact error of a layer's
    output on all calibration inputs without storing any.
    """

    def __init__(self, channels: int, *, hessian: bool = True, keep: int = 0, device: torch.device | str = "cpu") -> None:
        self.hessian = torch.zeros(channels, channels, device=device) if hessian else torch.zeros(0, 0, device=device)
        self.low, self.high = torch.zeros(2, channels, device=device)
        self._abs_sum, self._square_sum = torch.zeros(2, channels, dtype=torch.float64, device=device)
        self.rows = 0
        self._sample_rows = keep
        self._sample: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        """Accumulates the rows of x [.., K], any float dtype."""
        x = x.detach().reshape(-1, x.shape[-1])
        if not self.hessian.numel():
            pass
        elif x.is_cuda and x.dtype in (torch.float16, torch.bfloat16):
            # Products of 16-bit numbers are exact in float32; tensor cores multiply them and add in float32.
            self.hessian += torch.mm(x.T, x, out_dtype=torch.float32)
        else:
            x = x.float()
            self.hessian.addmm_(x.T, x)
        self.low = torch.minimum(self.low, x.amin(dim=0).float())
        self.high = torch.maximum(self.high, x.amax(dim=0).float())
        self._abs_sum += x.abs().sum(dim=0, dtype=torch.float64)
        if not self.hessian.numel():
            self._square_sum += x.float().square().sum(dim=0, dtype=torch.float64)
        missing = self._sample_rows - min(self.rows, self._sample_rows)
        if missing:
            self._sample.append(x[:missing].float().clone())
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
    def mean_square(self) -> Tensor:
        """Mean of x^2 per channel, [K]."""
        sums = self.hessian.diagonal() if self.hessian.numel() else self._square_sum
        return (sums / max(self.rows, 1)).float()

    @property
    def sample(self) -> Tensor:
        """The first rows, [S, K] float32."""
        return torch.cat(self._sample) if self._sample else self.low.new_zeros(0, len(self.low))

    def divided(self, scale: Tensor) -> InputStatistics:
        """Returns the statistics of x / scale, for `scale` [K] positive."""
        out = InputStatistics(len(scale), keep=self._sample_rows, device=self.hessian.device)
        out.hessian = self.hessian / scale / scale[:, None] if self.hessian.numel() else self.hessian
        out.low, out.high, out._abs_sum = self.low / scale, self.high / scale, self._abs_sum / scale
        out._square_sum = self._square_sum / scale.double().square()
        out.rows, out._sample = self.rows, [part / scale for part in self._sample]
        return out


def output_error(difference: Tensor, hessian: Tensor) -> Tensor:
    """Returns the squared error of each output channel, summed over the calibration inputs, [N] float32.

    It is the diagonal of D H D^T for the difference D [N, K] between two weights.
    """
    d = difference.float()
    return ((d @ hessian) * d).sum(dim=1).clamp(min=0)
