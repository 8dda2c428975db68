"""out[p, K] = x[order[p] // top_k, K]: rows of x in the order of slots by expert, for the experts' wgmma kernel. Plain Triton.

Reads   x fp16 or bf16, rows that start at multiples of 16 bytes; order int32 [slots]
Writes  rows that start at multiples of 16 bytes; elements between K and the next row are neither written nor read
Blocks  consecutive columns of one position, 8 elements per thread
Overlap waits for the previous kernel, then lets the next one start (programmatic dependent launch, sm_90)
Absent  the last entries of `order` are -1, for slots whose expert is not on this GPU; they copy the first row, and no tile has
        them
Exact   a copy. Tested: tests/kernels/elementwise/test_gather_slots.py
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from lowbit.hardware.machine import Machine
from lowbit.kernels.parts.launch import Launcher
from lowbit.kernels.parts.rows import row_of

COLUMNS = 1024
"""Number of columns per block."""


@triton.jit(do_not_specialize=["x_stride", "top_k"])
def copy_rows(out, x, order, x_stride, top_k, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr):
    """Copies COLUMNS columns of one row; strides count vectors of 8 elements."""
    position = tl.program_id(0)
    i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    STRIDE: tl.constexpr = (WIDTH + 7) // 8
    if OVERLAP:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    row = tl.maximum(tl.load(order + position), 0) // top_k
    exist = i // 8 < STRIDE if WIDTH % 8 == 0 else i < WIDTH
    values = tl.load(row_of(x, row, x_stride, True) + i, mask=exist, other=0.0)
    tl.store(row_of(out, position, STRIDE, True) + i, values, mask=exist)


class GatherSlotsPlan:
    """The plan of a call for one shape: created once, called many times. `top_k` slots share a row of x."""

    def __init__(self, slots: int, top_k: int, width: int, machine: Machine) -> None:
        self.slots, self.top_k, self.width = slots, top_k, width
        overlap = machine.arch.sm >= 90
        self.constants = (width, COLUMNS, overlap)
        self.launch = Launcher(copy_rows, (slots, -(-width // COLUMNS), 1), 4, overlap=overlap)

    def __call__(self, x: Tensor, order: Tensor) -> Tensor:
        """Returns rows [slots, K] of x [rows, K], whose rows start at multiples of 16 bytes; all on the current device."""
        out = torch.empty((self.slots, -(-self.width // 8) * 8), dtype=x.dtype, device=x.device)
        self.launch(out, x, order, x.stride(0) // 8, self.top_k, *self.constants)
        return out[:, : self.width]
