"""32 tokens of packed keys and values as PTX: words (pack/kv_pages.py) -> halves -> mma.sync, for up to 8 query heads.

Both products have the packed codes as operand A, so none of its rows is padding: s^T [tokens, heads] = K q^T and y^T
[elements, heads] += V^T p^T. Codes become halves without arithmetic. A masked integer code is the subnormal number code *
2^-24, or code * 2^-20 for 4-bit codes that are 4 bits higher in their half. Offsets of integer codes are subtracted from sums.
The bits of an e4m3 code, moved to the exponent and mantissa of fp16, are the value * 2^-8. No code becomes an infinity or NaN,
so memory that was never written does no harm where a token has weight 0. Below, lane 4g + t is in lane group g and has index t
in it.
Source  "Matrix Fragments for mma.m16n8k16" and movmatrix: PTX ISA; tests: tests/kernels/parts/test_kv_block.py
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from lowbit.formats import number_format
from lowbit.hardware.conversions import subnormal_codes
from lowbit.hardware.ptx import Builder, Program
from lowbit.kernels.parts.gluon import gl
from lowbit.kernels.parts.k_block import mma, operands_of

HEADS = 8
"""Number of query heads in operand B."""

BLOCK = 32
"""Number of tokens of a block."""

OCTETS = BLOCK // 8
"""Number of groups of 8 tokens; a lane has one token of each in operand A of the scores."""

ONES = "0x3c003c00"
"""Two halves of 1."""


@functools.cache
def code_program(fmt: str) -> Program:
    """Returns the program that converts a word to registers of two halves, register j from field j of both halves of the
    word."""
    if fmt == "int4":
        return subnormal_codes(number_format("uint4"), "fp16").program
    b = Builder(["w"])
    if fmt == "int8":
        return b.build([b.mask("w", 0x00FF00FF), b.prmt("w", b.constant(0), 0x4341)])
    low = b.masked_or(b.shift("w", -8), 0x80008000, b.mask(b.shift("w", -7), 0x3F803F80))
    high = b.masked_or("w", 0x80008000, b.mask(b.shift("w", 1), 0x3F803F80))
    return b.build([low, high])


@dataclass(frozen=True)
class KVBlock:
    """The arithmetic of one warp for a block of 32 tokens: formats of keys and values ("fp8", "int8", "int4") and the padded
    number of elements of a head, a multiple of 32."""

    k: str
    v: str
    head_dim: int

    @property
    def chunks(self) -> int:
        """Number of groups of 32 elements of a head."""
        return self.head_dim // 32

    @property
    def q_words(self) -> int:
        """Number of words of q per lane: 8 elements of each chunk, of one head."""
        return 4 * self.chunks

    @property
    def k_vectors(self) -> int:
        """Number of 16-byte vectors of keys per lane."""
        return self._words(self.k) // 4

    @property
    def v_vectors(self) -> int:
        """Number of 16-byte vectors of values per lane."""
        return self._words(self.v) // 4

    @property
    def accumulators(self) -> int:
        """Number of accumulators of y per lane: elements 16i + g and 16i + 8 + g of heads 2t and 2t + 1, for each i."""
        return self.head_dim // 4

    @property
    def score_factor(self) -> float:
        """Factor by which scores are too small."""
        return 2.0**8 if self.k == "fp8" else 2.0**24

    @property
    def q_odd(self) -> float:
        """Factor for the odd words of q. With int4, the codes that they are multiplied by are 16 times too large."""
        return 1 / 16 if self.k == "int4" else 1.0

    @property
    def v_offset(self) -> float:
        """The number that is subtracted from codes of values; 0 for fp8."""
        return {"fp8": 0.0, "int8": 128.0, "int4": 7.5}[self.v]

    def value_factor(self, i: int) -> float:
        """Factor by which accumulator i is too small."""
        if self.v == "fp8":
            return 2.0**8
        return 2.0**20 if self.v == "int4" and i % 4 >= 2 else 2.0**24

    # ---- loads

    def load_asm(self, vectors: int) -> str:
        """PTX that loads a lane's words and the scales of its 4 tokens. Outputs: words, 2 words of scales. Inputs: address of
        the words, address of the scales, 1 to load or 0 to leave all outputs undefined. Vectors are 512 bytes apart."""
        words, scales, (at, scales_at, some) = operands_of(4 * vectors, 2, 3)
        lines = [".reg .pred some;", f"setp.ne.s32 some, {some}, 0;"]
        lines += [f"@some ld.global.L1::no_allocate.v2.b32 {{{', '.join(scales)}}}, [{scales_at}];"]
        for i in range(vectors):
            vector = ", ".join(words[4 * i : 4 * i + 4])
            lines.append(f"@some ld.global.L1::no_allocate.v4.b32 {{{vector}}}, [{at}+{512 * i}];")
        return "{\n" + "\n".join(lines) + "\n}"

    def load_constraints(self, vectors: int) -> str:
        """Inline-assembly constraints of the operands of `load_asm`."""
        return ",".join(["=&r"] * (4 * vectors + 2) + ["l", "l", "r"])

    def load_types(self, vectors: int) -> tuple[gl.dtype, ...]:
        """Types of the outputs of `load_asm`."""
        return (gl.int32,) * (4 * vectors + 2)

    # ---- scores

    @property
    def score_constraints(self) -> str:
        return ",".join(["=&f"] * (2 * OCTETS) + ["r"] * (4 * self.k_vectors + self.q_words) + ["f"] * 2)

    @property
    def score_types(self) -> tuple[gl.dtype, ...]:
        return (gl.float32,) * (2 * OCTETS)

    @property
    def score_asm(self) -> str:
        """PTX of K q^T. Outputs: scores of token 8r + g and heads 2t, 2t + 1, by r. Inputs: words of keys, words of q, the
        accumulators' first values for both heads (`start_asm`)."""
        out, words, q, start = operands_of(2 * OCTETS, 4 * self.k_vectors, self.q_words, 2)
        lines = [f".reg .f32 s<{2 * OCTETS}>;"]
        for step in range(2 * self.chunks):
            fields = {r: f"w{r}_" for r in range(OCTETS)}
            lines.append("{")
            for r, prefix in fields.items():
                lines += self._fields(self.k, words, r, step, prefix)
            for tile in range(2):
                a = [f"w{2 * tile + row}_{field}" for field in (0, 1) for row in (0, 1)]
                d = [f"s{4 * tile + i}" for i in range(4)]
                lines.append(mma("fp16", d, a, q[2 * step : 2 * step + 2], d if step else start * 2))
            lines.append("}")
        lines += [f"mov.f32 {register}, s{i};" for i, register in enumerate(out)]
        return "{\n" + "\n".join(lines) + "\n}"

    @property
    def start_constraints(self) -> str:
        return ",".join(["=&f"] * 2 + ["r"] * self.q_words)

    @property
    def start_asm(self) -> str:
        """PTX that returns the initial values of the accumulators of scores for heads 2t and 2t + 1: the negative of the codes'
        offset times the sum of q. Inputs: words of q."""
        out, q = operands_of(2, self.q_words)
        if self.k == "fp8":
            return "{\n" + "\n".join(f"mov.f32 {register}, 0f00000000;" for register in out) + "\n}"
        lines = [".reg .b32 c<2>; .reg .f32 s<4>, nil;", "mov.f32 nil, 0f00000000;"]
        for i, constant in enumerate(("0x00080008", "0x00800080") if self.k == "int4" else ("0x00800080",) * 2):
            lines.append(f"mov.b32 c{i}, {constant};")
        for step in range(2 * self.chunks):
            d = [f"s{i}" for i in range(4)]
            lines.append(mma("fp16", d, ["c0", "c0", "c1", "c1"], q[2 * step : 2 * step + 2], d if step else ["nil"] * 4))
        factor = "0fBF700000" if self.k == "int4" else "0fBF800000"  # -7.5 / 8, -1
        lines += [f"mul.f32 {register}, s{i}, {factor};" for i, register in enumerate(out)]
        return "{\n" + "\n".join(lines) + "\n}"

    # ---- values

    @property
    def value_constraints(self) -> str:
        floats = self.accumulators + 2
        return ",".join(["=&f"] * floats + ["r"] * (4 * self.v_vectors + OCTETS) + ["f"] * (2 + floats))

    @property
    def value_types(self) -> tuple[gl.dtype, ...]:
        return (gl.float32,) * (self.accumulators + 2)

    @property
    def value_asm(self) -> str:
        """PTX of y = y * fade + V^T p^T. Outputs: accumulators, sums of p of heads 2t and 2t + 1. Inputs: words of values, p of
        head g and tokens 8r + 2t and 8r + 2t + 1 by r, factors `fade` of heads 2t and 2t + 1, the previous outputs."""
        floats = self.accumulators + 2
        out, words, p, fade, before = operands_of(floats, 4 * self.v_vectors, OCTETS, 2, floats)
        lines = [f"mul.f32 {register}, {before[i]}, {fade[i % 2]};" for i, register in enumerate(out)]
        for tile in range(2):
            b = p[2 * tile : 2 * tile + 2]
            for pair in range(2 * self.chunks):
                lines.append("{")
                for row in (0, 1):
                    lines += self._fields(self.v, words, 2 * tile + row, pair, f"w{row}_")
                a = [f"w{row}_{field}" for row in (0, 1) for field in (0, 1)]
                d = out[4 * pair : 4 * pair + 4]
                lines += [mma("fp16", d, a, b, d), "}"]
            if self.v_offset:
                lines.append("{ .reg .b32 one; .reg .f32 nil, low, high;")
                lines += [f"mov.b32 one, {ONES};", "mov.f32 nil, 0f00000000;"]
                lines += [mma("fp16", [*out[-2:], "low", "high"], ["one"] * 4, b, [*out[-2:], "nil", "nil"]), "}"]
        return "{\n" + "\n".join(lines) + "\n}"

    # ---- parts

    def _words(self, fmt: str) -> int:
        return OCTETS * self.chunks * (1 if fmt == "int4" else 2)

    def _fields(self, fmt: str, words: list[str], octet: int, step: int, prefix: str) -> Iterator[str]:
        """Converts the codes of an octet of tokens and 16 elements, half a chunk, to the registers `prefix`0 and `prefix`1."""
        program = code_program(fmt)
        if fmt == "int4":
            word, outputs = words[octet * self.chunks + step // 2], program.outputs[2 * (step % 2) :][:2]
        else:
            word, outputs = words[octet * 2 * self.chunks + step], program.outputs
        yield f".reg .b32 {prefix}0, {prefix}1;"
        (name,) = program.inputs
        yield f"{{ .reg .b32 {name}; mov.b32 {name}, {word};"
        yield program.ptx()
        yield from (f"mov.b32 {prefix}{i}, {output};" for i, output in enumerate(outputs))
        yield "}"
