"""One k block (128 columns of K) as PTX: 16 rows of w times some tokens; codes -> halves -> mma.sync -> group scales.

PTX ISA, "Matrix Fragments for mma.m16n8k16": the four registers of A are codes of rows g and g + 8 (lane group g), the
accumulator holds rows g and g + 8 of tokens 2t and 2t + 1 (lane t of the group).
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.formats import IntFormat, number_format
from lowbit.hardware.conversions import Conversion, conversion
from lowbit.hardware.half import HalfType
from lowbit.hardware.ptx import float_constant
from lowbit.kernels.parts.gluon import gl

BLOCK_K = 128
BLOCK_TILES = 2
"""Number of tiles (64 columns of K) in a k block."""

BLOCK_MMAS = BLOCK_K // 16
"""Number of matrix instructions along K in a k block."""

DENSE = "dense"
"""Name of the format of weights that are stored as halves, in the type of x."""


RAW_ROWS = {4: 16.0, 8: 1.0}
"""By bits of a code: the factor by which sums of raw codes are too large in rows g + 8.

A byte of 4-bit codes has the code of row g in its lower half and that of row g + 8 in its upper half. For row g the lower half
is masked. For row g + 8 the whole byte is multiplied, which is code of g + 16 * code of g + 8, and the sum of row g is
subtracted later. So 8 codes take four operations. 8-bit codes are moved to bits 0 to 7 of a half."""


@dataclass(frozen=True)
class KBlock:
    """The arithmetic of one warp for one m16 row block and one k block.

    `format` is the name of a number format, or `DENSE`, whose words are fragments already. `tokens` is a multiple of 8. `group`
    is 0 where scales are applied in the epilogue (per channel, per tensor), else 16, 32, 64 or 128. `zero` is "none", "integer"
    (w = (code - zero) * scale) or "float" (w = code * scale + zero).

    `raw`: a masked code is multiplied as the subnormal fp16 number code * 2^-24, and sums begin at -offset times the sum of x
    (`takes_raw`). This saves a third of the instructions, but needs sums of x, as zeros do. It is for kernels that compute
    these sums once for many row blocks.

    `chains`: with 2, the matrix instructions of a group are divided into two sums. Each instruction waits for the previous one
    of its sum, so two sums help kernels with few warps.
    """

    format: str
    dtype: HalfType
    tokens: int
    group: int
    zero: str
    scale_dtype: HalfType
    raw: bool = False
    chains: int = 1

    @staticmethod
    def takes_raw(fmt: str, dtype: HalfType, group: int, zero: str) -> bool:
        """Returns whether codes of a format can be raw. They must be symmetric integers of 8 bits, or of 4 bits with group
        scales, which undo the factors RAW_ROWS. x must be fp16, since products of bf16's subnormal numbers would leave
        float32's range."""
        if fmt == DENSE or dtype != "fp16" or zero != "none":
            return False
        number = number_format(fmt)
        return isinstance(number, IntFormat) and number.signed and (number.bits == 8 or (number.bits == 4 and group > 0))

    @property
    def conversion(self) -> Conversion:
        return conversion(number_format(self.format), self.dtype)

    @property
    def dense(self) -> bool:
        """True if the words read from the ring are fragments, without dequantization."""
        return self.format == DENSE

    @property
    def bits(self) -> int:
        return 16 if self.dense else self.conversion.format.bits

    @property
    def factor(self) -> float:
        """Factor by which converted codes are too small."""
        if self.raw:
            return 2.0**24
        return 1.0 if self.dense else self.conversion.scale_factor

    @property
    def words(self) -> int:
        """Number of words of codes per lane."""
        return BLOCK_TILES * self.bits

    @property
    def groups(self) -> int:
        """Number of scale groups in a k block; 0 without group scales."""
        return BLOCK_K // self.group if self.group else 0

    @property
    def pair_bytes(self) -> int:
        """Bytes of scales (and zeros) of the two rows of a lane group, for one scale group."""
        return (4 if self.zero == "none" else 8) if self.group else 0

    @property
    def scale_words(self) -> int:
        """Number of words of scales and zeros per lane."""
        return self.groups * self.pair_bytes // 4

    @property
    def n8_tiles(self) -> int:
        """Number of n8 tiles of tokens."""
        return self.tokens // 8

    @property
    def token_words(self) -> int:
        """Number of words of x per lane."""
        return 2 * BLOCK_MMAS * self.n8_tiles

    @property
    def accumulators(self) -> int:
        """Number of accumulators per lane."""
        return 4 * self.n8_tiles

    @property
    def sums(self) -> int:
        """Number of sums of x per lane, over all groups; zero points and raw codes need them. For zero points these are the
        sums of two tokens per n8 tile and group. For raw codes they are the initial values of accumulators: for rows g and g +
        8 of two tokens."""
        if self.raw:
            return self.accumulators * max(self.groups, 1)
        return 2 * self.n8_tiles * max(self.groups, 1) if self.zero != "none" else 0

    @property
    def raw_offsets(self) -> tuple[int, int]:
        """Offsets of raw codes of rows g and of rows g + 8. Sums of raw codes begin at -offset * 2^-24 times the sum of x."""
        offset = 1 << (self.bits - 1)
        return offset, offset * 17 if self.bits == 4 else offset

    # ---- operands of the PTX, in order

    @property
    def types(self) -> tuple[gl.dtype, ...]:
        return (gl.float32,) * self.accumulators

    @property
    def sum_types(self) -> tuple[gl.dtype, ...]:
        return (gl.float32,) * self.sums

    @property
    def constraints(self) -> str:
        integers = self.words + self.token_words + self.scale_words
        return ",".join(["=&f"] * self.accumulators + ["r"] * integers + ["f"] * (self.sums + self.accumulators))

    @property
    def sum_constraints(self) -> str:
        return ",".join(["=&f"] * self.sums + ["r"] * self.token_words)

    @property
    def asm(self) -> str:
        """PTX of a k block. Outputs: accumulators. Inputs: words of codes, words of x, scale words, sums of x, accumulators."""
        operand = operands_of(self.accumulators, self.words, self.token_words, self.scale_words, self.sums, self.accumulators)
        out, words, x, scales, sums, acc = operand
        per_group = BLOCK_MMAS // max(self.groups, 1)
        lines = [".reg .b32 a<32>;", f".reg .f32 p<{self.accumulators}>;", ".reg .f32 s<2>, z<2>, t, nil;"]
        lines.append("mov.f32 nil, 0f00000000;")
        if self.chains > 1:
            lines.append(f".reg .f32 q<{self.accumulators}>;")
        lines += self._convert_raw(words) if self.raw else self._convert(words)
        for group in range(max(self.groups, 1)):
            if self.raw and not self.groups:
                lines += [f"add.f32 p{i}, {sums[i]}, {acc[i]};" for i in range(self.accumulators)]
            for inside in range(per_group):
                step, chain = group * per_group + inside, inside % self.chains
                for n8_tile in range(self.n8_tiles):
                    part = [f"{'pq'[chain]}{4 * n8_tile + i}" for i in range(4)]
                    start = ["nil"] * 4 if self.groups or chain else acc[4 * n8_tile : 4 * n8_tile + 4]
                    if self.raw and chain == 0:
                        first = self.accumulators * group + 4 * n8_tile
                        start = sums[first : first + 4] if self.groups else part
                    start = part if inside >= self.chains else start
                    a = [f"a{4 * step + i}" for i in range(4)]
                    b = x[16 * n8_tile + 2 * step : 16 * n8_tile + 2 * step + 2]
                    lines.append(mma(self.dtype, part, a, b, start))
            if self.chains > 1:
                lines += [f"add.f32 p{i}, p{i}, q{i};" for i in range(self.accumulators)]
            if self.raw and self.bits == 4:
                lines += [f"sub.f32 p{i + 2}, p{i + 2}, p{i};" for i in range(self.accumulators) if i % 4 < 2]
            if self.groups:
                lines += self._scale(group, out, scales, sums, acc)
        if not self.groups:
            lines += [f"mov.f32 {register}, p{i};" for i, register in enumerate(out)]
        return "{\n" + "\n".join(lines) + "\n}"

    @property
    def sum_asm(self) -> str:
        """PTX that sums x over each scale group, or over the k block, by matrix instructions. Their operand A is all ones for
        zero points, and -offset * 2^-24 for raw codes. Outputs: sums of x. Inputs: words of x."""
        out, x = operands_of(self.sums, self.token_words)
        groups = max(self.groups, 1)
        per_group, per_tile = BLOCK_MMAS // groups, 4 if self.raw else 2
        one = 0x3C00 if self.dtype == "fp16" else 0x3F80
        halves = [0x8000 + offset for offset in self.raw_offsets] if self.raw else [one, one]  # subnormal fp16 numbers
        lines = [".reg .b32 low, high; .reg .f32 p<4>, nil;", "mov.f32 nil, 0f00000000;"]
        lines += [f"mov.b32 {name}, {half * 0x10001:#010x};" for name, half in zip(("low", "high"), halves, strict=True)]
        if self.chains > 1:
            lines.append(".reg .f32 q<4>;")
        for group in range(groups):
            for n8_tile in range(self.n8_tiles):
                for inside in range(per_group):
                    step, part = group * per_group + inside, [f"{'pq'[inside % self.chains]}{i}" for i in range(4)]
                    b = x[16 * n8_tile + 2 * step : 16 * n8_tile + 2 * step + 2]
                    start = part if inside >= self.chains else ["nil"] * 4
                    lines.append(mma(self.dtype, part, ["low", "high", "low", "high"], b, start))
                if self.chains > 1:
                    lines += [f"add.f32 p{i}, p{i}, q{i};" for i in range(per_tile)]
                first = per_tile * (group * self.n8_tiles + n8_tile)
                lines += [f"mov.f32 {out[first + i]}, p{i};" for i in range(per_tile)]
        return "{\n" + "\n".join(lines) + "\n}"

    def _convert(self, words: list[str]) -> list[str]:
        """Converts codes into registers a0 to a31, four for each of the 8 matrix instructions."""
        if self.dense:
            return [f"mov.b32 a{i}, {word};" for i, word in enumerate(words)]
        c, lines = self.conversion, []
        program = c.program
        for run in range(len(words) // c.fields.words):
            inputs = words[run * c.fields.words :][: c.fields.words]
            lines.append("{ .reg .b32 " + ", ".join(program.inputs) + ";")
            lines += [f"mov.b32 {name}, {word};" for name, word in zip(program.inputs, inputs, strict=True)]
            lines.append(program.ptx())
            lines += [f"mov.b32 a{run * c.registers + i}, {name};" for i, name in enumerate(program.outputs)]
            lines.append("}")
        return lines

    def _convert_raw(self, words: list[str]) -> list[str]:
        """As `_convert`, for raw codes."""
        lines = []
        for i, word in enumerate(words):
            if self.bits == 8:
                lines.append(f"and.b32 a{2 * i}, {word}, 0x00ff00ff; prmt.b32 a{2 * i + 1}, {word}, 0, 0x4341;")
                continue
            lines.append(f"and.b32 a{4 * i}, {word}, 0x000f000f; and.b32 a{4 * i + 1}, {word}, 0x00ff00ff;")
            lines.append(f"prmt.b32 a{4 * i + 3}, {word}, 0, 0x4341; and.b32 a{4 * i + 2}, a{4 * i + 3}, 0x000f000f;")
        return lines

    def _scale(self, group: int, out: list[str], scales: list[str], sums: list[str], acc: list[str]) -> list[str]:
        """Adds the group's sums times its scales to the accumulators. Of a lane's 4 accumulators per n8 tile, number i is in
        row g + 8 * (i // 2)."""
        words = scales[group * self.pair_bytes // 4 :][: self.pair_bytes // 4]
        lines = _widen("s", words[0], self.scale_dtype)
        if self.raw and RAW_ROWS[self.bits] != 1:
            lines.append(f"mul.f32 s1, s1, {float_constant(1 / RAW_ROWS[self.bits])};")
        if self.zero != "none":
            lines += _widen("z", words[1], self.scale_dtype)
            if self.factor != 1:  # the epilogue multiplies all sums by the factor; zeros are not too small
                lines += [f"mul.f32 z{row}, z{row}, {float_constant(1 / self.factor)};" for row in (0, 1)]
        for n8_tile in range(self.n8_tiles):
            for i in range(4):
                index, row = 4 * n8_tile + i, i // 2
                part, before = f"p{index}", acc[index] if group == 0 else out[index]
                if self.zero == "none":
                    lines.append(f"fma.rn.f32 {out[index]}, {part}, s{row}, {before};")
                    continue
                total = sums[2 * (group * self.n8_tiles + n8_tile) + i % 2]
                if self.zero == "integer":
                    lines += [f"neg.f32 t, z{row};", f"fma.rn.f32 t, t, {total}, {part};"]
                    lines.append(f"fma.rn.f32 {out[index]}, t, s{row}, {before};")
                else:
                    lines += [f"fma.rn.f32 t, z{row}, {total}, {before};", f"fma.rn.f32 {out[index]}, {part}, s{row}, t;"]
        return lines


def operands_of(*counts: int) -> list[list[str]]:
    """Returns operand names $0, $1, ... in groups of the given sizes."""
    groups, first = [], 0
    for count in counts:
        groups.append([f"${first + i}" for i in range(count)])
        first += count
    return groups


def mma(dtype: HalfType, d: list[str], a: list[str], b: list[str], c: list[str]) -> str:
    """Returns the PTX instruction mma.sync m16n8k16 for the given registers of its four operands."""
    kind = "f16" if dtype == "fp16" else "bf16"
    registers = ", ".join("{" + ", ".join(group) + "}" for group in (d, a, b, c))
    return f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {registers};"


def _widen(name: str, word: str, dtype: HalfType) -> list[str]:
    """Converts both halves of a word to the float32 registers name0 and name1."""
    if dtype == "fp16":
        return [
            "{ .reg .b16 lo, hi;",
            f"mov.b32 {{lo, hi}}, {word};",
            f"cvt.f32.f16 {name}0, lo;",
            f"cvt.f32.f16 {name}1, hi; }}",
        ]
    return [
        "{ .reg .b32 lo, hi;",
        f"shl.b32 lo, {word}, 16; and.b32 hi, {word}, 0xffff0000;",
        f"mov.b32 {name}0, lo; mov.b32 {name}1, hi; }}",
    ]
