"""Conversions of codes to halves that the library does not use, as data: executed bit-exactly in NumPy, printed as PTX.

Each is a `Way`: a `Conversion` (hardware/conversions.py), which replaces the library's own one in `Decoding` and `Stepping`,
and the layout of the words in memory that it needs.

cast, float32   What a compiler generates for a cast of signed integers: extract two fields, two `cvt`, one pack. `cast`
                converts directly, `float32` by way of float32, with one rounding of the pair.
multiplied      fp6 whose exponent bias is corrected by one multiplication per register instead of by the scale.
rebuilt         fp6 whose exponent bias is corrected in integers: 12 is added to the exponent of normal numbers; subnormal
                numbers take a subtraction.
4+2             FP6-LLM's layout: sign and exponent of a code are in one word, its mantissa in another. Four codes are
                assembled in the four bytes of a register and cast there; the result becomes two registers of fp16.
                Written from its description, arXiv:2401.14112.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from lowbit.formats import number_format
from lowbit.hardware.conversions import Conversion, conversion
from lowbit.hardware.fields import FieldOrder
from lowbit.hardware.half import HalfType, half_pair
from lowbit.hardware.mma import MMA_M16N8K16_F16
from lowbit.hardware.ptx import Builder, Instruction, Program, Words, lut
from lowbit.kernels.parts.dequantize import Dequantizer
from lowbit.kernels.parts.k_block import BLOCK_MMAS, KBlock, mma, operands_of
from lowbit.pack.fragment import FragmentOrder

OWN = "own"
"""Name of the library's conversion of any format."""


@dataclass(frozen=True)
class Way:
    """A named conversion. Words in memory hold codes in the bit positions of its fields, with the bits of `flip` inverted."""

    name: str
    conversion: Conversion
    flip: int = 0

    def plane(self, codes: Tensor) -> Tensor:
        """Packs codes [N, K] into the words of pack/fragment.py for this conversion."""
        c = self.conversion
        (plane,) = _Order(MMA_M16N8K16_F16, c.format, order=c.fields).pack(codes, c.format.bits)
        return plane ^ _signed(self.flip)


@dataclass(frozen=True)
class _Order(FragmentOrder):
    """Fragment order with a different order of bit fields in a lane's words."""

    order: FieldOrder = field(kw_only=True)

    def fields(self, bits: int) -> FieldOrder:
        return self.order


@dataclass(frozen=True)
class Decoding(Dequantizer):
    """The library's `Dequantizer` of a tile, with another conversion."""

    by: Conversion = field(kw_only=True)

    @property
    def conversion(self) -> Conversion:
        return self.by


@dataclass(frozen=True)
class Stepping(KBlock):
    """The k block of the library's small-M kernel, with another conversion."""

    by: Conversion = field(kw_only=True)

    @property
    def conversion(self) -> Conversion:
        return self.by


@dataclass(frozen=True)
class ScaledFirst(KBlock):
    """A k block whose group scales multiply the fp16 weights before the product, not the sums after it. Stored scales may be
    close to 2^16 (pack/weight.py), so they are multiplied by 2^-16.
    """

    @property
    def factor(self) -> float:
        return super().factor * 2.0**16

    @property
    def asm(self) -> str:
        out, words, x, scales, _, acc = operands_of(
            self.accumulators, self.words, self.token_words, self.scale_words, self.sums, self.accumulators
        )
        if not self.groups or self.zero != "none" or self.scale_dtype != "fp16" or self.dtype != "fp16":
            raise ValueError(f"scales before the product are measured in fp16, by groups and without zeros, not {self}")
        lines = [".reg .b32 a<32>, small, s<2>;", f"mov.b32 small, 0x{half_pair(2.0**-16, 'fp16'):08x};", *self._convert(words)]
        for group in range(self.groups):
            lines += [f"mul.rn.f16x2 s0, {scales[group]}, small;", "prmt.b32 s1, s0, 0, 0x3232; prmt.b32 s0, s0, 0, 0x1010;"]
            share = 4 * BLOCK_MMAS // self.groups
            lines += [f"mul.rn.f16x2 a{i}, a{i}, s{i % 2};" for i in range(group * share, (group + 1) * share)]
        for step in range(BLOCK_MMAS):
            a = [f"a{4 * step + i}" for i in range(4)]
            for n8_tile in range(self.n8_tiles):
                sums = out[4 * n8_tile : 4 * n8_tile + 4]
                b = x[16 * n8_tile + 2 * step : 16 * n8_tile + 2 * step + 2]
                lines.append(mma(self.dtype, sums, a, b, sums if step else acc[4 * n8_tile : 4 * n8_tile + 4]))
        return "{\n" + "\n".join(lines) + "\n}"


# ---- the conversions


@functools.cache
def ways(fmt: str, dtype: HalfType) -> tuple[Way, ...]:
    """Returns the compared conversions of int4, int8 or fp6_e3m2 (fp6 to fp16 only), the library's first."""
    own = Way(OWN, conversion(number_format(fmt), dtype))
    if fmt == "fp6_e3m2":
        return own, _multiplied(own.conversion), _rebuilt(own.conversion), _four_plus_two(own.conversion)
    return own, *(_cast(own.conversion, name, name == "float32") for name in ("cast", "float32"))


def nothing(fmt: str, dtype: HalfType) -> Conversion:
    """Returns the empty conversion, whose registers are the words. It measures the cost of a loop."""
    number = number_format(fmt)
    words = [f"w{i}" for i in range(number.bits)]
    fields = FieldOrder(number.bits, 16, (), 16, number.bits, ())
    return Conversion(number, dtype, fields, Program(tuple(words), tuple(words[i % len(words)] for i in range(16)), ()), 1.0)


