"""y[M, N] = (clamp(up, -7, 7) + 1) * g * sigmoid(1.702 * g), g = min(gate, 7): gpt-oss's gate for rivals that leave it to a
kernel of its own.

Reads   x bf16 [M, 2 N], gate first
Grid    (rows, columns / 1024), each output once
Exact   float32, one rounding at the store, as vLLM's swigluoai_and_mul
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024


@triton.jit
def _kernel(x, y, n, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < n
    gate = tl.minimum(tl.load(x + row * 2 * n + column, mask=inside).to(tl.float32), 7.0)
    up = tl.load(x + row * 2 * n + n + column, mask=inside).to(tl.float32)
    up = tl.minimum(tl.maximum(up, -7.0), 7.0)
    out = (up + 1.0) * gate * tl.sigmoid(1.702 * gate)
    tl.store(y + row * n + column, out.to(y.dtype.element_ty), mask=inside)


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    """Returns y [M, N] for gate_up [M, 2 N] on a GPU, contiguous, gate first."""
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty((rows, n), dtype=gate_up.dtype, device=gate_up.device)
    _kernel[(rows, triton.cdiv(n, COLUMNS))](gate_up, y, n, COLUMNS)
    return y
