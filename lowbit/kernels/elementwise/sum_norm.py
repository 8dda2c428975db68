"""h[T, H] += y[T * top_k, H] summed over the slots of each token (+ a shared expert's output times its gate); x = norm(h).

Between an expert layer and the next one: `sum_slots` and `norm_rows` in one launch. Plain Triton.

Reads   y, h and shared fp16 or bf16, contiguous; share of 16 or 32 bits, one number per token; gamma [H] of 16 or 32 bits
Writes  h in place; x [T, H]
Blocks  one row each, in chunks of 8 elements a thread; the number of threads depends on H alone, so that a row's sums have the
        same order for every number of rows. All slots are loaded before the first is added
Overlap gamma is read before the wait for the previous kernel (programmatic dependent launch, sm_90); the next kernel may start
        when all blocks have passed it
Exact   sums in float32: slots 0, 1, .., then sigmoid(share) * shared, then h; one rounding. x is RMSNorm of h as it is stored:
        the normalised value is rounded, then its product with gamma. Tested: tests/kernels/elementwise/test_sum_norm.py
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from lowbit.hardware.machine import Machine
from lowbit.kernels.elementwise.norm import VECTOR, normed, shape_of, stored
from lowbit.kernels.parts.launch import Launcher
from lowbit.kernels.parts.rows import floats, loaded, rounded_to, row_of

REGISTERS = 168
"""Limit of registers per thread. They have room for 16 bytes of each chunk of 8 slots."""


@triton.jit(do_not_specialize=["eps", "share_stride"])
def sum_norm_rows(
    x, h, y, shared, share, share_stride, gamma, eps, H: tl.constexpr, TOP_K: tl.constexpr, THREADS: tl.constexpr,
    VECTOR: tl.constexpr, CHUNKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Processes the row of one token."""
    row = tl.program_id(0)
    STEP: tl.constexpr = THREADS * VECTOR
    i = tl.arange(0, THREADS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    weights = loaded(gamma, i, H, STEP, CHUNKS)
    if OVERLAP:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    slots = ()
    for s in tl.static_range(TOP_K):
        slots += (loaded(row_of(y, row * TOP_K + s, H, False), i, H, STEP, CHUNKS),)
    before = loaded(row_of(h, row, H, False), i, H, STEP, CHUNKS)
    if shared is not None:
        others = loaded(row_of(shared, row, H, False), i, H, STEP, CHUNKS)
        factor = tl.load(share + row.to(tl.int64) * share_stride).to(tl.float32)
        factor = 1.0 / (1.0 + tl.exp(-factor))
    total = floats(slots[0], CHUNKS)
    for s in tl.static_range(1, TOP_K):
        total = plus(total, floats(slots[s], CHUNKS), CHUNKS)
    if shared is not None:
        scaled = ()
        for c in tl.static_range(CHUNKS):
            scaled += (others[c].to(tl.float32) * factor,)
        total = plus(total, scaled, CHUNKS)
    halves = rounded_to(plus(total, floats(before, CHUNKS), CHUNKS), h.dtype.element_ty, CHUNKS)
    stored(h, row, halves, i, H, STEP, CHUNKS)
    stored(x, row, normed(halves, weights, eps, H, 0, CHUNKS), i, H, STEP, CHUNKS)


@triton.jit
def plus(values, others, CHUNKS: tl.constexpr):
    """Sums of chunks."""
    made = ()
    for c in tl.static_range(CHUNKS):
        made += (values[c] + others[c],)
    return made


class SumNormPlan:
    """The plan of a call for one shape: created once, called many times. A plan serves one GPU, one alignment and one set of
    dtypes."""

    def __init__(self, tokens: int, top_k: int, width: int, machine: Machine) -> None:
        self.tokens = tokens
        threads, chunks = shape_of(width)
        overlap = machine.arch.sm >= 90
        self.constants = (width, top_k, threads, VECTOR, chunks, overlap)
        # With 1,024 threads the register file has only 64 registers per thread.
        most = min(REGISTERS, 65536 // threads)
        self.launch = Launcher(sum_norm_rows, (tokens, 1, 1), threads // 32, overlap=overlap, registers=most)

    def __call__(
        self, h: Tensor, y: Tensor, shared: Tensor | None, share: Tensor | None, gamma: Tensor, eps: float
    ) -> Tensor:  # fmt: skip
        """Returns x [T, H] after the sums are added to h; share [T, 1] of any row stride; all tensors on the current device."""
        x = torch.empty_like(h)
        if self.tokens:
            stride = 0 if share is None else share.stride(0)
            self.launch(x, h, y, shared, share, stride, gamma, eps, *self.constants)
        return x
