"""Small PTX instruction sequences as data. The same program can be printed for a kernel and executed bit-exactly in NumPy.

A `Program` is straight-line code over named 32-bit virtual registers, each of which is written once. There is no control flow,
no memory and no predicate. `Builder` creates a program: each of its methods appends an instruction and returns the name of the
register that it writes.

    b = Builder(["w"])
    pair = b.masked_or("w", 0x000F000F, 0x64006400)
    program = b.build([b.sub("fp16", pair, b.constant(0x64086408))])
    program.ptx()                   # text for a kernel
    program.run([words])            # the same instructions on uint32 arrays of any shape

Source of the semantics: PTX ISA, sections on lop3, prmt, shl, shr, mov and half precision floating point.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from lowbit.hardware.half import HalfType, round_half, widen_half

Words = npt.NDArray[np.uint32]
Operand = str | int
Pipe = Literal["integer", "half", "constant"]

_MASK32 = 0xFFFFFFFF


def lut(function: Callable[[int, int, int], int]) -> int:
    """Returns the immediate with which `lop3.b32` computes `function` bitwise. It is the value of the function for 0xF0, 0xCC
    and 0xAA."""
    return function(0xF0, 0xCC, 0xAA) & 0xFF


AND = lut(lambda a, b, c: a & b)
AND_OR = lut(lambda a, b, c: (a & b) | c)
AND_XOR = lut(lambda a, b, c: (a & b) ^ c)
SELECT = lut(lambda mask, a, b: (mask & a) | (~mask & b))


def float_constant(value: float) -> str:
    """Returns a float32 constant as PTX text."""
    return f"0f{struct.unpack('>I', struct.pack('>f', value))[0]:08X}"


class Instruction:
    """One instruction, which reads its operands and writes register `dest`. `ptx` prints it, `evaluate` executes it in NumPy.

    Fields `a`, `b` and `c` of a subclass are its operands: register names or 32-bit immediates. `pipe` is the hardware pipe
    that executes it. Instructions of the pipe "constant" are executed once before a kernel's loop, so they cost nothing per
    weight.
    """

    dest: str
    opcode = ""
    min_sm = 50
    pipe: ClassVar[Pipe] = "integer"

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The operands in order."""
        return tuple(getattr(self, name) for name in ("a", "b", "c") if hasattr(self, name))

    @property
    def suffix(self) -> tuple[str, ...]:
        """Trailing immediates that are not operands: a lookup table or a shift amount."""
        return ()

    def evaluate(self, *values: Words) -> Words:
        """Returns the result for operand values, which are uint32 arrays that broadcast together."""
        raise NotImplementedError

    def ptx(self) -> str:
        """Returns the instruction as one line of PTX."""
        operands = [value if isinstance(value, str) else f"0x{value:08x}" for value in self.operands]
        return f"{self.opcode} {', '.join([self.dest, *operands, *self.suffix])};"


@dataclass(frozen=True)
class Mov(Instruction):
    """`mov.b32`: copies an immediate or a register."""

    dest: str
    a: Operand
    opcode = "mov.b32"
    pipe = "constant"

    def evaluate(self, *values: Words) -> Words:
        return values[0]


@dataclass(frozen=True)
class Lop3(Instruction):
    """`lop3.b32`: any bitwise function of three words, given by its 8-bit table (see `lut`)."""

    dest: str
    a: Operand
    b: Operand
    c: Operand
    table: int
    opcode = "lop3.b32"

    @property
    def suffix(self) -> tuple[str, ...]:
        return (f"0x{self.table:02x}",)

    def evaluate(self, *values: Words) -> Words:
        result = np.zeros(np.broadcast_shapes(*(value.shape for value in values)), np.uint32)
        for row in range(8):
            if self.table >> row & 1:
                # The bits of `row`, highest first, are one combination of bits of a, b and c.
                terms = [value if row >> (2 - i) & 1 else ~value for i, value in enumerate(values)]
                result |= terms[0] & terms[1] & terms[2]
        return result


@dataclass(frozen=True)
class Prmt(Instruction):
    """`prmt.b32` in its default mode: selects four bytes out of the eight bytes of {b, a}. If bit 3 of a selector nibble is
    set, the sign bit of the byte is replicated instead."""

    dest: str
    a: Operand
    b: Operand
    selector: int
    opcode = "prmt.b32"

    @property
    def suffix(self) -> tuple[str, ...]:
        return (f"0x{self.selector:04x}",)

    def evaluate(self, *values: Words) -> Words:
        a, b = values
        result = np.zeros(np.broadcast_shapes(a.shape, b.shape), np.uint32)
        for place in range(4):
            nibble = self.selector >> (4 * place) & 0xF
            source = b if nibble & 4 else a
            byte = source >> np.uint32(8 * (nibble & 3)) & np.uint32(0xFF)
            if nibble & 8:
                byte = (byte >> np.uint32(7)) * np.uint32(0xFF)
            result |= byte << np.uint32(8 * place)
        return result


