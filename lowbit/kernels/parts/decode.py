"""One tile of weights in registers as PTX: the words of 16 rows x 64 k -> the A operand of wgmma (parts/operand.py), scaled.

Each of the 128 threads of a warpgroup holds a row pair (g, g + 8) of its warp's strip; registers 0 to 15 are those of
four k steps of 16, in the order of hardware/mma.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.formats import IntFormat, number_format
from lowbit.hardware.conversions import Conversion, SubnormalCodes, conversion, subnormal_codes
from lowbit.hardware.fields import WORD_GROUPS
from lowbit.hardware.half import HalfType, half_pair
from lowbit.kernels.parts.gluon import gl, gluon
from lowbit.kernels.parts.operand import REGISTERS

TILE_K = 64


@dataclass(frozen=True)
class Decode:
    """Codes of `format` to fp16 or bf16, with scales per group of k (`group` 16, 32, 64, 128) or without (0).

    `zero` is "none", "integer" (w = (code - zero) * scale) or "float" (w = code * scale + zero). Every weight is rounded once.
    With `subnormal`, scales wait times 2^24 (pack/weight.py): fp16 multiplies codes as the subnormal numbers that masks leave.
    """

    format: str
    dtype: HalfType
    group: int
    zero: str
    scale_dtype: HalfType
    subnormal: bool = False

    @property
    def conversion(self) -> Conversion:
        return conversion(number_format(self.format), self.dtype)

    @property
    def bits(self) -> int:
        return self.conversion.format.bits

    @property
    def operand_type(self) -> gl.dtype:
        return gl.float16 if self.dtype == "fp16" else gl.bfloat16

    @property
    def planes(self) -> int:
        """Groups of words in which the codes of a tile are loaded; 8-bit codes have two of the same kind, one load."""
        return 1 if self.bits == 8 else len(WORD_GROUPS[self.bits])

    def plane_words(self, plane: int) -> int:
        """Words per lane and tile of a plane."""
        return 8 if self.bits == 8 else WORD_GROUPS[self.bits][plane]

    def plane_start(self, plane: int) -> int:
        """Where a plane starts within the 32 * bits words of a tile."""
        return 32 * sum(self.plane_words(before) for before in range(plane))

    @property
    def groups(self) -> int:
        """Groups of scales in a tile; 0 without."""
        return max(TILE_K // self.group, 1) if self.group else 0

    @property
    def group_words(self) -> int:
        """Words of scales and zeros of a row pair and group: (scale, scale), then (zero, zero)."""
        return 1 if self.zero == "none" else 2

    @property
    def pair_words(self) -> int:
        """Scale and zero words of two tiles, 128 k."""
        return 2 * TILE_K // self.group * self.group_words if self.group else 0

    @property
    def scale_words(self) -> int:
        """Scale and zero words of one tile."""
        return self.groups * self.group_words

    @property
    def epilogue_factor(self) -> float:
        """What a product must still be multiplied by: 2^24 where scales wait so, the shift of floats where no scale took it."""
        if self.masked:
            return 2.0**24
        return 1.0 if self.group else self.conversion.scale_factor

    @property
    def masked(self) -> bool:
        """Whether codes are multiplied as subnormal numbers."""
        return self.subnormal and self.dtype == "fp16"

    @property
    def types(self) -> tuple[gl.dtype, ...]:
        return (gl.int32,) * REGISTERS

    @property
    def constraints(self) -> str:
        return ",".join(["=&r"] * REGISTERS + ["r"] * (self.bits + self.scale_words))

    @property
    def asm(self) -> str:
        """Outputs: the 16 registers, two halves each. Inputs: the words, then for each group its scale and zero words."""
        words = [f"${REGISTERS + i}" for i in range(self.bits)]
        scales = [f"${REGISTERS + self.bits + i}" for i in range(self.scale_words)]
        fields, lines = self.conversion.fields, [f".reg .b32 a<{REGISTERS}>, s<2>, z<2>, t;"]
        program = self._subnormal_codes.program if self.masked else self.conversion.program
        for run in range(REGISTERS // fields.registers):
            inputs = words[run * fields.words :][: fields.words]
            lines.append("{ .reg .b32 " + ", ".join(program.inputs) + ";")
            lines += [f"mov.b32 {name}, {word};" for name, word in zip(program.inputs, inputs, strict=True)]
            lines.append(program.ptx())
            lines += [f"mov.b32 a{run * fields.registers + i}, {name}; " for i, name in enumerate(program.outputs)]
            lines.append("}")
        scale = self._scale_subnormal if self.masked else self._scale
        for group in range(self.groups):
            per_group = REGISTERS // self.groups
            lines += scale(scales[group * self.group_words :], range(group * per_group, (group + 1) * per_group))
        lines += [f"mov.b32 ${i}, a{i};" for i in range(REGISTERS)]
        return "{\n" + "\n".join(lines) + "\n}"

    def _scale(self, words: list[str], registers: range) -> list[str]:
        """Scales and zeros applied to some registers; register i belongs to row g for even i, g + 8 for odd i."""
        if self.dtype == "bf16" and self.scale_dtype == "fp16":
            if self.zero != "float" and self.bits <= 6:
                return self._scale_in_two_parts(words, registers)
            return self._scale_in_float32(words, registers)
        kind = "f16x2" if self.dtype == "fp16" else "bf16x2"
        lines = [*_both(words[0], "s")]
        if self.zero != "none":
            lines += _both(words[1], "z")
        if self.scale_dtype != self.dtype:  # bf16 scales, fp16 weights: exact within the range of fp16
            lines += [_bf16_to_fp16(name) for name in ("s0", "s1", *(("z0", "z1") if self.zero != "none" else ()))]
        if self.conversion.scale_factor != 1:  # fp16 only: the exponent shift of floats
            shift = half_pair(self.conversion.scale_factor, self.dtype)
            lines += [f"mov.b32 t, 0x{shift:08x};", *(f"mul.rn.{kind} s{row}, s{row}, t;" for row in (0, 1))]
        for i in registers:
            row = i % 2
            if self.zero == "float":
                lines.append(f"fma.rn.{kind} a{i}, a{i}, s{row}, z{row};")
                continue
            if self.zero == "integer":
                lines.append(f"sub.rn.{kind} a{i}, a{i}, z{row};")
            lines.append(f"mul.rn.{kind} a{i}, a{i}, s{row};")
        return lines

    @property
    def _subnormal_codes(self) -> SubnormalCodes:
        fmt = self.conversion.format
        assert isinstance(fmt, IntFormat)
        return subnormal_codes(fmt)

    def _scale_subnormal(self, words: list[str], registers: range) -> list[str]:
        """(code - offset) * scale in one fma: code * 2^(up - 24), scale * 2^(24 - up) and -offset * scale are exact."""
        codes, fmt = self._subnormal_codes, self.conversion.format
        ups = sorted({codes.up[i % len(codes.up)] for i in registers})
        lines = [f"{{ .reg .b32 f, minus<2>, {', '.join(f'up{up}_<2>' for up in ups)};", f"mov.b32 f, {words[0]};"]
        if self.scale_dtype == "bf16":
            lines.append(_PAIR_TO_FP16)
        for up in ups:
            if up:
                lines += [f"mov.b32 t, 0x{half_pair(2.0**-up, 'fp16'):08x};", "mul.rn.f16x2 t, f, t;"]
            lines += _both("t" if up else "f", f"up{up}_")
        lines += [f"mov.b32 t, 0x{half_pair(fmt.min * 2.0**-24, 'fp16'):08x};", "mul.rn.f16x2 t, f, t;", *_both("t", "minus")]
        for i in registers:
            lines.append(f"fma.rn.f16x2 a{i}, a{i}, up{codes.up[i % len(codes.up)]}_{i % 2}, minus{i % 2};")
        return [*lines, "}"]

    def _scale_in_two_parts(self, words: list[str], registers: range) -> list[str]:
        """A scale of 11 bits as bf16 high + low part: code * low has at most 5 + 3 bits and is exact, so is the sum before
        its one rounding."""
        lines = ["{ .reg .f32 f; .reg .b32 high<2>, low<2>, both; .reg .b16 h0, h1;", f"mov.b32 {{h0, h1}}, {words[0]};"]
        for row in (0, 1):
            lines += [f"cvt.f32.f16 f, h{row}; cvt.rn.bf16x2.f32 high{row}, f, f;"]
            lines += [f"and.b32 both, high{row}, 0xffff0000;", "{ .reg .f32 g; mov.b32 g, both; sub.f32 f, f, g; }"]
            lines += [f"cvt.rn.bf16x2.f32 low{row}, f, f;"]
        if self.zero == "integer":
            lines += [f"mov.b32 {{h0, h1}}, {words[1]};"]
            lines += [f"cvt.f32.f16 f, h{row}; cvt.rn.bf16x2.f32 z{row}, f, f;" for row in (0, 1)]
            lines += [f"sub.rn.bf16x2 a{i}, a{i}, z{i % 2};" for i in registers]
        for i in registers:
            lines += [f"mul.rn.bf16x2 t, a{i}, low{i % 2};", f"fma.rn.bf16x2 a{i}, a{i}, high{i % 2}, t;"]
        return [*lines, "}"]

    def _scale_in_float32(self, words: list[str], registers: range) -> list[str]:
        """fp16 scales have more digits than bf16: the product is formed in float32 and rounded once."""
        names = ["fs0", "fs1"] + (["fz0", "fz1"] if self.zero != "none" else [])
        lines = ["{ .reg .f32 fs<2>, fz<2>, lo, hi; .reg .b16 h0, h1; .reg .b32 t;"]
        for name, word in zip(("fs", "fz"), words[: len(names) // 2], strict=False):
            lines.append(f"mov.b32 {{h0, h1}}, {word}; cvt.f32.f16 {name}0, h0; cvt.f32.f16 {name}1, h1;")
        for i in registers:
            row = i % 2
            lines += [f"shl.b32 t, a{i}, 16; mov.b32 lo, t;", f"and.b32 t, a{i}, 0xffff0000; mov.b32 hi, t;"]
            for half in ("lo", "hi"):
                if self.zero == "float":
                    lines.append(f"fma.rn.f32 {half}, {half}, fs{row}, fz{row};")
                    continue
                if self.zero == "integer":
                    lines.append(f"sub.f32 {half}, {half}, fz{row};")
                lines.append(f"mul.f32 {half}, {half}, fs{row};")
            lines.append(f"cvt.rn.bf16x2.f32 a{i}, hi, lo;")
        return [*lines, "}"]


@gluon.jit
def decode(words, scales, odd: gl.constexpr, C: gl.constexpr):
    """The weights of the even or odd tile of 128 k: the registers of operand A."""
    D: gl.constexpr = C.decode
    first: gl.constexpr = D.pair_words - D.scale_words if odd else 0  # with groups of 128 both have the same scale
    own = scales[first : first + D.scale_words]
    return gl.inline_asm_elementwise(D.asm, D.constraints, words + own, dtype=D.types, is_pure=True, pack=1)


def _both(word: str, name: str) -> list[str]:
    """The two halves of a word, each in both halves of a register: name0 and name1."""
    return [f"prmt.b32 {name}0, {word}, 0, 0x1010;", f"prmt.b32 {name}1, {word}, 0, 0x3232;"]


_PAIR_TO_FP16 = (
    "{ .reg .b32 t; .reg .f32 lo, hi; shl.b32 t, f, 16; mov.b32 lo, t; and.b32 t, f, 0xffff0000; mov.b32 hi, t;"
    " cvt.rn.f16x2.f32 f, hi, lo; }"
)
"""A pair of scales, f, from bf16 to fp16."""


def _bf16_to_fp16(name: str) -> str:
    return f"{{ .reg .b32 t; .reg .f32 f; and.b32 t, {name}, 0xffff0000; mov.b32 f, t; cvt.rn.f16x2.f32 {name}, f, f; }}"
