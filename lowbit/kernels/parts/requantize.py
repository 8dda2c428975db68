"""Sums of a convolution to codes, as PTX: 8 columns of the accumulator -> one word of 4-bit codes or two of 8-bit ones.

What it computes is said in kernels/conv_reference.py. A 4-bit code is cut from a rounded, saturated byte: one conversion for
two values gives rounding, ReLU and clamping. Codes of a residual become floats exactly: a byte put into the low bits of 2^23.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from lowbit.hardware.ptx import lut
from lowbit.pack.conv_weight import GROUP, group_order
from lowbit.pack.nhwc64 import CODE_BITS

SELECT_BY_LAST = lut(lambda a, b, mask: (b & mask) | (a & ~mask))
AND_NOT = lut(lambda a, b, c: a & ~b)


@dataclass(frozen=True)
class Requantize:
    """Output storage `y`, residual storage or None; without ReLU only for s8."""

    y: str
    residual: str | None
    relu: bool

    @property
    def words(self) -> int:
        """Words of output for 8 columns."""
        return CODE_BITS[self.y] // 4  # type: ignore[index]

    @property
    def residual_words(self) -> int:
        return CODE_BITS[self.residual] // 4 if self.residual else 0  # type: ignore[index]

    @property
    def constraints(self) -> str:
        """Outputs: words. Inputs: 8 sums, 8 s, 8 b, then the words of the residual and g."""
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
        if self.y == "u4":
            lines.append(f"shr.b32 low, low, 4; lop3.b32 $0, low, high, 0xF0F0F0F0, 0x{SELECT_BY_LAST:02x};")
        else:
            for i, name in enumerate(("low", "high")):
                if self.relu:  # bytes whose sign bit is set become 0
                    lines.append(f"prmt.b32 r, {name}, 0, 0xba98; lop3.b32 {name}, {name}, r, 0, 0x{AND_NOT:02x};")
                lines.append(f"mov.b32 ${i}, {name};")
        return "{\n" + "\n".join(lines) + "\n}"

    def _add_residual(self, first: int) -> list[str]:
        """t += residual * g. Code n, as an unsigned byte, in the low byte of 2^23 is 2^23 + n."""
        if self.residual is None:
            return []
        g, lines = f"${first + self.residual_words}", []
        channels = group_order(self.y)
        if self.residual == "u4":
            lines += [f"and.b32 low, ${first}, 0x0F0F0F0F; shr.b32 high, ${first}, 4; and.b32 high, high, 0x0F0F0F0F;"]
            bias, where = 8388608.0, [("high" if c % 2 else "low", c // 2) for c in channels]
        else:
            lines += [f"xor.b32 low, ${first}, 0x80808080; xor.b32 high, ${first + 1}, 0x80808080;"]
            bias, where = 8388608.0 + 128, [("high" if c >= 4 else "low", c % 4) for c in channels]
        for i, (word, byte) in enumerate(where):
            lines.append(f"prmt.b32 r, {word}, 0x4B000000, 0x{0x7650 | byte:04x}; mov.b32 n, r;")
            lines.append(f"sub.rn.f32 n, n, {_hex(bias)}; fma.rn.f32 t{i}, n, {g}, t{i};")
        return lines


def _hex(value: float) -> str:
    """A float32 constant in PTX."""
    return f"0f{struct.unpack('>I', struct.pack('>f', value))[0]:08X}"
