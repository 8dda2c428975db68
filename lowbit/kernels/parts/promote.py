"""Sums of a tile: zeros, and promotion of tensor-core sums to fp32 totals at the place in the program where it is written.

Compilers move such additions behind the products that start next; their sums then need registers of their own, and with totals
of 256 columns there are none. PTX with side effects is not moved.
"""

from __future__ import annotations

from lowbit.kernels.parts.gluon import gl, gluon


@gluon.jit
def zero_sums(TYPE: gl.constexpr, C: gl.constexpr):
    """Zeros in the layout of a tile's sums."""
    ROWS: gl.constexpr = C.rows
    COLUMNS: gl.constexpr = C.columns
    SUMS: gl.constexpr = C.accumulator
    return gl.zeros((ROWS, COLUMNS), TYPE, SUMS)


@gluon.jit
def zero_half(TYPE: gl.constexpr, C: gl.constexpr):
    """The same for one half of the columns (`by_halves`)."""
    ROWS: gl.constexpr = C.rows
    COLUMNS: gl.constexpr = C.store_columns
    SUMS: gl.constexpr = C.store_layout
    return gl.zeros((ROWS, COLUMNS), TYPE, SUMS)


@gluon.jit
def add_here(total, sums):
    """Returns total + sums."""
    return gl.inline_asm_elementwise(
        "add.rn.f32 $0, $1, $2;", "=f,f,f", [total, sums.to(gl.float32)], dtype=gl.float32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def add_scaled_here(total, sums, scale):
    """Returns total + sums * scale with one rounding; `scale` has one column or one row."""
    sums, scale = gl.broadcast(sums.to(gl.float32), scale)
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [sums, scale, total], dtype=gl.float32, is_pure=False, pack=1
    )  # fmt: skip
