"""Initial zeros of a tile's sums, and the addition of tensor-core sums to fp32 totals, which compilers do not move.

Compilers would move these additions behind the start of the next products. Those products would then need a second set of
registers for their sums, which do not fit beside totals of 256 columns. PTX with side effects is not moved.
"""

from __future__ import annotations

from lowbit.kernels.parts.gluon import gl, gluon


@gluon.jit
def zero_sums(TYPE: gl.constexpr, C: gl.constexpr):
    """Returns zeros in the layout of a tile's sums."""
    ROWS: gl.constexpr = C.rows
    COLUMNS: gl.constexpr = C.columns
    SUMS: gl.constexpr = C.accumulator
    return gl.zeros((ROWS, COLUMNS), TYPE, SUMS)


@gluon.jit
def zero_half(TYPE: gl.constexpr, C: gl.constexpr):
    """Returns zeros in the layout of the sums of one half of the columns (`by_halves`)."""
    ROWS: gl.constexpr = C.rows
    COLUMNS: gl.constexpr = C.store_columns
    SUMS: gl.constexpr = C.store_layout
    return gl.zeros((ROWS, COLUMNS), TYPE, SUMS)


@gluon.jit
def add_here(total, sums):
    """Returns total + sums, computed at this point of the program."""
    return gl.inline_asm_elementwise(
        "add.rn.f32 $0, $1, $2;", "=f,f,f", [total, sums.to(gl.float32)], dtype=gl.float32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def add_scaled_here(total, sums, scale):
    """Returns total + sums * scale with one rounding, computed at this point of the program; `scale` has one column or one
    row."""
    sums, scale = gl.broadcast(sums.to(gl.float32), scale)
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [sums, scale, total], dtype=gl.float32, is_pure=False, pack=1
    )  # fmt: skip
