"""out[T, N] = y[T * top_k, N] summed over the slots of each token, + residual[T, N]: the last kernel of an expert layer. Plain
Triton.

Reads   y and residual fp16 or bf16, contiguous; experts int32 [T, top_k] or None. Slots with a negative expert are left out of
        the sum, whatever their rows of y contain
Blocks  consecutive columns of one token, 8 elements per thread; all slots are loaded before the first is added
Overlap waits for the previous kernel, then lets the next one start (programmatic dependent launch, sm_90)
Exact   sums in float32, slot 0 first, the residual last; one rounding. Tested: tests/kernels/elementwise/test_sum_slots.py
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
"""Number of columns per block: 16 bytes of each slot per thread."""

REGISTERS = 128
"""Limit of registers per thread, which hold 16 bytes of each slot."""


@triton.jit
def sum_rows(
    out, y, residual, experts, WIDTH: tl.constexpr, TOP_K: tl.constexpr, COLUMNS: tl.constexpr, PIECES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Sums COLUMNS columns of one token. PIECES: rows have a multiple of 8 elements and start at multiples of 16 bytes."""
    token = tl.program_id(0)
    i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    STRIDE: tl.constexpr = WIDTH // 8 if PIECES else WIDTH
    if OVERLAP:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    slots = ()
    for s in tl.static_range(TOP_K):
        slots += (tl.load(row_of(y, token * TOP_K + s, STRIDE, PIECES) + i, mask=i < WIDTH, other=0.0),)
    if experts is not None:  # rows of y are loaded in any case, so that their loads need not wait for those of `experts`
        present = ()
        for s in tl.static_range(TOP_K):
            present += (tl.where(tl.load(experts + token * TOP_K + s) >= 0, slots[s], 0.0),)
        slots = present
    if residual is not None:
        before = tl.load(row_of(residual, token, STRIDE, PIECES) + i, mask=i < WIDTH, other=0.0)
    total = slots[0].to(tl.float32)
    for s in tl.static_range(1, TOP_K):
        total += slots[s].to(tl.float32)
    if residual is not None:
        total += before.to(tl.float32)
    tl.store(row_of(out, token, STRIDE, PIECES) + i, total.to(out.dtype.element_ty), mask=i < WIDTH)


class SumSlotsPlan:
    """The plan of a call for one shape: created once, called many times. `vectors`: rows of y and residual have a multiple of 8
    elements and start at multiples of 16 bytes."""

    def __init__(self, tokens: int, top_k: int, width: int, vectors: bool, machine: Machine) -> None:
        self.tokens, self.width = tokens, width
        overlap = machine.arch.sm >= 90
        self.constants = (width, top_k, COLUMNS, vectors, overlap)
        # By default ptxas uses 32 registers, and then adds the first slots before it loads the last ones.
        self.launch = Launcher(sum_rows, (tokens, -(-width // COLUMNS), 1), 4, overlap=overlap, registers=REGISTERS)

    def __call__(self, y: Tensor, residual: Tensor | None, experts: Tensor | None = None) -> Tensor:
        """Returns the sums [T, N]; all tensors on the current device. A plan is called either always or never with a residual,
        and either always or never with experts."""
        out = torch.empty((self.tokens, self.width), dtype=y.dtype, device=y.device)
        if self.tokens and self.width:
            self.launch(out, y, residual, experts, *self.constants)
        return out