@dataclass(frozen=True)
class Cast(Instruction):
    """Casts two signed fields of `width` bits, at bit `low` and 16 bits above it, to 16-bit floats."""

    dest: str
    a: str
    low: int
    width: int
    dtype: HalfType
    by_float32: bool
    opcode = "cvt"

    @property
    def min_sm(self) -> int:  # type: ignore[override]
        return 90 if self.dtype == "bf16" and not self.by_float32 else 80

    def evaluate(self, *values: Words) -> Words:
        (word,) = values
        halves = []
        for low in (self.low, self.low + 16):
            number = (word << np.uint32(32 - self.width - low)).view(np.int32) >> np.int32(32 - self.width)
            bits = number.astype(np.float16).view(np.uint16) if self.dtype == "fp16" else _bf16_bits(number)
            halves.append(bits.astype(np.uint32))
        return halves[0] | halves[1] << np.uint32(16)

    def ptx(self) -> str:
        half = "f16" if self.dtype == "fp16" else "bf16"
        cut = [f"bfe.s32 x{i}, {self.a}, {self.low + 16 * i}, {self.width};" for i in (0, 1)]
        if self.by_float32:
            text = ["{ .reg .b32 x<2>; .reg .f32 f<2>;", *cut, *(f"cvt.rn.f32.s32 f{i}, x{i};" for i in (0, 1))]
            return " ".join([*text, f"cvt.rn.{half}x2.f32 {self.dest}, f1, f0; }}"])
        text = ["{ .reg .b32 x<2>; .reg .b16 h<2>;", *cut, *(f"cvt.rn.{half}.s32 h{i}, x{i};" for i in (0, 1))]
        return " ".join([*text, f"mov.b32 {self.dest}, {{h0, h1}}; }}"])


def _bf16_bits(number: np.ndarray) -> np.ndarray:
    return number.astype(np.float32).view(np.uint32) >> np.uint32(16)


def _cast(own: Conversion, name: str, by_float32: bool) -> Way:
    """Returns the conversion by casts. Words hold two's complement, that is codes with an inverted top bit."""
    bits = own.format.bits
    instructions = tuple(
        Cast(f"r{r}", f"w{r // (16 // bits)}", bits * (r % (16 // bits)), bits, own.dtype, by_float32)
        for r in range(own.registers)
    )
    program = Program(own.program.inputs, tuple(each.dest for each in instructions), instructions)
    flip = sum(1 << i for i in range(bits - 1, 32, bits))
    return Way(name, dataclasses.replace(own, program=program, scale_factor=1.0), flip)


def _followed(own: Conversion, after: Callable[[Builder, str], str]) -> Program:
    """Appends instructions for each register to the program of a conversion."""
    b = Builder(own.program.inputs, own.program.instructions)
    return b.build([after(b, register) for register in own.program.outputs])


def _multiplied(own: Conversion) -> Way:
    def after(b: Builder, register: str) -> str:
        return b.mul(own.dtype, register, b.constant(half_pair(own.scale_factor, own.dtype)))

    return Way("multiplied", dataclasses.replace(own, program=_followed(own, after), scale_factor=1.0))


def _rebuilt(own: Conversion) -> Way:
    """Returns the conversion of e3m2 that corrects the exponent bias in integers. Exponents 1 to 7 become 13 to 19. Subnormal
    numbers are m / 4 * 2^-2, computed as 2^-2 (1 + m / 4) - 2^-2."""

    def after(b: Builder, register: str) -> str:
        carried = b.add_words(b.mask(register, 0x1C001C00), 0x7C007C00)  # sets the top bit unless the exponent is 0
        normal = b.prmt(carried, 0, 0xBB99)  # replicates that bit over the 16 bits
        least = b.masked_or(register, 0x80008000, 0x34003400)
        subnormal = b.sub(own.dtype, b.lop3(register, 0x34003400, 0, OR), least)
        return b.select(normal, b.add_words(register, 0x30003000), subnormal)

    return Way("rebuilt", dataclasses.replace(own, program=_followed(own, after), scale_factor=1.0))


class _FourPlusTwo(FieldOrder):
    """The bit positions of 4+2 segments, converted in 8 steps of 4 codes. Word i < 4 has the signs and exponents of steps 2 i
    and 2 i + 1; word 4 + i has the mantissas of steps 4 i to 4 i + 3. Step s fills two registers: register 2 s with the codes
    in bytes 1 and 3, register 2 s + 1 with those in bytes 0 and 2."""

    @property
    def places(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        found = []
        for register in range(self.registers):
            step, byte = register // 2, 8 * (1 - register % 2)
            high, low = byte + 4 * (1 - step % 2), byte + 6 - 2 * (step % 4)
            found.append(((4 + step // 4, low), (4 + step // 4, low + 1), *((step // 2, high + i) for i in range(4))))
        return tuple(found)


def _four_plus_two(own: Conversion) -> Way:
    b = Builder([f"w{i}" for i in range(6)])
    outputs: list[str] = []
    for step in range(8):
        high = b.mask(b.shift(f"w{step // 2}", -4 * (step % 2)), 0xF0F0F0F0)
        code = b.masked_or(b.shift(f"w{4 + step // 4}", 4 - 2 * (step % 4)), 0x0C0C0C0C, high)
        sign = b.mask(code, 0x80808080)
        cast = b.masked_or(b.shift(code, 2), 0x1F1F1F1F, sign)
        outputs += [b.mask(cast, 0xFF00FF00), b.mask(b.shift(cast, -8), 0xFF00FF00)]
    fields = _FourPlusTwo(6, 16, (), 16, 6, ())
    return Way("4+2", dataclasses.replace(own, fields=fields, program=b.build(outputs)))


OR = lut(lambda a, b, c: a | b)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
