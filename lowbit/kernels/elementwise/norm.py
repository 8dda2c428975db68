"""Two kernels: `embed_rows` sets h to a token's embedding, plus that of its position; `norm_rows` adds delta to h. Both then
compute x = norm(h), or x = h * gamma and the sum of squares of h.

Reads   `norm_rows`: h fp16 or bf16 [M, H] contiguous, delta [M, H] contiguous or None. `embed_rows`: tokens and rows int32; a
        table [V, H] of the type of h, or codes uint8 [V, H] with one scale per row; positions int32 and a table [P, H] of the
        type of h, or None. Both: gamma, bias and post_gamma [H] of 16 or 32 bits
Writes  h, in place where delta is added; x [M, H]; fp32 sums of squares [M] of h as it is stored
Blocks  one row each, in chunks of 8 elements per thread. The number of threads depends on H alone, so that a row's sums have
        the same order for every number of rows. One reduction across warps, two where delta is normalised first (post_gamma)
Overlap gammas and bias are read before the wait for the previous kernel (programmatic dependent launch, sm_90); the next kernel
        may start when all blocks have passed this wait, so kernels before the previous one are then complete
Exact   sums, roots and products in float32. NORM 1: OFFSET 0 rounds the normalised value and then its product with gamma
        (LlamaRMSNorm); another OFFSET multiplies by OFFSET + gamma in float32 and rounds once (GemmaRMSNorm); with a bias, it
        is torch's LayerNorm, rounded once. NORM 2: x = h * (OFFSET + gamma) * factor, rounded once. Plain Triton. Tested:
        tests/kernels/elementwise/test_norm.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from lowbit.hardware.machine import Machine
from lowbit.kernels.parts.launch import Launcher
from lowbit.kernels.parts.rows import add_and_store, floats, loaded, moments, row_of, squares_of
from lowbit.kernels.reference.elementwise import ZERO_CODE

VECTOR = 8
"""Number of 16-bit elements in 16 bytes, which a thread loads at once."""

MOST_THREADS = 1024

NONE, NORMED, SQUARES = 0, 1, 2
"""Values of NORM, which says what is computed from h: nothing; its norm; or h * gamma and sums of squares, for GEMMs that
divide by the RMS in their epilogue."""

_ZERO_CODE = tl.constexpr(ZERO_CODE)


@triton.jit
def normed(halves, weights, eps, H: tl.constexpr, OFFSET: tl.constexpr, CHUNKS: tl.constexpr, ADDED: tl.constexpr = False):
    """Returns the RMSNorm of a row, in the row's dtype. ADDED: the caller adds the result to another value."""
    HALF: tl.constexpr = halves[0].dtype
    values = floats(halves, CHUNKS)
    inverse = tl.rsqrt(tl.sum(squares_of(values, CHUNKS), axis=0) / H + eps)
    made = ()
    for c in tl.static_range(CHUNKS):
        value = values[c] * inverse
        if OFFSET == 0 and ADDED:  # the fma with 0 keeps a rounding: a plain product would be fused with the caller's addition
            value = tl.fma(value.to(HALF).to(tl.float32), weights[c].to(tl.float32), 0.0)
        elif OFFSET == 0:
            value = value.to(HALF).to(tl.float32) * weights[c].to(tl.float32)
        else:
            value = value * (weights[c].to(tl.float32) + OFFSET)
        made += (value.to(HALF),)
    return made


@triton.jit
def layer_normed(halves, weights, biases, eps, i, H: tl.constexpr, STEP: tl.constexpr, CHUNKS: tl.constexpr):
    """Returns the LayerNorm of a row, in the row's dtype."""
    values = floats(halves, CHUNKS)
    mean, variance = moments(values, i, H, values[0].shape[0], STEP, CHUNKS)
    inverse = tl.rsqrt(variance + eps)
    made = ()
    for c in tl.static_range(CHUNKS):
        value = tl.fma((values[c] - mean) * inverse, weights[c].to(tl.float32), biases[c].to(tl.float32))
        made += (value.to(halves[c].dtype),)
    return made


@triton.jit
def stored(base, row, halves, i, H: tl.constexpr, STEP: tl.constexpr, CHUNKS: tl.constexpr):
    """Stores a row."""
    for c in tl.static_range(CHUNKS):
        if H == STEP * CHUNKS:
            tl.store(row_of(base, row, H, False) + c * STEP + i, halves[c])
        else:
            tl.store(row_of(base, row, H, False) + c * STEP + i, halves[c], mask=c * STEP + i < H)


