"""Sums that leave the tensor core, added to totals in fp32 in the place where the program has it.

Compilers move such additions behind the products started next; their sums then need registers of their own, and with totals of
256 columns there are none. PTX that may have effects stays in its place.
"""

from __future__ import annotations

from lowbit.kernels.parts.gluon import gl, gluon


@gluon.jit
def add_here(total, sums):
    """total + sums."""
    return gl.inline_asm_elementwise(
        "add.rn.f32 $0, $1, $2;", "=f,f,f", [total, sums.to(gl.float32)], dtype=gl.float32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def add_scaled_here(total, sums, scale):
    """total + sums * scale with one rounding; `scale` has one column or one row."""
    sums, scale = gl.broadcast(sums.to(gl.float32), scale)
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [sums, scale, total], dtype=gl.float32, is_pure=False, pack=1
    )  # fmt: skip
