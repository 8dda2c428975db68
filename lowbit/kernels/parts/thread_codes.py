"""Codes of a product whose sums are separate registers (parts/thread_product.py): constants, requantization, rows of words.

A thread has two rows of a product, 8 apart, and 8 of each group of 32 columns. `table` loads the constants of a group from
shared memory in the order of pack/conv_layout.py (`lane_constants`), `columns` picks its sums, `codes_of` requantizes them.
"""

from __future__ import annotations

from lowbit.kernels.parts.gluon import gl, gluon
from lowbit.kernels.parts.thread_product import load_words, shared_floats, store_words, thread_words

SCALED = gl.constexpr("cvt.rn.f32.s32 $0, $1; fma.rn.f32 $0, $0, $2, $3;")


@gluon.constexpr_function
def place_of(group, row, i):
    """The register of the sum of column i of 8 of a column group, in the first (row 0) or second row of a thread."""
    return 16 * group + 4 * (i // 2) + 2 * row + i % 2


@gluon.jit
def columns(sums, group: gl.constexpr, row: gl.constexpr):
    """Returns the 8 sums of a column group and row."""
    found = ()
    for i in gl.static_range(8):
        found = found + (sums[place_of(group, row, i)],)
    return found


@gluon.jit
def table(at, group: gl.constexpr):
    """Loads the 8 constants of column group `group`, counted from the address `at` on."""
    return shared_floats(at, 128 * group) + shared_floats(at, 128 * group + 64)


@gluon.jit
def scaled(sums, s, b):
    """fma(float(sum), s, b)."""
    found = ()
    for i in gl.static_range(8):
        found = found + (
            gl.inline_asm_elementwise(
                SCALED, "=&f,r,f,f", (sums[i], s[i], b[i]), dtype=gl.float32, is_pure=True, pack=1
            ),
        )  # fmt: skip
    return found


@gluon.jit
def codes_of(sums, s, b, residual, g, R: gl.constexpr):
    """Requantizes 8 columns to words of codes by R, a `Requantize`."""
    inputs = sums + s + b + residual
    if R.residual_words > 0:
        inputs = inputs + (g,)
    return gl.inline_asm_elementwise(R.asm, R.constraints, inputs, dtype=thread_words(R.words), is_pure=True, pack=1)


@gluon.jit
def store_rows(at, words, exists, offset: gl.constexpr, count: gl.constexpr, row_bytes: gl.constexpr):
    """Stores `count` words of each of a thread's two rows."""
    store_words(at, words[0], exists[0], offset, count)
    store_words(at, words[1], exists[1], offset + 8 * row_bytes, count)


@gluon.jit
def load_rows(at, exists, offset: gl.constexpr, count: gl.constexpr, row_bytes: gl.constexpr):
    """Loads `count` words of each of a thread's two rows."""
    return load_words(at, exists[0], offset, count), load_words(at, exists[1], offset + 8 * row_bytes, count)
