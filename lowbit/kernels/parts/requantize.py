"""Requantization of convolution sums as PTX: 8 columns of the accumulator -> one word of 4-bit codes or two of 8-bit ones.

formats/conv.py defines the result. A 4-bit code is the upper half of a rounded, saturated byte. One conversion instruction
saturates two values; for unsigned bytes this includes ReLU. Residual codes are converted exactly to 16-bit floats, two at a
time, then to 32 bits. This takes fewer instructions of the conversion and logic pipeline, which is the bottleneck.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.formats.conv import CODES
from lowbit.hardware.ptx import float_constant, lut
from lowbit.pack.conv_layout import GROUP, group_order

SELECT_BY_LAST = lut(lambda a, b, mask: (b & mask) | (a & ~mask))
AND_NOT = lut(lambda a, b, c: a & ~b)
AND_XOR = lut(lambda a, b, c: (a & b) ^ c)


@dataclass(frozen=True)
class Requantize:
    """Requantization to storage `y`, with a residual of the given storage or None. Without ReLU `y` must be s8."""

    y: str
    residual: str | None
    relu: bool

    @property
    def words(self) -> int:
        """Number of output words for 8 columns."""
        return CODES[self.y].bits // 4

    @property
    def residual_words(self) -> int:
        return CODES[self.residual].bits // 4 if self.residual else 0

    @property
    def constraints(self) -> str:
        """Constraints of `asm`. Outputs: words. Inputs: 8 sums, 8 s, 8 b, then the words of the residual and its factor g."""
        inputs = ["r"] * GROUP + ["f"] * 2 * GROUP + ["r"] * self.residual_words + ["f"] * (self.residual is not None)
        return ",".join(["=&r"] * self.words + inputs)

    @property
    def asm(self) -> str:
        first = self.words
        sums, s, b = ([f"${first + GROUP * part + i}" for i in range(GROUP)] for part in range(3))
        lines = [".reg .f32 t<8>, n; .reg .b32 x<8>, r, low, high;"]
        for i in range(GROUP):
            lines.append(f"cvt.rn.f32.s32 t{i}, {sums[i]}; fma.rn.f32 t{i}, t{i}, {s[i]}, {b[i]};")
        lines += self._add_residual(first + 3 * GROUP)
        lines += [f"cvt.rni.s32.f32 x{i}, t{i};" for i in range(GROUP)]
        kind = "u8" if self.y == "u4" else "s8"
        for name, i in (("low", 0), ("high", 4)):
            lines += [
                f"cvt.pack.sat.{kind}.s32.b32 {name}, x{i + 3}, x{i + 2}, 0;",
                f"cvt.pack.sat.{kind}.s32.b32 {name}, x{i + 1}, x{i}, {name};",
            ]
        lines += self._write()
        return "{\n" + "\n".join(lines) + "\n}"

    def _write(self) -> list[str]:
        """Writes the output words from the bytes in `low` (columns 0 to 3) and `high` (columns 4 to 7)."""
        if self.y == "u4":
            return [f"shr.b32 low, low, 4; lop3.b32 $0, low, high, 0xF0F0F0F0, 0x{SELECT_BY_LAST:02x};"]
        lines = []
        for i, name in enumerate(("low", "high")):
            if self.relu:  # negative bytes become 0
                lines.append(f"prmt.b32 r, {name}, 0, 0xba98; lop3.b32 {name}, {name}, r, 0, 0x{AND_NOT:02x};")
            lines.append(f"mov.b32 ${i}, {name};")
        return lines

    def _add_residual(self, first: int) -> list[str]:
        """Adds t += residual * g. Two codes at a time become 16-bit floats exactly, then 32-bit ones.

        An unsigned code n in the low bits of a half is the subnormal number n * 2^-24. The inverse of that factor, a power of
        two, is multiplied into g, so the fma rounds the same number. For a signed code n, the byte n + 128 in the low bits of
        the half 1024 gives 1152 + n, from which 1152 is subtracted.
        """
        if self.residual is None:
            return []
        g = f"${first + self.residual_words}"
        lines = [".reg .b16 h0, h1; .reg .f32 even, odd;"]
        if self.residual == "u4":  # channels c and c + 4 are in one register; codes of odd c are 4 bits higher
            pairs = [(first, c // 2, c % 2, (c, c + 4)) for c in range(4)]
            lines.append(f"mul.rn.f32 even, {g}, {float_constant(2.0**24)}; mul.rn.f32 odd, {g}, {float_constant(2.0**20)};")
        else:  # channels c and c + 2 are in one register; flipping the sign bit adds 128
            pairs = [(first + c // 4, c % 2, 0, (c, c + 2)) for c in (0, 1, 4, 5)]
            lines.append(f"mov.b32 even, {g};")
        columns = {channel: i for i, channel in enumerate(group_order(self.y))}
        for word, shifted, odd, both in pairs:
            lines.append(f"shr.u32 r, ${word}, 8;" if shifted else f"mov.b32 r, ${word};")
            if self.residual == "u4":
                lines.append(f"and.b32 r, r, 0x{0x00F000F0 if odd else 0x000F000F:08x};")
            else:
                lines.append(f"lop3.b32 r, r, 0x00FF00FF, 0x64806480, 0x{AND_XOR:02x};")
                lines.append("mov.b32 low, 0xE480E480; add.rn.f16x2 r, r, low;")
            lines.append("mov.b32 {h0, h1}, r;")
            for half, channel in zip(("h0", "h1"), both, strict=True):
                t = f"t{columns[channel]}"
                lines.append(f"cvt.f32.f16 n, {half}; fma.rn.f32 {t}, n, {'odd' if odd else 'even'}, {t};")
        return lines


@dataclass(frozen=True)
class LinkedRequantize(Requantize):
    """Also outputs the codes as bytes, 4 columns per word, as operand A of a following product. For s8 these are the stored
    words.

    For u4 a byte is 16 times the code, unsigned. s of the following product is divided by 16, so its results have the same
    bits. Without `stored` only the bytes are output.
    """

    stored: bool = True

    @property
    def words(self) -> int:
        return 3 if self.y == "u4" and self.stored else 2

    def _write(self) -> list[str]:
        if self.y != "u4":
            return super()._write()
        first = self.words - 2
        lines = [f"and.b32 ${first}, low, 0xF0F0F0F0; and.b32 ${first + 1}, high, 0xF0F0F0F0;"]
        return lines + super()._write() if self.stored else lines
