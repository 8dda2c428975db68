"""Operand A of the convolution kernels of sm_90: registers of codes in the layout of wgmma, and the products of one tap.

C is a WgmmaConv of parts/conv_tile.py. For `multiply_tap` x must be read from strips (parts/strip_ring.py).
"""

from __future__ import annotations

from lowbit.kernels.parts.gluon import gl, gluon, warpgroup_mma


@gluon.jit
def join_quads(quads, count: gl.constexpr, C: gl.constexpr):
    """Joins `count` tensors [threads, 4] to [threads, 4 * count], in order."""
    if count == 1:
        return quads[0]
    else:
        low = join_quads(quads[0 : count // 2], count // 2, C)
        high = join_quads(quads[count // 2 :], count // 2, C)
        return gl.reshape(gl.permute(gl.join(low, high), [0, 2, 1]), [C.threads, 4 * count])


@gluon.jit
def operand_a(registers, count: gl.constexpr, C: gl.constexpr):
    """Returns registers of 4 codes each as operand A of wgmma: pixels x 8 * count bytes of K. This takes no instruction."""
    QUADS: gl.constexpr = C.quads_layout
    ROWS: gl.constexpr = gl.SliceLayout(1, QUADS)
    quads = ()
    for i in gl.static_range(count):
        column = gl.expand_dims(gl.convert_layout(registers[i], ROWS, assert_trivial=True), 1)
        all4 = gl.convert_layout(column.broadcast_to([C.threads, 4]), QUADS, assert_trivial=True)
        quad = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [all4], dtype=gl.int8, is_pure=True, pack=4)
        quads = quads + (quad,)
    # [warp, lane group, lane of the group, k step, k half, row half, element] -> pixels, k
    parts = gl.reshape(join_quads(quads, count, C), [C.warps, 8, 4, count // 4, 2, 2, 4])
    matrix = gl.reshape(gl.permute(parts, [0, 5, 1, 3, 4, 2, 6]), [C.pixels, 8 * count])
    return gl.convert_layout(matrix, C.operand, assert_trivial=True)


@gluon.jit
def multiply_tap(acc, adds, w_ring, tap, registers, C: gl.constexpr):
    """Starts the products of one tap. Its x is in `registers`; its w is one stage of `w_ring`, with one plane or two."""
    COUNT: gl.constexpr = C.strip.loaded
    if C.planes == 1:
        return warpgroup_mma(
            operand_a(registers, COUNT, C), w_ring.index(tap).permute([1, 0]), acc, use_acc=adds, is_async=True
        )  # fmt: skip
    else:
        even = operand_a(registers[0:COUNT], COUNT, C)
        odd = operand_a(registers[COUNT:], COUNT, C)
        acc = warpgroup_mma(even, w_ring.index(2 * tap).permute([1, 0]), acc, use_acc=adds, is_async=True)
        return warpgroup_mma(odd, w_ring.index(2 * tap + 1).permute([1, 0]), acc, is_async=True)
