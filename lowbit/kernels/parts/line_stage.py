"""Weights as TensorRT-LLM lays them for sm_80 (pack/tensorrt_llm.py) in a stage of parts/tile_stage.py, and their decoding.

A line of 128 bytes is 64 k of 4 neighbouring channels at 4 bits, of 2 at 8 bits. Copied piece by piece to rows of one channel
each, it falls apart: of a strip of 16 channels a stage has 16 rows of 32 (64) bytes, whose pieces change places with every 4
(2) rows, so that neither copies nor ldmatrix meet a bank twice. ldmatrix takes 16 bytes of a channel for 8 elements of 16 bits
and hands a lane 4 of them: by the order of rows in the file, just the codes of its own k, for two matrix instructions at 4 bits
and for one at 8. The layout is made for weights as operand B; rows g and g + 8 of operand A are two such fragments, so the
kernel for fragment order multiplies these words too, in other registers.
Tested: tests/kernels/parts/test_line_stage.py
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.kernels.parts.dequantize import INSTRUCTION, Dequantizer
from lowbit.kernels.parts.gluon import gl, gluon
from lowbit.kernels.parts.operand import REGISTERS
from lowbit.kernels.parts.tile_stage import PIECE, TileStage

STRIP = gl.constexpr(16)
"""Channels of a strip."""


@dataclass(frozen=True)
class LineDecode(Dequantizer):
    """Codes in words of one channel: a turn takes a word of channel g, then one of channel g + 8."""

    @property
    def blocks(self) -> int:
        return REGISTERS // max(2 * self.conversion.fields.registers, INSTRUCTION)

    def register_of(self, run: int, output: int) -> int:
        block, row = divmod(run, 2)
        return block * self.block_registers + 2 * output + row

    def output_of(self, register: int) -> int:
        return register // 2 % self.conversion.fields.registers


@dataclass(frozen=True)
class LineStage(TileStage):
    """A stage whose codes, of 4 or 8 bits, come in lines."""

    @property
    def planes(self) -> tuple[int, ...]:
        return (self.dequantizer.bits,)

    @property
    def tile_words(self) -> int:
        return 32

    @property
    def columns(self) -> int:
        """Channels in a line."""
        return 16 // self.dequantizer.bits

    @property
    def row_pieces(self) -> int:
        """Pieces of a channel."""
        return self.dequantizer.bits // 2

    @property
    def swizzle_rows(self) -> int:
        """Rows after which pieces change places."""
        return 8 // self.row_pieces

    def _read_codes(self, row_block: int, slot: str, own: str, lane: str) -> list[str]:
        """Matrices of an ldmatrix: 16 bytes of channels 0 to 7, the same of 8 to 15, then the next 16 bytes of both."""
        row_bytes, start = PIECE * self.row_pieces, row_block * 128 * self.dequantizer.bits
        lines = [
            ".reg .b32 piece;",
            f"and.b32 here, {lane}, 7; shr.u32 piece, here, {self.swizzle_rows.bit_length() - 1}; shr.u32 at, {lane}, 4;",
            f"xor.b32 piece, piece, at; and.b32 at, {lane}, 8; add.s32 here, here, at;",
            f"mad.lo.s32 at, {own}, {STRIP.value * row_bytes}, {slot}; mad.lo.s32 here, here, {row_bytes}, at;",
        ]
        for out in range(0, self.dequantizer.bits, 4):
            if out:
                lines.append("xor.b32 piece, piece, 2;")
            registers = ", ".join(f"${out + i}" for i in range(4))
            lines.append(
                f"mad.lo.s32 at, piece, {PIECE}, here; ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{registers}}}, [at+{start}];"
            )
        return lines


@gluon.jit
def first_line_piece(base, first_row_block, thread, stride, S: gl.constexpr):
    """Where the piece lies that a thread copies first, in words; `stride` words from strip to strip."""
    PIECES: gl.constexpr = S.row_pieces
    row = thread // PIECES % STRIP
    piece = thread % PIECES ^ row // S.swizzle_rows % PIECES
    row_block = first_row_block + thread // (STRIP * PIECES)
    line = row_block.to(gl.int64) * stride + row // S.columns * (stride // (STRIP // S.columns))
    return base + line + (row % S.columns * PIECES + piece) * 4
