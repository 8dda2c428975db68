"""y[M, I] = f(gate[M, I]) * up[M, I]: the gate of an MLP, f = silu, GELU by its tanh formula, or ReLU. Plain Triton.

Reads   gate, up fp16 or bf16, each with any row stride: the halves of one GEMM's output [M, 2 I], the outputs of two GEMMs, or
        one output whose columns alternate between 8 of gate and 8 of up (pack/gated.py). Without up, y = f(gate), for an MLP
        without a gate
Writes  y [M, I] contiguous
Blocks  consecutive columns of one row, 8 or 16 elements per thread
Overlap waits for the previous kernel, then lets the next one start (programmatic dependent launch, sm_90)
Exact   f in float32, rounded to the type of gate, times up, rounded again, as in Transformers' MLPs; the sigmoid, computed with
        rsqrt, may be off in the last bit of float32. Tested: tests/kernels/elementwise/test_gate.py
Source  GELU: x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) (Hendrycks, Gimpel 2016), and (1 + tanh(t)) / 2 = sigmoid(2 t)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from lowbit.hardware.machine import Machine
from lowbit.kernels.parts.launch import Launcher
from lowbit.kernels.parts.rows import row_of, sigmoid
from lowbit.kernels.reference.elementwise import GATES

VECTOR = 8
"""Number of 16-bit elements in 16 bytes."""

FEW_BLOCKS_PER_SM = 16
"""Up to this number of blocks of 1024 columns per SM a thread has 8 elements, beyond it 16."""


@triton.jit(do_not_specialize=["gate_stride", "up_stride"])
def gate_rows(
    y, gate, up, gate_stride, up_stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, VECTORS: tl.constexpr,
    FUNCTION: tl.constexpr, ALTERNATE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Computes COLUMNS columns of one row."""
    row = tl.program_id(0)
    i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if OVERLAP:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    at = i + i // 8 * 8 if ALTERNATE else i
    halves = tl.load(row_of(gate, row, gate_stride, VECTORS) + at, mask=i < WIDTH, other=0.0)
    if up is not None:
        others = tl.load(row_of(up, row, up_stride, VECTORS) + at, mask=i < WIDTH, other=0.0)
    value = halves.to(tl.float32)
    if FUNCTION == 0:
        made = value * sigmoid(value)
    elif FUNCTION == 1:
        made = value * sigmoid(1.5957691216057308 * tl.fma(0.044715 * value * value, value, value))
    else:
        made = tl.where(value < 0, 0.0, value)  # keeps NaN, unlike tl.maximum
    if up is not None:
        made = made.to(halves.dtype).to(tl.float32) * others.to(tl.float32)
    tl.store(row_of(y, row, WIDTH, False) + i, made.to(halves.dtype), mask=i < WIDTH)


class GatePlan:
    """The plan of a call for one shape: created once, called many times.

    `vectors` promises that I and both row strides are multiples of 8 and that all tensors start at multiples of 16 bytes. A
    plan serves one GPU, one alignment and one type of the tensors, and either calls with `up` or calls without.
    """

    def __init__(self, m: int, width: int, function: str, vectors: bool, machine: Machine, alternate: bool = False) -> None:
        self.m, self.width = m, width
        self.unit = VECTOR if vectors else 1
        few = m * -(-width // 1024) <= FEW_BLOCKS_PER_SM * machine.sm_count
        columns = 1024 if few else 2048
        overlap = machine.arch.sm >= 90
        self.constants = (width, columns, vectors, GATES.index(function), alternate, overlap)
        self.launch = Launcher(gate_rows, (m, -(-width // columns), 1), 4, overlap=overlap)

    def __call__(self, gate: Tensor, up: Tensor | None) -> Tensor:
        """Returns y [M, I], which is f(gate) if there is no `up`; all tensors on the current device."""
        y = torch.empty((self.m, self.width), dtype=gate.dtype, device=gate.device)
        if self.m:
            strides = gate.stride(0) // self.unit, 0 if up is None else up.stride(0) // self.unit
            self.launch(y, gate, up, *strides, *self.constants)
        return y