@triton.jit
def finish(
    x, squares, row, halves, weights, biases, i, eps, factor, H: tl.constexpr, STEP: tl.constexpr, CHUNKS: tl.constexpr,
    NORM: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Computes and stores what NORM selects for a row of h; `biases` are None except for LayerNorm."""
    if NORM == 1:
        if biases is None:
            stored(x, row, normed(halves, weights, eps, H, OFFSET, CHUNKS), i, H, STEP, CHUNKS)
        else:
            stored(x, row, layer_normed(halves, weights, biases, eps, i, H, STEP, CHUNKS), i, H, STEP, CHUNKS)
    if NORM == 2:
        values = floats(halves, CHUNKS)
        tl.store(squares + row, tl.sum(squares_of(values, CHUNKS), axis=0))
        made = ()
        for c in tl.static_range(CHUNKS):
            made += ((values[c] * (weights[c].to(tl.float32) + OFFSET) * factor).to(halves[c].dtype),)
        stored(x, row, made, i, H, STEP, CHUNKS)


@triton.jit(do_not_specialize=["eps", "factor"])
def norm_rows(
    x, squares, h, delta, gamma, bias, post_gamma, eps, factor, H: tl.constexpr, THREADS: tl.constexpr, VECTOR: tl.constexpr,
    CHUNKS: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Processes one row of h, adding delta (or its norm) first."""
    row = tl.program_id(0)
    STEP: tl.constexpr = THREADS * VECTOR
    i = tl.arange(0, THREADS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    weights = loaded(gamma, i, H, STEP, CHUNKS)
    biases = None
    if bias is not None:
        biases = loaded(bias, i, H, STEP, CHUNKS)
    if post_gamma is not None:
        post_weights = loaded(post_gamma, i, H, STEP, CHUNKS)
    if OVERLAP:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    halves = loaded(row_of(h, row, H, False), i, H, STEP, CHUNKS)
    if delta is not None:
        others = loaded(row_of(delta, row, H, False), i, H, STEP, CHUNKS)
        if post_gamma is not None:
            others = normed(others, post_weights, eps, H, OFFSET, CHUNKS, ADDED=True)
        halves = add_and_store(h, row, halves, others, i, H, STEP, CHUNKS)
    finish(x, squares, row, halves, weights, biases, i, eps, factor, H, STEP, CHUNKS, NORM, OFFSET)


@triton.jit
def decoded(codes, scale, i, HALF: tl.constexpr, H: tl.constexpr, STEP: tl.constexpr, CHUNKS: tl.constexpr):
    """Converts a row of codes to 16-bit values. Codes beyond H are read as 0, so their value is -128."""
    made = ()
    for c in tl.static_range(CHUNKS):
        value = ((codes[c].to(tl.int32) - _ZERO_CODE).to(tl.float32) * scale).to(HALF)
        if H != STEP * CHUNKS:
            value = tl.where(c * STEP + i < H, value, 0.0)
        made += (value,)
    return made


@triton.jit
def scaled(halves, scale, CHUNKS: tl.constexpr):
    """Multiplies a row by a number and rounds."""
    made = ()
    for c in tl.static_range(CHUNKS):
        made += ((halves[c].to(tl.float32) * scale).to(halves[c].dtype),)
    return made


@triton.jit(do_not_specialize=["eps", "factor", "scale"])
def embed_rows(
    x, squares, h, tokens, rows, table, row_scale, positions, position_table, gamma, bias, eps, factor, scale, H: tl.constexpr,
    THREADS: tl.constexpr, VECTOR: tl.constexpr, CHUNKS: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr,
    SCALED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Loads a token's embedding, 16-bit values or codes with one scale, and adds the embedding of its position, if there is
    one."""
    row = tl.program_id(0)
    STEP: tl.constexpr = THREADS * VECTOR
    HALF: tl.constexpr = h.dtype.element_ty
    i = tl.arange(0, THREADS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    weights = ()
    biases = None
    if NORM != 0:
        weights = loaded(gamma, i, H, STEP, CHUNKS)
    if bias is not None:
        biases = loaded(bias, i, H, STEP, CHUNKS)
    if OVERLAP:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    slot = row
    if rows is not None:
        slot = tl.load(rows + row)
    token = tl.load(tokens + slot)
    codes = loaded(row_of(table, token, H, False), i, H, STEP, CHUNKS)
    halves = codes
    if row_scale is not None:
        halves = decoded(codes, tl.load(row_scale + token).to(tl.float32), i, HALF, H, STEP, CHUNKS)
    if SCALED:
        halves = scaled(halves, scale, CHUNKS)
    if position_table is None:
        stored(h, row, halves, i, H, STEP, CHUNKS)
    else:
        others = loaded(row_of(position_table, tl.load(positions + slot), H, False), i, H, STEP, CHUNKS)
        halves = add_and_store(h, row, halves, others, i, H, STEP, CHUNKS)
    finish(x, squares, row, halves, weights, biases, i, eps, factor, H, STEP, CHUNKS, NORM, OFFSET)


def shape_of(width: int) -> tuple[int, int]:
    """Returns threads per block and 16-byte vectors per thread for rows of `width` elements. About two vectors per thread give
    low latency with few rows and enough bytes in flight with many. The result does not depend on the number of rows, since the
    order of sums must not."""
    vectors = -(-width // VECTOR)
    threads = min(max(1 << max(vectors // 2, 1).bit_length() - 1, 32), MOST_THREADS)
    return threads, -(-vectors // threads)


@dataclass(frozen=True)
class NormRequest:
    """What is computed from h (`NONE`, `NORMED` or `SQUARES`), and the offset that is added to the norm's weights."""

    norm: int
    offset: float = 0.0


class NormPlan:
    """The plan of a call of `norm_rows` for one shape: created once, called many times. A plan serves one GPU, one alignment
    and one set of dtypes."""

    def __init__(self, m: int, width: int, request: NormRequest, machine: Machine) -> None:
        self.m, self.width, self.request = m, width, request
        threads, chunks = shape_of(width)
        overlap = machine.arch.sm >= 90
        self.constants = (width, threads, VECTOR, chunks, request.norm, float(request.offset), overlap)
        self.launch = Launcher(norm_rows, (m, 1, 1), threads // 32, overlap=overlap)

    def __call__(
        self, h: Tensor, delta: Tensor | None, gamma: Tensor, bias: Tensor | None, post_gamma: Tensor | None, eps: float,
        factor: float = 1.0,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Returns x [M, H] and squares [1, M], None for those that were not requested; all tensors on the current device."""
        x = torch.empty_like(h)
        squares = h.new_empty((1, self.m), dtype=torch.float32) if self.request.norm == SQUARES else None
        if self.m:
            self.launch(x, squares, h, delta, gamma, bias, post_gamma, eps, factor, *self.constants)
        return x, squares


class EmbedPlan:
    """The plan of a call of `embed_rows` for one shape, like `NormPlan`. `scaled`: True if embeddings are multiplied by a
    scale."""

    def __init__(self, m: int, width: int, request: NormRequest, scaled: bool, machine: Machine) -> None:
        self.m, self.width, self.request = m, width, request
        threads, chunks = shape_of(width)
        overlap = machine.arch.sm >= 90
        self.constants = (width, threads, VECTOR, chunks, request.norm, float(request.offset), scaled, overlap)
        self.launch = Launcher(embed_rows, (m, 1, 1), threads // 32, overlap=overlap)

    def __call__(
        self, tokens: Tensor, rows: Tensor | None, table: Tensor, row_scale: Tensor | None, positions: Tensor | None,
        position_table: Tensor | None, gamma: Tensor | None, bias: Tensor | None, dtype: torch.dtype, scale: float, eps: float,
        factor: float = 1.0,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """Returns h [M, H] of `dtype`, x and squares, None for those that were not requested; all tensors on the current
        device."""
        h = torch.empty((self.m, self.width), dtype=dtype, device=table.device)
        x = None if self.request.norm == NONE else torch.empty_like(h)
        squares = h.new_empty((1, self.m), dtype=torch.float32) if self.request.norm == SQUARES else None
        if self.m:
            given = (tokens, rows, table, row_scale, positions, position_table, gamma, bias)
            self.launch(x, squares, h, *given, eps, factor, scale, *self.constants)
        return h, x, squares
