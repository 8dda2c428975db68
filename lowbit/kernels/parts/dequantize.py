"""Dequantization of one tile as PTX: the words of 16 rows x 64 columns of K -> scaled operand A of wgmma or mma.sync
(parts/operand.py).

A thread, lane 4g + t of its warp, holds the row pair (g, g + 8) of the warp's m16 row block. Registers 0 to 15 belong to four
k16 steps, in the order of hardware/mma.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.formats import IntFormat, number_format
from lowbit.hardware.byte_conversions import ByteConversion
from lowbit.hardware.conversions import Conversion, SubnormalCodes, conversion, subnormal_codes
from lowbit.hardware.fields import WORD_GROUPS
from lowbit.hardware.half import HalfType, half_pair
from lowbit.hardware.ptx import Program, float_constant
from lowbit.kernels.parts.gluon import gl, gluon
from lowbit.kernels.parts.operand import REGISTERS

TILE_K = 64

_BF16_ROOM = 133 - 24
"""log2 of the ratio of the smallest subnormals of fp16 (2^-24) and bf16 (2^-133)."""

INSTRUCTION = 4
"""Number of registers of operand A of one matrix instruction."""


class CodePlanes:
    """The word groups (planes) in which the codes of a tile are loaded. 8-bit codes have two word groups of equal size, which
    are loaded as one plane."""

    types = (gl.int32,) * REGISTERS

    @property
    def conversion(self) -> Conversion | ByteConversion:
        raise NotImplementedError

    @property
    def bits(self) -> int:
        return self.conversion.format.bits

    @property
    def planes(self) -> int:
        return 1 if self.bits == 8 else len(WORD_GROUPS[self.bits])

    def plane_words(self, plane: int) -> int:
        """Number of words of a plane per lane and tile."""
        return 8 if self.bits == 8 else WORD_GROUPS[self.bits][plane]

    def plane_start(self, plane: int) -> int:
        """Offset of a plane in words within the 32 * bits words of a tile."""
        return 32 * sum(self.plane_words(before) for before in range(plane))


@dataclass(frozen=True)
class Dequantizer(CodePlanes):
    """Converts codes of `format` to fp16 or bf16, with one scale per group of 16, 32, 64 or 128 columns of K (`group`) or
    without scales (`group` 0).

    `zero` is "none", "integer" (w = (code - zero) * scale) or "float" (w = code * scale + zero). Every weight is rounded once.
    With `subnormal`, scales are stored multiplied by 2^24 (pack/weight.py). Codes are then used as the subnormal numbers that
    masking leaves: in fp16, and in bf16 where the scales are bf16 too.
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
    def operand_type(self) -> gl.dtype:
        return gl.float16 if self.dtype == "fp16" else gl.bfloat16

    @property
    def groups(self) -> int:
        """Number of scale groups in a tile; 0 without group scales."""
        return max(TILE_K // self.group, 1) if self.group else 0

    @property
    def group_words(self) -> int:
        """Number of words with scales and zeros of a row pair and group: (scale, scale), then (zero, zero) if there are
        zeros."""
        return 1 if self.zero == "none" else 2

    @property
    def pair_words(self) -> int:
        """Number of scale and zero words of two tiles (128 columns of K)."""
        return 2 * TILE_K // self.group * self.group_words if self.group else 0

    @property
    def scale_words(self) -> int:
        """Number of scale and zero words of one tile."""
        return self.groups * self.group_words

    @property
    def epilogue_factor(self) -> float:
        """Factor by which the epilogue must multiply sums: 2^24 where scales are stored multiplied by 2^24; without group
        scales, the factor by which converted codes are too small; else 1."""
        if self.masked:
            return 2.0**24
        return 1.0 if self.group else self.conversion.scale_factor

    @property
    def masked(self) -> bool:
        """True if codes are used as subnormal numbers."""
        return self.subnormal and (self.dtype == "fp16" or self.scale_dtype == "bf16")

    @property
    def constraints(self) -> str:
        return ",".join(["=&r"] * REGISTERS + ["r"] * (self.bits + self.scale_words))

    @property
    def asm(self) -> str:
        """PTX that dequantizes a tile. Outputs: the 16 registers, two halves each. Inputs: the words, then the scale and zero
        words of each group."""
        words = [f"${REGISTERS + i}" for i in range(self.bits)]
        scales = [f"${REGISTERS + self.bits + i}" for i in range(self.scale_words)]
        lines = [f".reg .b32 a<{REGISTERS}>, t;", *self._convert(words)]
        prepared, per_group = [f"f{i}" for i in range(self.prepared)], REGISTERS // max(self.groups, 1)
        for group in range(self.groups):
            lines.append(f"{{ .reg .b32 {', '.join(prepared)};")
            lines += self._prepare(scales[group * self.group_words :][: self.group_words], prepared)
            lines += [*self._scale(range(group * per_group, (group + 1) * per_group), prepared), "}"]
        lines += [f"mov.b32 ${i}, a{i};" for i in range(REGISTERS)]
        return "{\n" + "\n".join(lines) + "\n}"

    # ---- dequantization of one block at a time, for kernels that use operand A part by part

    @property
    def blocks(self) -> int:
        """Number of dequantization blocks in a tile. A block is one or more matrix instructions along K; no word has codes of
        two blocks."""
        return min(REGISTERS // self.conversion.fields.registers, REGISTERS // INSTRUCTION)

    @property
    def block_registers(self) -> int:
        return REGISTERS // self.blocks

    @property
    def block_words(self) -> int:
        """Number of words with the codes of a block; they are contiguous."""
        return self.bits // self.blocks

    def block_groups(self, block: int) -> range:
        """Indices of the scale groups that a block needs, within its tile."""
        per_group = REGISTERS // max(self.groups, 1)
        first, last = block * self.block_registers // per_group, ((block + 1) * self.block_registers - 1) // per_group
        return range(first, last + 1) if self.groups else range(0)

    def first_group(self, block: int) -> int:
        """First index of `block_groups`."""
        return self.block_groups(block).start

    def end_group(self, block: int) -> int:
        """Index after the last one of `block_groups`."""
        return self.block_groups(block).stop

    @property
    def prepared(self) -> int:
        """Number of registers with a group's prepared scales and zeros; 0 without groups."""
        return len(self._prepared) if self.group else 0

    @property
    def prepared_types(self) -> tuple[gl.dtype, ...]:
        return (gl.int32,) * self.prepared

    @property
    def prepare_constraints(self) -> str:
        return ",".join(["=&r"] * self.prepared + ["r"] * self.group_words)

    @property
    def prepare_asm(self) -> str:
        """PTX that prepares a group's scales and zeros. Outputs: its registers for `block_asm`. Inputs: its words of scales and
        zeros."""
        prepared = [f"${i}" for i in range(self.prepared)]
        words = [f"${self.prepared + i}" for i in range(self.group_words)]
        return "{\n.reg .b32 t;\n" + "\n".join(self._prepare(words, prepared)) + "\n}"

    @property
    def block_types(self) -> tuple[gl.dtype, ...]:
        return (gl.int32,) * self.block_registers

    def block_constraints(self, block: int) -> str:
        """Inline-assembly constraints of the operands of `block_asm`."""
        inputs = self.block_words + self.prepared * len(self.block_groups(block))
        return ",".join(["=&r"] * self.block_registers + ["r"] * inputs)

    def block_asm(self, block: int) -> str:
        """PTX that dequantizes a block. Outputs: its registers. Inputs: its words, then for each of its groups the outputs of
        `prepare_asm`."""
        count, groups = self.block_registers, self.block_groups(block)
        words = [f"${count + i}" for i in range(self.block_words)]
        lines = [f".reg .b32 a<{count}>, t;", *self._convert(words)]
        for i in range(len(groups)):
            prepared = [f"${count + self.block_words + i * self.prepared + j}" for j in range(self.prepared)]
            share = count // len(groups)
            lines += self._scale(range(i * share, (i + 1) * share), prepared)
        lines += [f"mov.b32 ${i}, a{i};" for i in range(count)]
        return "{\n" + "\n".join(lines) + "\n}"

    # ---- lines of PTX: a<n> are the operand's registers, t is a temporary

    def _convert(self, words: list[str]) -> list[str]:
        """Converts codes to halves in the registers a0, a1, ..."""
        program, fields = self._program, self.conversion.fields
        lines = []
        for run in range(len(words) // fields.words):
            inputs = words[run * fields.words :][: fields.words]
            lines.append("{ .reg .b32 " + ", ".join(program.inputs) + ";")
            lines += [f"mov.b32 {name}, {word};" for name, word in zip(program.inputs, inputs, strict=True)]
            lines.append(program.ptx())
            lines += [f"mov.b32 a{self.register_of(run, i)}, {name}; " for i, name in enumerate(program.outputs)]
            lines.append("}")
        return lines

    def register_of(self, run: int, output: int) -> int:
        """Index of the operand's register that holds output `output` of the conversion's run number `run`."""
        return run * self.conversion.fields.registers + output

    def output_of(self, register: int) -> int:
        """Index of the conversion's output that `register` of the operand holds."""
        return register % self.conversion.fields.registers

    @property
    def _program(self) -> Program:
        return self._subnormal_codes.program if self.masked else self.conversion.program

    @property
    def _subnormal_codes(self) -> SubnormalCodes:
        fmt = self.conversion.format
        assert isinstance(fmt, IntFormat)
        return subnormal_codes(fmt, self.dtype)

    @property
    def _in_two_parts(self) -> bool:
        """True if an fp16 scale is split into a sum of two bf16 numbers, high + low. code * low has at most 5 + 3 significant
        bits and is exact."""
        return self.dtype == "bf16" and self.scale_dtype == "fp16" and self.zero != "float" and self.bits <= 6

    @property
    def _in_float32(self) -> bool:
        """True if codes are scaled in float32, since fp16 scales have more significant bits than bf16."""
        return self.dtype == "bf16" and self.scale_dtype == "fp16" and not self._in_two_parts

    @property
    def _prepared(self) -> tuple[str, ...]:
        """Names of a group's prepared registers, for row g and row g + 8 each."""
        if self.masked:
            ups = sorted({(self._subnormal_codes.up[self.output_of(i)], i % 2) for i in range(REGISTERS)})
            return (*(f"up{up}_{row}" for up, row in ups), "minus_0", "minus_1")
        zero = () if self.zero == "none" else ("zero",)
        kinds = ("high", "low", *zero) if self._in_two_parts else ("scale", *zero)
        return tuple(f"{kind}_{row}" for kind in kinds for row in (0, 1))

    def _prepare(self, words: list[str], prepared: list[str]) -> list[str]:
        """Converts a group's words of scales and zeros to the registers `prepared`, named by `_prepared`."""
        name = dict(zip(self._prepared, prepared, strict=True))
        if self.masked:
            return self._prepare_subnormal(words[0], name)
        factors = {"scale": self.conversion.scale_factor}
        if self.zero != "none":  # converted codes are too small: an integer zero is made as small, a float zero is not
            factors["zero"] = 1 / self.conversion.scale_factor if self.zero == "integer" else 1.0
        if self._in_two_parts:
            return self._prepare_two_parts(words, name, factors)
        if self._in_float32:
            widened = (_widen(word, name, *kind) for word, kind in zip(words, factors.items(), strict=True))
            return [line for lines in widened for line in lines]
        lines = [line for word, what in zip(words, factors, strict=True) for line in _both(word, name, what)]
        if self.scale_dtype != self.dtype:  # bf16 scales, fp16 weights: exact within the range of fp16
            lines += [_bf16_to_fp16(register) for register in prepared]
        for kind, by in factors.items():
            if by != 1:
                lines.append(f"mov.b32 t, 0x{half_pair(by, self.dtype):08x};")
                lines += [self._mul(name[f"{kind}_{row}"], name[f"{kind}_{row}"], "t") for row in (0, 1)]
        return lines

    def _prepare_subnormal(self, word: str, name: dict[str, str]) -> list[str]:
        """Computes f * 2^-up (for bf16: f * 2^(109 - up)) and -offset * f * 2^-24, where f is the stored scale and `up` that of
        `SubnormalCodes`. All are exact."""
        lines = ["{ .reg .b32 f;", f"mov.b32 f, {word};"]
        if self.scale_dtype != self.dtype:
            lines.append(_PAIR_TO_FP16)
        room = 0 if self.dtype == "fp16" else _BF16_ROOM
        for up in sorted(set(self._subnormal_codes.up)):
            if room - up:
                lines += [f"mov.b32 t, 0x{half_pair(2.0 ** (room - up), self.dtype):08x};", self._mul("t", "f", "t")]
            lines += _both("t" if room - up else "f", name, f"up{up}")
        minus = half_pair(self.conversion.format.min * 2.0**-24, self.dtype)
        return [*lines, f"mov.b32 t, 0x{minus:08x};", self._mul("t", "f", "t"), *_both("t", name, "minus"), "}"]

    def _prepare_two_parts(self, words: list[str], name: dict[str, str], factors: dict[str, float]) -> list[str]:
        """Splits an fp16 scale, which has 11 significant bits, into bf16 high + low."""
        lines = ["{ .reg .f32 f; .reg .b32 both; .reg .b16 h0, h1;", f"mov.b32 {{h0, h1}}, {words[0]};"]
        for row in (0, 1):
            high, low = name[f"high_{row}"], name[f"low_{row}"]
            lines += [*_half_times(f"h{row}", factors["scale"]), f"cvt.rn.bf16x2.f32 {high}, f, f;"]
            lines += [f"and.b32 both, {high}, 0xffff0000;", "{ .reg .f32 g; mov.b32 g, both; sub.f32 f, f, g; }"]
            lines += [f"cvt.rn.bf16x2.f32 {low}, f, f;"]
        if self.zero == "integer":
            lines += [f"mov.b32 {{h0, h1}}, {words[1]};"]
            for row in (0, 1):
                lines += [*_half_times(f"h{row}", factors["zero"]), f"cvt.rn.bf16x2.f32 {name[f'zero_{row}']}, f, f;"]
        return [*lines, "}"]

    def _scale(self, registers: range, prepared: list[str]) -> list[str]:
        """Applies scales and zeros to registers; register i belongs to row g for even i, g + 8 for odd i."""
        name = dict(zip(self._prepared, prepared, strict=True))
        if self._in_float32:
            return self._scale_in_float32(registers, name)
        lines = []
        for i in registers:
            row = i % 2
            if self.masked:  # (code - offset) * scale in one fma
                up = self._subnormal_codes.up[self.output_of(i)]
                lines.append(self._fma(f"a{i}", f"a{i}", name[f"up{up}_{row}"], name[f"minus_{row}"]))
                continue
            if self.zero == "float":
                lines.append(self._fma(f"a{i}", f"a{i}", name[f"scale_{row}"], name[f"zero_{row}"]))
                continue
            if self.zero == "integer":
                lines.append(self._sub(f"a{i}", name[f"zero_{row}"]))
            if self._in_two_parts:  # code * low is exact; only the sum is rounded
                lines.append(self._mul("t", f"a{i}", name[f"low_{row}"]))
                lines.append(self._fma(f"a{i}", f"a{i}", name[f"high_{row}"], "t"))
            else:
                lines.append(self._mul(f"a{i}", f"a{i}", name[f"scale_{row}"]))
        return lines

    def _fma(self, to: str, a: str, b: str, c: str) -> str:
        return f"fma.rn.{'f16x2' if self.dtype == 'fp16' else 'bf16x2'} {to}, {a}, {b}, {c};"

    def _mul(self, to: str, a: str, b: str) -> str:
        """a * b. bf16 has only fma before sm_90; adding -0 keeps the sign of zero."""
        if self.dtype == "fp16":
            return f"mul.rn.f16x2 {to}, {a}, {b};"
        return f"{{ .reg .b32 nil; mov.b32 nil, 0x80008000; {self._fma(to, a, b, 'nil')} }}"

    def _sub(self, a: str, b: str) -> str:
        """a -= b."""
        if self.dtype == "fp16":
            return f"sub.rn.f16x2 {a}, {a}, {b};"
        return f"{{ .reg .b32 minus; mov.b32 minus, 0xbf80bf80; {self._fma(a, b, 'minus', a)} }}"

    def _scale_in_float32(self, registers: range, name: dict[str, str]) -> list[str]:
        """Scales in float32 and rounds once."""
        lines = ["{ .reg .f32 fs, fz, lo, hi;"]
        for i in registers:
            lines += [f"shl.b32 t, a{i}, 16; mov.b32 lo, t;", f"and.b32 t, a{i}, 0xffff0000; mov.b32 hi, t;"]
            lines.append(f"mov.b32 fs, {name[f'scale_{i % 2}']};")
            if self.zero != "none":
                lines.append(f"mov.b32 fz, {name[f'zero_{i % 2}']};")
            for half in ("lo", "hi"):
                if self.zero == "float":
                    lines.append(f"fma.rn.f32 {half}, {half}, fs, fz;")
                    continue
                if self.zero == "integer":
                    lines.append(f"sub.f32 {half}, {half}, fz;")
                lines.append(f"mul.f32 {half}, {half}, fs;")
            lines.append(f"cvt.rn.bf16x2.f32 a{i}, hi, lo;")
        return [*lines, "}"]


@gluon.jit
def dequantize(words, scales, odd: gl.constexpr, C: gl.constexpr):
    """Returns the registers of operand A for the even or odd tile of 128 columns of K."""
    D: gl.constexpr = C.dequantizer
    first: gl.constexpr = D.pair_words - D.scale_words if odd else 0  # with groups of 128 both tiles have the same scale
    own = scales[first : first + D.scale_words]
    return gl.inline_asm_elementwise(D.asm, D.constraints, words + own, dtype=D.types, is_pure=True, pack=1)


def _both(word: str, name: dict[str, str], kind: str) -> list[str]:
    """PTX that broadcasts each half of a word to both halves of its register. A half without a register in `name` is
    skipped."""
    halves = ((f"{kind}_0", "0x1010"), (f"{kind}_1", "0x3232"))
    return [f"prmt.b32 {name[asked]}, {word}, 0, {selector};" for asked, selector in halves if asked in name]


def _widen(word: str, name: dict[str, str], kind: str, by: float) -> list[str]:
    """PTX that converts the two fp16 halves of a word to float32 and multiplies them by `by`, a power of two."""
    lines = ["{ .reg .f32 f; .reg .b16 h0, h1;", f"mov.b32 {{h0, h1}}, {word};"]
    for row in (0, 1):
        lines += [*_half_times(f"h{row}", by), f"mov.b32 {name[f'{kind}_{row}']}, f;"]
    return [*lines, "}"]


def _half_times(half: str, by: float) -> list[str]:
    """PTX that converts an fp16 number to float32 in register f and multiplies it by `by`, a power of two."""
    return [f"cvt.f32.f16 f, {half};", *([f"mul.f32 f, f, {float_constant(by)};"] if by != 1 else [])]


_PAIR_TO_FP16 = (
    "{ .reg .b32 t; .reg .f32 lo, hi; shl.b32 t, f, 16; mov.b32 lo, t; and.b32 t, f, 0xffff0000; mov.b32 hi, t;"
    " cvt.rn.f16x2.f32 f, hi, lo; }"
)
"""Converts the pair of scales f from bf16 to fp16."""


def _bf16_to_fp16(name: str) -> str:
    return f"{{ .reg .b32 t; .reg .f32 f; and.b32 t, {name}, 0xffff0000; mov.b32 f, t; cvt.rn.f16x2.f32 {name}, f, f; }}"
