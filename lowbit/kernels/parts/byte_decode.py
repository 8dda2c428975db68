"""Tiles of narrow weights in registers: words of 16 rows x 128 k a warp -> operand A of 8 bits, for wgmma and mma.sync.

Each lane holds a row pair (g, g + 8) of its warp's strip; registers 0 to 15 are those of four k steps of 32, in the order of
hardware/mma.py. The functions take the configuration C of a kernel, which has `decode`, `warps`, `threads`, `rows`,
`threads_layout` and the layouts `quads_layout` and `operand_layout`.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.formats import number_format
from lowbit.hardware.byte_conversions import ByteConversion, ByteOperand, byte_conversion
from lowbit.hardware.fields import WORD_GROUPS
from lowbit.kernels.parts.gluon import gl, gluon

REGISTERS = 16
"""Registers of four operands that a lane holds of 128 k."""

TILES = 2
"""Tiles of FragmentOrder, of 64 k, in 128 k."""

OPERAND_REGISTERS = gl.constexpr(REGISTERS)


@dataclass(frozen=True)
class ByteDecode:
    """Codes of `format` to s8 or e4m3."""

    format: str
    operand: ByteOperand

    @property
    def conversion(self) -> ByteConversion:
        return byte_conversion(number_format(self.format), self.operand)

    @property
    def bits(self) -> int:
        return self.conversion.format.bits

    @property
    def dtype(self) -> gl.dtype:
        return gl.int8 if self.operand == "s8" else gl.float8e4nv

    @property
    def planes(self) -> int:
        """Groups of words in which the codes of a tile are loaded."""
        return len(WORD_GROUPS[self.bits])

    def plane_words(self, plane: int) -> int:
        """Words per lane and tile of a plane."""
        return WORD_GROUPS[self.bits][plane]

    def plane_start(self, plane: int) -> int:
        """Where a plane starts within the 32 * bits words of a tile."""
        return 32 * sum(WORD_GROUPS[self.bits][:plane])

    @property
    def types(self) -> tuple[gl.dtype, ...]:
        return (gl.int32,) * REGISTERS

    @property
    def constraints(self) -> str:
        return ",".join(["=&r"] * REGISTERS + ["r"] * (TILES * self.bits))

    @property
    def asm(self) -> str:
        """Outputs: the registers of 128 k. Inputs: the words of both tiles."""
        c, lines = self.conversion, []
        for run in range(REGISTERS // c.registers):
            lines.append("{ .reg .b32 " + ", ".join(c.program.inputs) + ";")
            first = REGISTERS + run * c.fields.words
            lines += [f"mov.b32 {name}, ${first + i};" for i, name in enumerate(c.program.inputs)]
            lines.append(c.program.ptx())
            lines += [f"mov.b32 ${run * c.registers + i}, {name};" for i, name in enumerate(c.program.outputs)]
            lines.append("}")
        return "{\n" + "\n".join(lines) + "\n}"


@gluon.jit
def decode(words, C: gl.constexpr):
    """The weights of 128 k: the registers of operand A."""
    D: gl.constexpr = C.decode
    return gl.inline_asm_elementwise(D.asm, D.constraints, words, dtype=D.types, is_pure=True, pack=1)


@gluon.jit
def join_quads(quads, count: gl.constexpr, C: gl.constexpr):
    """`count` tensors [threads, 4] -> [threads, 4 * count], in order."""
    if count == 1:
        return quads[0]
    else:
        low = join_quads(quads[0 : count // 2], count // 2, C)
        high = join_quads(quads[count // 2 :], count // 2, C)
        return gl.reshape(gl.permute(gl.join(low, high), [0, 2, 1]), [C.threads, 4 * count])


@gluon.jit
def operand_a(registers, C: gl.constexpr):
    """The decoded registers as operand A, C.rows x 128 k; this takes no instruction."""
    QUADS: gl.constexpr = C.quads_layout
    ROWS: gl.constexpr = gl.SliceLayout(1, QUADS)
    quads = ()
    for i in gl.static_range(OPERAND_REGISTERS):
        column = gl.expand_dims(gl.convert_layout(registers[i], ROWS, assert_trivial=True), 1)
        four = gl.convert_layout(column.broadcast_to([C.threads, 4]), QUADS, assert_trivial=True)
        quad = gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r,r,r,r", [four], dtype=C.decode.dtype, is_pure=True, pack=4
        )  # fmt: skip
        quads = quads + (quad,)
    # [warp, lane group, lane of the group, k step, k half, row half, element] -> rows, k
    parts = gl.reshape(join_quads(quads, OPERAND_REGISTERS, C), [C.warps, 8, 4, 4, 2, 2, 4])
    matrix = gl.reshape(gl.permute(parts, [0, 5, 1, 3, 4, 2, 6]), [C.rows, 128])
    return gl.convert_layout(matrix, C.operand_layout, assert_trivial=True)
