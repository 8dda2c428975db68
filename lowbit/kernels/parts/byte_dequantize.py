"""Dequantization of one tile to 8-bit operands as PTX: words of 16 rows x 128 columns of K per warp -> operand A
(parts/operand.py)."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.formats import number_format
from lowbit.hardware.byte_conversions import ByteConversion, ByteOperand, byte_conversion
from lowbit.kernels.parts.dequantize import CodePlanes
from lowbit.kernels.parts.gluon import gl, gluon
from lowbit.kernels.parts.operand import REGISTERS

TILES = 2
"""Number of tiles of FragmentOrder, each 64 columns of K, in 128 columns."""


@dataclass(frozen=True)
class ByteDequantizer(CodePlanes):
    """Converts codes of `format` to s8 or e4m3."""

    format: str
    operand: ByteOperand

    @property
    def conversion(self) -> ByteConversion:
        return byte_conversion(number_format(self.format), self.operand)

    @property
    def operand_type(self) -> gl.dtype:
        return gl.int8 if self.operand == "s8" else gl.float8e4nv

    @property
    def constraints(self) -> str:
        return ",".join(["=&r"] * REGISTERS + ["r"] * (TILES * self.bits))

    @property
    def asm(self) -> str:
        """PTX of the conversion. Outputs: the registers of 128 columns of K. Inputs: the words of both tiles."""
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
def dequantize(words, C: gl.constexpr):
    """Returns the registers of operand A for 128 columns of K."""
    D: gl.constexpr = C.dequantizer
    return gl.inline_asm_elementwise(D.asm, D.constraints, words, dtype=D.types, is_pure=True, pack=1)