@dataclass(frozen=True)
class Shift(Instruction):
    """`shr.u32`, or `shl.b32` for a negative amount. Vacated bits are filled with zeros."""

    dest: str
    a: str
    amount: int

    @property
    def opcode(self) -> str:  # type: ignore[override]
        return "shr.u32" if self.amount > 0 else "shl.b32"

    @property
    def suffix(self) -> tuple[str, ...]:
        return (str(abs(self.amount)),)

    def evaluate(self, *values: Words) -> Words:
        amount = np.uint32(abs(self.amount))
        return values[0] >> amount if self.amount > 0 else values[0] << amount


@dataclass(frozen=True)
class Add(Instruction):
    """`add.u32`: the sum of two 32-bit words modulo 2^32."""

    dest: str
    a: Operand
    b: Operand
    opcode = "add.u32"

    def evaluate(self, *values: Words) -> Words:
        return values[0] + values[1]


@dataclass(frozen=True)
class HalfArithmetic(Instruction):
    """`add`, `sub` or `mul` on two halves, rounded to nearest even. Subnormal numbers are kept; NaN becomes 0x7fff.

    For bf16x2 these instructions need sm_90; on sm_80 `HalfFma` can replace them.
    """

    dest: str
    operation: Literal["add", "sub", "mul"]
    dtype: HalfType
    a: Operand
    b: Operand
    pipe = "half"

    @property
    def opcode(self) -> str:  # type: ignore[override]
        return f"{self.operation}.{'f16x2' if self.dtype == 'fp16' else 'bf16x2'}"

    @property
    def min_sm(self) -> int:  # type: ignore[override]
        return 53 if self.dtype == "fp16" else 90

    def evaluate(self, *values: Words) -> Words:
        a, b = (widen_half(value, self.dtype) for value in values)
        with np.errstate(invalid="ignore"):
            # Every product is exact in float64, since operands have at most 11 significant bits. So is an fp16 sum, whose
            # operands are within 41 binades. A bf16 sum may not be exact, so it has an error term.
            if self.operation == "mul":
                return round_half(a * b, np.zeros(()), self.dtype)
            return round_half(*_exact_sum(a, -b if self.operation == "sub" else b), self.dtype)


@dataclass(frozen=True)
class HalfFma(Instruction):
    """`fma.rn` on two halves: a * b + c, rounded once to nearest even. Subnormal numbers are kept; NaN becomes 0x7fff."""

    dest: str
    dtype: HalfType
    a: Operand
    b: Operand
    c: Operand
    pipe = "half"

    @property
    def opcode(self) -> str:  # type: ignore[override]
        return f"fma.rn.{'f16x2' if self.dtype == 'fp16' else 'bf16x2'}"

    @property
    def min_sm(self) -> int:  # type: ignore[override]
        return 53 if self.dtype == "fp16" else 80

    def evaluate(self, *values: Words) -> Words:
        a, b, c = (widen_half(value, self.dtype) for value in values)
        with np.errstate(invalid="ignore"):
            return round_half(*_exact_sum(a * b, c), self.dtype)


def _exact_sum(
    a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Returns the float64 sum and its exact rounding error, by Knuth's TwoSum. No operand may be near the limits of float64."""
    total = a + b
    b_part = total - a
    error = (a - (total - b_part)) + (b - b_part)
    return total, np.where(np.isfinite(total), error, 0.0)


@dataclass(frozen=True)
class Program:
    """Straight-line code. `inputs` and `outputs` are register names; every register is written exactly once.

    Raises ValueError if a register is read before it is written, if one is written twice, or if an output does not exist.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    instructions: tuple[Instruction, ...]

    def __post_init__(self) -> None:
        known = set(self.inputs)
        for instruction in self.instructions:
            missing = [name for name in instruction.operands if isinstance(name, str) and name not in known]
            if missing:
                raise ValueError(f"{instruction.ptx()} reads {missing}, which nothing wrote before")
            if instruction.dest in known:
                raise ValueError(f"{instruction.ptx()} writes {instruction.dest} a second time")
            known.add(instruction.dest)
        if unknown := set(self.outputs) - known:
            raise ValueError(f"outputs {sorted(unknown)} are written by no instruction")

    @property
    def min_sm(self) -> int:
        """The oldest SM version that has every instruction."""
        return max((instruction.min_sm for instruction in self.instructions), default=50)

    def count(self, pipe: Pipe) -> int:
        """Returns the number of instructions on a pipe."""
        return sum(instruction.pipe == pipe for instruction in self.instructions)

    def registers(self, inputs: Sequence[npt.ArrayLike]) -> dict[str, Words]:
        """Executes the program on `inputs`, uint32 arrays that broadcast together; returns the values of all registers by
        name."""
        if len(inputs) != len(self.inputs):
            raise ValueError(f"the program takes {len(self.inputs)} inputs {self.inputs}, got {len(inputs)}")
        values = {name: np.asarray(word, np.uint32) for name, word in zip(self.inputs, inputs, strict=True)}
        for instruction in self.instructions:
            operands = (
                values[operand] if isinstance(operand, str) else np.asarray(operand, np.uint32)
                for operand in instruction.operands
            )
            values[instruction.dest] = instruction.evaluate(*operands)
        return values

    def run(self, inputs: Sequence[npt.ArrayLike]) -> tuple[Words, ...]:
        """Executes the program on input words; returns the output registers, each of the inputs' common shape."""
        values = self.registers(inputs)
        shape = np.broadcast_shapes(*(values[name].shape for name in self.inputs))
        return tuple(np.broadcast_to(values[name], shape) for name in self.outputs)

    def ptx(self) -> str:
        """Returns the PTX body: declarations of all written registers, then the instructions. The caller declares the
        inputs."""
        names = [instruction.dest for instruction in self.instructions]
        lines = [f".reg .b32 {', '.join(names)};"] if names else []
        return "\n".join([*lines, *(instruction.ptx() for instruction in self.instructions)])


class Builder:
    """Creates a `Program`. An instruction that is requested twice is emitted only once, so that several uses of the same
    shifted word take one shift."""

    def __init__(self, inputs: Sequence[str], begun: Sequence[Instruction] = ()) -> None:
        """`begun`: instructions of another Builder with which the program starts."""
        self._inputs = tuple(inputs)
        self._instructions: list[Instruction] = [*begun]
        self._known: dict[tuple[Any, ...], str] = {}

    def _emit(self, kind: type[Instruction], arguments: Mapping[str, Operand]) -> str:
        key = (kind, *arguments.values())
        if key not in self._known:
            dest = f"r{len(self._instructions)}"
            self._instructions.append(kind(**{"dest": dest, **arguments}))  # type: ignore[call-arg]
            self._known[key] = dest
        return self._known[key]

    def constant(self, value: int) -> str:
        """Returns a register with a 32-bit constant. Half arithmetic needs it, since its instructions have no immediates."""
        return self._emit(Mov, {"a": value & _MASK32})

    def lop3(self, a: Operand, b: Operand, c: Operand, table: int) -> str:
        """Appends any bitwise function of three operands; `table` comes from `lut`."""
        return self._emit(Lop3, {"a": a, "b": b, "c": c, "table": table})

    def mask(self, a: Operand, mask: int) -> str:
        """Appends a & mask."""
        return self.lop3(a, mask, 0, AND)

    def masked_or(self, a: Operand, mask: int, c: Operand) -> str:
        """Appends (a & mask) | c."""
        return self.lop3(a, mask, c, AND_OR)

    def masked_xor(self, a: Operand, mask: int, c: Operand) -> str:
        """Appends (a & mask) ^ c."""
        return self.lop3(a, mask, c, AND_XOR)

    def select(self, mask: Operand, a: Operand, b: Operand) -> str:
        """Appends a selection by bits: the bit of a if the bit of the mask is set, else that of b."""
        return self.lop3(mask, a, b, SELECT)

    def prmt(self, a: Operand, b: Operand, selector: int) -> str:
        """Appends a selection of four bytes. A selector nibble of 0 to 3 is a byte of a, 4 to 7 a byte of b; adding 8
        replicates the byte's sign bit."""
        return self._emit(Prmt, {"a": a, "b": b, "selector": selector})

    def shift(self, a: str, amount: int) -> str:
        """Appends a shift of a to the right by `amount` bits, or to the left if it is negative. Vacated bits are zeros. Returns
        `a` itself if `amount` is 0."""
        if amount == 0:
            return a
        return self._emit(Shift, {"a": a, "amount": amount})

    def add_words(self, a: Operand, b: Operand) -> str:
        """Appends a + b of 32-bit words."""
        return self._emit(Add, {"a": a, "b": b})

    def add(self, dtype: HalfType, a: Operand, b: Operand) -> str:
        """Appends a + b on both halves."""
        return self._emit(HalfArithmetic, {"operation": "add", "dtype": dtype, "a": a, "b": b})

    def sub(self, dtype: HalfType, a: Operand, b: Operand) -> str:
        """Appends a - b on both halves."""
        return self._emit(HalfArithmetic, {"operation": "sub", "dtype": dtype, "a": a, "b": b})

    def mul(self, dtype: HalfType, a: Operand, b: Operand) -> str:
        """Appends a * b on both halves."""
        return self._emit(HalfArithmetic, {"operation": "mul", "dtype": dtype, "a": a, "b": b})

    def fma(self, dtype: HalfType, a: Operand, b: Operand, c: Operand) -> str:
        """Appends a * b + c on both halves, rounded once."""
        return self._emit(HalfFma, {"dtype": dtype, "a": a, "b": b, "c": c})

    def build(self, outputs: Sequence[str]) -> Program:
        """Returns the program with the given outputs, in order."""
        return Program(self._inputs, tuple(outputs), tuple(self._instructions))
